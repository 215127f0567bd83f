//! Runs one VM under measurement in a process of its own: Nacelle's VMM with the requested memory backing (this program again, as
//! `nacelle-hardware --machine DESCRIPTION`).
//!
//! The child prints one line when its guest has sent hello, then answers each line of its input with a line, and ends with its
//! input.

use crate::undo::{self, Process};
use anyhow::{Context, anyhow, bail};
use nacelle_engine::BOOT_PORT;
use nacelle_hardware::{COMMANDS, MARK, RECEIVE_PORT, link, tcp};
use nacelle_net::{NetNs, tap};
use nacelle_vmm::block::Slot;
use nacelle_vmm::machine::{HostPages, MemoryBacking, VmBuilder, VmConfig};
use nacelle_vmm::net::{self, Net, NetConfig};
use nacelle_vmm::rng::Rng;
use nacelle_vmm::snapshot;
use nacelle_vmm::vsock::Vsock;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The first argument of the child.
pub const MACHINE: &str = "--machine";
/// The command `save DIRECTORY`: pauses and saves the VM; the answer is the duration in milliseconds.
pub const SAVE: &str = "save ";
/// The command `echo COUNT`: makes the guest answer this often; the answer is the milliseconds of each.
pub const ECHO: &str = "echo ";
/// The command `tcp-send MILLISECONDS`: the guest sends to the host for that long; the answer is bytes per second.
pub const SEND: &str = "tcp-send ";
/// The command `tcp-receive MILLISECONDS`: the host sends to the guest for that long; the answer is bytes per second.
pub const RECEIVE: &str = "tcp-receive ";

/// The kernel parameters of every VM here: those of engine `kvm`.
pub const PARAMETERS: [&str; 4] = ["console=ttyS0", "quiet", "panic=-1", "noreplace-smp"];
/// The time limit of one step of the child: more than any takes. The parent has limits of its own.
const PATIENCE: Duration = Duration::from_secs(120);
const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
const PREFIX: u8 = 24;
const TAP: &str = "tap0";

/// The backing of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Under {
    /// Anonymous memory.
    #[serde(rename = "anonymous")]
    Anonymous,
    /// A memfd, mapped shared.
    #[serde(rename = "memfd")]
    Memfd,
    /// A file with resident pages, mapped privately, like that of a snapshot.
    #[serde(rename = "private file")]
    File,
}

/// The pages of the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pages {
    /// 4 KiB only.
    #[serde(rename = "4 KiB")]
    Small,
    /// Transparent huge pages.
    #[serde(rename = "2 MiB transparent")]
    Transparent,
    /// Pages of the hugetlb pool.
    #[serde(rename = "2 MiB hugetlb")]
    Hugetlb,
}

/// The description of a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Description {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub memory_mib: u32,
    pub under: Under,
    pub pages: Pages,
    /// A raw, writable file for the disk `/dev/vda`.
    pub disk: Option<PathBuf>,
    /// An interface `eth0`, with a tap in a network namespace of the VM's process.
    pub network: bool,
    /// The directory of a saved VM that is restored instead of booting.
    pub from: Option<PathBuf>,
    /// An empty directory of the VM's own.
    pub directory: PathBuf,
}

/// The times of events (CLOCK_MONOTONIC, nanoseconds).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Times {
    /// The vCPUs may run.
    pub running: u64,
    /// The guest's init has printed its mark, if it prints one.
    pub mark: Option<u64>,
    /// The guest has sent hello over vsock.
    pub hello: u64,
}

/// Returns CLOCK_MONOTONIC in nanoseconds.
pub fn now() -> u64 {
    // Linux always has this clock; without it every difference would be 0.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| Duration::from(time).as_nanos() as u64)
}

/// Returns the milliseconds between two of these times.
pub fn ms(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e6
}

/// A running VM. Dropping it kills it.
pub struct Machine {
    process: Process,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// When the process was started.
    pub started: u64,
    /// The times of its start.
    pub times: Times,
}

impl Machine {
    /// Starts a VM and waits for its hello, until `limit`.
    pub fn start(description: &Description, limit: Instant) -> anyhow::Result<Machine> {
        let argument = serde_json::to_string(description)?;
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let started = now();
        let mut command = Command::new(program);
        let spawned = undo::spawn(command.args([MACHINE, &argument]).stdin(Stdio::piped()).stdout(Stdio::piped()));
        let mut process = spawned.context("cannot start the process of a machine")?;
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (commands, answers) = pipes.context("the process of a machine has no pipes")?;
        let times = Times { running: 0, mark: None, hello: 0 };
        let mut machine = Machine { process, commands, answers: BufReader::new(answers), started, times };
        machine.times = serde_json::from_str(&machine.line(limit)?).context("the machine did not start")?;
        Ok(machine)
    }

    /// Returns the PID of the process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends a command and returns the numbers of the answer, which must arrive by `limit`.
    pub fn ask(&mut self, command: &str, limit: Instant) -> anyhow::Result<Vec<f64>> {
        writeln!(self.commands, "{command}").context("the machine has ended")?;
        let line = self.line(limit)?;
        numbers(&line).with_context(|| format!("the machine cannot {command}"))
    }

    /// Like [`ask`](Machine::ask), for a command whose answer is one number.
    pub fn ask_one(&mut self, command: &str, limit: Instant) -> anyhow::Result<f64> {
        let numbers = self.ask(command, limit)?;
        numbers.first().copied().with_context(|| format!("the answer to {command:?} has no number"))
    }

    fn line(&mut self, limit: Instant) -> anyhow::Result<String> {
        // The child writes whole lines, and the next one only after a command.
        let wait = limit.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        let mut event = [PollFd::new(self.answers.get_ref().as_fd(), PollFlags::POLLIN)];
        if poll(&mut event, timeout).context("cannot wait for a machine")? == 0 {
            bail!("the machine did not answer within {:.1} s", wait.as_secs_f64());
        }
        let mut line = String::new();
        match self.answers.read_line(&mut line).context("cannot read from a machine")? {
            0 => bail!("the process of the machine ended; standard error says why"),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
}

/// Parses an answer: `ok` and numbers.
fn numbers(line: &str) -> anyhow::Result<Vec<f64>> {
    let rest = line.strip_prefix("ok").ok_or_else(|| anyhow!("{line}"))?;
    rest.split_whitespace()
        .map(|word| word.parse().with_context(|| format!("{line:?} has other words than numbers")))
        .collect()
}

/// Runs the child.
pub fn serve(argument: &str) -> anyhow::Result<()> {
    let description: Description = serde_json::from_str(argument).context("no description of a machine")?;
    let mut namespaces = CloneFlags::CLONE_NEWNS;
    namespaces.set(CloneFlags::CLONE_NEWNET, description.network);
    unshare(namespaces).context("cannot make namespaces")?;

    let vsock = Vsock::new(3).context("no vsock device")?;
    let listener = vsock.listen(BOOT_PORT).context("no port for the hello")?;
    let console = Arc::new(Mutex::new(Console::default()));
    let file = file(&description)?;
    let saved = match &description.from {
        Some(from) => Some(snapshot::open(from).context("cannot read the snapshot")?),
        None => None,
    };
    let mut builder = match (&saved, &file) {
        (Some(saved), _) => saved.builder(),
        (None, Some(file)) => VmBuilder::with_saved_memory(config(&description), file),
        (None, None) => VmBuilder::new(config(&description)),
    }
    .context("cannot make a machine")?;
    let sink = console.clone();
    builder.serial(Box::new(move |bytes| sink.lock().unwrap_or_else(PoisonError::into_inner).push(bytes)))?;
    if let Some(disk) = &description.disk {
        let length = disk.metadata().with_context(|| format!("cannot look at {}", disk.display()))?.len();
        builder.attach(Slot::read_write("disk", disk, length)?.device())?;
    }
    if description.network {
        builder.attach(interface()?)?;
    }
    builder.attach(vsock.device())?;
    builder.attach(Rng::new().device())?;
    let machine = match &saved {
        Some(saved) => {
            let machine = builder.restore(saved.state()).context("cannot restore the machine")?;
            machine.resume()?;
            machine
        }
        None => builder.start().context("cannot start the machine")?,
    };
    let running = now();
    let hello = listener.accept(PATIENCE).and_then(|mut stream| match stream.read_exact(&mut [0; 4]) {
        // The agent waits for its configuration as long as this connection is open.
        Ok(()) => Ok(stream),
        Err(_closed) => Err(nacelle_vmm::vsock::VsockError::Stopped),
    });
    let times = |hello| Times { running, mark: console.lock().unwrap_or_else(PoisonError::into_inner).mark, hello };
    let _stream = match hello {
        Ok(stream) => {
            println!("{}", serde_json::to_string(&times(now()))?);
            stream
        }
        Err(error) => {
            let said = console.lock().unwrap_or_else(PoisonError::into_inner).tail();
            bail!("the guest said no hello: {error}; {:?}; its console ends with: {said}", machine.exit());
        }
    };
    let mut guest = None;
    for command in std::io::stdin().lines() {
        let command = command.context("cannot read commands")?;
        let answer = if let Some(directory) = command.strip_prefix(SAVE) {
            let begun = now();
            let saved = machine.pause().map_err(anyhow::Error::from);
            saved.and_then(|()| Ok(snapshot::save(&machine, Path::new(directory))?)).map(|()| vec![ms(begun, now())])
        } else {
            conversation(&mut guest, &vsock).and_then(|guest| guest.command(&command))
        };
        match answer {
            Ok(numbers) => println!("{}", numbers.iter().fold("ok".to_owned(), |text, one| format!("{text} {one}"))),
            Err(error) => println!("{}", format!("error {error:#}").replace('\n', " ")),
        }
    }
    Ok(())
}

fn config(description: &Description) -> VmConfig {
    VmConfig {
        memory_mib: description.memory_mib,
        backing: if description.under == Under::Memfd { MemoryBacking::Shared } else { MemoryBacking::Private },
        pages: match description.pages {
            Pages::Small => HostPages::Small,
            Pages::Transparent => HostPages::Transparent,
            Pages::Hugetlb => HostPages::Hugetlb,
        },
        kernel: description.kernel.clone(),
        initrd: Some(description.initrd.clone()),
        cmdline: PARAMETERS.map(str::to_owned).to_vec(),
        ..VmConfig::default()
    }
}

/// Returns the file of privately mapped memory, with all pages resident: on a tmpfs of this process with such pages, or of the
/// hugetlb pool.
fn file(description: &Description) -> anyhow::Result<Option<File>> {
    if description.under != Under::File || description.from.is_some() {
        return Ok(None);
    }
    let file = match description.pages {
        Pages::Hugetlb => {
            let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
            File::from(memfd_create(c"memory", flags).context("cannot make a file of the hugetlb pool")?)
        }
        pages => {
            let nothing = None::<&str>;
            mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing)
                .context("cannot part with mounts")?;
            let huge = if pages == Pages::Small { "huge=never" } else { "huge=always" };
            let plain = pages == Pages::Small;
            let mounted = mount(Some("memory"), &description.directory, Some("tmpfs"), MsFlags::empty(), Some(huge));
            // A kernel without huge pages does not know the option.
            let mounted = match mounted {
                Err(_) if plain => {
                    mount(Some("memory"), &description.directory, Some("tmpfs"), MsFlags::empty(), nothing)
                }
                mounted => mounted,
            };
            mounted.with_context(|| format!("cannot mount a tmpfs with {huge}"))?;
            let path = description.directory.join("memory");
            File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(path)
                .context("cannot make a file on a tmpfs")?
        }
    };
    let length = i64::from(description.memory_mib) << 20;
    file.set_len(length.unsigned_abs())?;
    fallocate(&file, FallocateFlags::empty(), 0, length).context("cannot have the pages of a file of memory")?;
    Ok(Some(file))
}

/// Creates the guest's interface, whose tap has an address in this process's network namespace.
fn interface() -> anyhow::Result<Box<dyn nacelle_vmm::Device>> {
    let here = NetNs::open(Path::new("/proc/thread-self/ns/net"))?;
    let tap = tap::create(&here, TAP)?;
    link::set_up(TAP, HOST_ADDRESS, PREFIX).context("cannot give the tap an address")?;
    let vhost = net::open_vhost(1).unwrap_or_default();
    Ok(Net::new(NetConfig { taps: vec![tap.fd], mac: [2, 0, 0, 0, 0, 1], mtu: 1500, vhost })?.device())
}

/// The guest's console output, and when it printed the mark.
#[derive(Default)]
struct Console {
    said: Vec<u8>,
    mark: Option<u64>,
}

impl Console {
    fn push(&mut self, bytes: &[u8]) {
        /// The maximum output that is kept, in bytes: enough to see why a guest has ended.
        const MOST: usize = 64 << 10;
        self.said.extend_from_slice(bytes);
        if self.mark.is_none() && self.said.windows(MARK.len()).any(|window| window == MARK.as_bytes()) {
            self.mark = Some(now());
        }
        if self.said.len() > MOST {
            self.said.drain(..MOST / 2);
        }
    }

    fn tail(&self) -> String {
        String::from_utf8_lossy(&self.said[self.said.len().saturating_sub(2048)..]).into_owned()
    }
}

/// The connection to the guest's loops.
struct Guest {
    answers: BufReader<UnixStream>,
    commands: UnixStream,
}

fn conversation<'g>(guest: &'g mut Option<Guest>, vsock: &Vsock) -> anyhow::Result<&'g mut Guest> {
    if guest.is_none() {
        let commands = vsock.connect(COMMANDS, PATIENCE).context("the guest takes no commands")?;
        commands.set_read_timeout(Some(PATIENCE))?;
        *guest = Some(Guest { answers: BufReader::new(commands.try_clone()?), commands });
    }
    guest.as_mut().context("the guest has gone")
}

impl Guest {
    fn ask(&mut self, command: &str) -> anyhow::Result<Vec<f64>> {
        self.commands.write_all(format!("{command}\n").as_bytes())?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        numbers(line.trim_end())
    }

    fn command(&mut self, command: &str) -> anyhow::Result<Vec<f64>> {
        if let Some(count) = command.strip_prefix(ECHO) {
            let one = |_| {
                let begun = now();
                self.ask("nothing").map(|_| ms(begun, now()))
            };
            (0..count.parse::<usize>()?).map(one).collect()
        } else if let Some(time) = command.strip_prefix(SEND) {
            let listener = TcpListener::bind((HOST_ADDRESS, 0))?;
            let SocketAddr::V4(here) = listener.local_addr()? else { bail!("the port has no address of version 4") };
            let receiver = std::thread::spawn(move || tcp::receive(&listener, PATIENCE));
            self.ask(&format!("send {HOST_ADDRESS} {} {time}", here.port()))?;
            Ok(vec![joined(receiver)?])
        } else if let Some(time) = command.strip_prefix(RECEIVE) {
            let time = Duration::from_millis(time.parse()?);
            let to = SocketAddrV4::new(GUEST_ADDRESS, RECEIVE_PORT);
            let sender = std::thread::spawn(move || tcp::send(to, time, PATIENCE));
            let received = self.ask("receive")?;
            joined(sender)?;
            Ok(received)
        } else if command == "address" {
            self.ask(&format!("address {GUEST_ADDRESS} {PREFIX}"))
        } else {
            self.ask(command)
        }
    }
}

fn joined(thread: std::thread::JoinHandle<std::io::Result<f64>>) -> anyhow::Result<f64> {
    Ok(thread.join().map_err(|_panic| anyhow!("the thread of a TCP connection panicked"))??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_ok_and_numbers() {
        assert_eq!(numbers("ok").unwrap(), Vec::<f64>::new());
        assert_eq!(numbers("ok 1 2.5").unwrap(), [1.0, 2.5]);
        assert_eq!(numbers("error chase: why").unwrap_err().to_string(), "error chase: why");
        assert!(numbers("ok one").is_err() && numbers("").is_err());
    }

    #[test]
    fn the_console_finds_the_mark_in_pieces_and_stays_small() {
        let mut console = Console::default();
        let (one, two) = MARK.split_at(10);
        console.push(one.as_bytes());
        assert!(console.mark.is_none());
        console.push(two.as_bytes());
        let mark = console.mark;
        assert!(mark.is_some());
        (0..100).for_each(|_| console.push(&[b'x'; 4096]));
        assert_eq!(console.mark, mark);
        assert!(console.said.len() <= 64 << 10 && console.tail().len() == 2048);
    }

    #[test]
    fn a_description_has_words_that_people_read() {
        let text = serde_json::to_string(&(Under::File, Pages::Hugetlb)).unwrap();
        assert_eq!(text, r#"["private file","2 MiB hugetlb"]"#);
    }
}
