//! Runs one VM under measurement in a process of its own: Nacelle's VMM with the requested memory backing (this program again, as
//! `nacelle-hardware --machine DESCRIPTION`).
//!
//! The child prints one line when its guest has sent hello, then answers each line of its input with a line, and ends with its
//! input.

use crate::undo::{self, ChildProcess};
use anyhow::{Context, anyhow, bail};
use nacelle_engine::BOOT_PORT;
use nacelle_hardware::{COMMAND_PORT, MARK, RECEIVE_PORT, link, tcp};
use nacelle_net::{NetNs, tap};
use nacelle_vmm::block::Slot;
use nacelle_vmm::machine::{HostPages, MemoryBacking, VmBuilder, VmConfig, VmHandle};
use nacelle_vmm::net::{self, Net, NetConfig};
use nacelle_vmm::rng::Rng;
use nacelle_vmm::snapshot;
use nacelle_vmm::vsock::{Vsock, VsockListener};
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
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The first argument of the child.
pub const CHILD_ARGUMENT: &str = "--machine";
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
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
const PREFIX_LENGTH: u8 = 24;
const TAP: &str = "tap0";

/// The backing of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
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
pub enum BackingPages {
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
pub struct VmParameters {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub memory_mib: u32,
    pub backing: Backing,
    pub pages: BackingPages,
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
pub struct StartTimes {
    /// The vCPUs may run.
    pub running: u64,
    /// The guest's init has printed its mark, if it prints one.
    pub mark: Option<u64>,
    /// The guest has sent hello over vsock.
    pub hello: u64,
}

/// Returns CLOCK_MONOTONIC in nanoseconds.
pub fn monotonic_ns() -> u64 {
    // Linux always has this clock; without it every difference would be 0.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| Duration::from(time).as_nanos() as u64)
}

/// Returns the milliseconds between two of these times.
pub fn milliseconds_between(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e6
}

/// A running VM. Dropping it kills it.
pub struct MeasuredVm {
    process: ChildProcess,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// When the process was started.
    pub started: u64,
    /// The times of its start.
    pub times: StartTimes,
}

impl MeasuredVm {
    /// Starts a VM and waits for its hello, until `limit`.
    pub fn start(description: &VmParameters, limit: Instant) -> anyhow::Result<MeasuredVm> {
        let argument = serde_json::to_string(description)?;
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let started = monotonic_ns();
        let mut command = Command::new(program);
        let spawned =
            undo::spawn(command.args([CHILD_ARGUMENT, &argument]).stdin(Stdio::piped()).stdout(Stdio::piped()));
        let mut process = spawned.context("cannot start the process of a VM")?;
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (commands, answers) = pipes.context("the process of a VM has no pipes")?;
        let times = StartTimes { running: 0, mark: None, hello: 0 };
        let mut vm = MeasuredVm { process, commands, answers: BufReader::new(answers), started, times };
        vm.times = serde_json::from_str(&vm.read_answer(limit)?).context("the VM did not start")?;
        Ok(vm)
    }

    /// Returns the PID of the process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends a command and returns the numbers of the answer, which must arrive by `limit`.
    pub fn query(&mut self, command: &str, limit: Instant) -> anyhow::Result<Vec<f64>> {
        writeln!(self.commands, "{command}").context("the VM has ended")?;
        let line = self.read_answer(limit)?;
        parse_numbers(&line).with_context(|| format!("the VM cannot {command}"))
    }

    /// Like [`query`](MeasuredVm::query), for a command whose answer is one number.
    pub fn query_one(&mut self, command: &str, limit: Instant) -> anyhow::Result<f64> {
        let numbers = self.query(command, limit)?;
        numbers.first().copied().with_context(|| format!("the answer to {command:?} has no number"))
    }

    fn read_answer(&mut self, limit: Instant) -> anyhow::Result<String> {
        // The child writes whole lines, and the next one only after a command.
        let wait = limit.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        let mut event = [PollFd::new(self.answers.get_ref().as_fd(), PollFlags::POLLIN)];
        if poll(&mut event, timeout).context("cannot wait for a VM")? == 0 {
            bail!("the VM did not answer within {:.1} s", wait.as_secs_f64());
        }
        let mut line = String::new();
        match self.answers.read_line(&mut line).context("cannot read from a VM")? {
            0 => bail!("the process of the VM ended; standard error says why"),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
}

/// Parses an answer: `ok` and numbers.
fn parse_numbers(line: &str) -> anyhow::Result<Vec<f64>> {
    let rest = line.strip_prefix("ok").ok_or_else(|| anyhow!("{line}"))?;
    rest.split_whitespace()
        .map(|word| word.parse().with_context(|| format!("{line:?} contains a word that is not a number")))
        .collect()
}

/// Runs the child: starts the VM, reports its hello, and answers the commands of standard input.
pub fn serve(argument: &str) -> anyhow::Result<()> {
    let description: VmParameters = serde_json::from_str(argument).context("cannot parse the description of the VM")?;
    let mut namespaces = CloneFlags::CLONE_NEWNS;
    namespaces.set(CloneFlags::CLONE_NEWNET, description.network);
    unshare(namespaces).context("cannot create namespaces")?;

    let vsock = Vsock::new(3).context("cannot create the vsock device")?;
    let listener = vsock.listen(BOOT_PORT).context("cannot listen for the hello")?;
    let console = Arc::new(Mutex::new(GuestConsole::default()));
    let vm = start_vm(&description, &vsock, &console)?;
    let running = monotonic_ns();
    // The agent waits for its configuration as long as this connection is open.
    let _hello_stream = report_hello(&listener, &console, running).map_err(|error| {
        let output = console.lock().unwrap_or_else(PoisonError::into_inner).tail();
        anyhow!("the guest sent no hello: {error:#}; {:?}; its console ends with: {output}", vm.exit())
    })?;
    serve_commands(&vm, &vsock)
}

/// Creates the VM with its devices, and boots or restores it.
fn start_vm(description: &VmParameters, vsock: &Vsock, console: &Arc<Mutex<GuestConsole>>) -> anyhow::Result<VmHandle> {
    let memory_file = memory_file(description)?;
    let saved = match &description.from {
        Some(from) => Some(snapshot::open(from).context("cannot read the snapshot")?),
        None => None,
    };
    let mut builder = match (&saved, &memory_file) {
        (Some(saved), _) => saved.builder(),
        (None, Some(file)) => VmBuilder::with_saved_memory(vm_config(description), 0, file),
        (None, None) => VmBuilder::new(vm_config(description)),
    }
    .context("cannot create a VM")?;
    let sink = console.clone();
    builder.serial(Box::new(move |bytes| sink.lock().unwrap_or_else(PoisonError::into_inner).push(bytes)))?;
    if let Some(disk) = &description.disk {
        let length = disk.metadata().with_context(|| format!("cannot look at {}", disk.display()))?.len();
        builder.attach(Slot::read_write("disk", disk, length)?.device())?;
    }
    if description.network {
        builder.attach(create_interface()?)?;
    }
    builder.attach(vsock.device())?;
    builder.attach(Rng::new().device())?;
    match &saved {
        Some(saved) => {
            let vm = builder.restore(saved.state()).context("cannot restore the VM")?;
            vm.resume()?;
            Ok(vm)
        }
        None => builder.start().context("cannot start the VM"),
    }
}

/// Waits for the guest's hello and prints the times of the start; returns the connection.
fn report_hello(listener: &VsockListener, console: &Mutex<GuestConsole>, running: u64) -> anyhow::Result<UnixStream> {
    let mut stream = listener.accept(STEP_TIMEOUT)?;
    stream.read_exact(&mut [0; 4])?;
    let mark = console.lock().unwrap_or_else(PoisonError::into_inner).mark;
    let times = StartTimes { running, mark, hello: monotonic_ns() };
    println!("{}", serde_json::to_string(&times)?);
    Ok(stream)
}

/// Answers each line of standard input with a line, until its end.
fn serve_commands(vm: &VmHandle, vsock: &Vsock) -> anyhow::Result<()> {
    let mut guest = None;
    for command in std::io::stdin().lines() {
        let command = command.context("cannot read commands")?;
        let answer = if let Some(directory) = command.strip_prefix(SAVE) {
            let begun = monotonic_ns();
            let paused = vm.pause().map_err(anyhow::Error::from);
            let saved = paused.and_then(|()| Ok(snapshot::save(vm, Path::new(directory))?));
            saved.map(|()| vec![milliseconds_between(begun, monotonic_ns())])
        } else {
            connect_guest(&mut guest, vsock).and_then(|guest| guest.run_command(&command))
        };
        match answer {
            Ok(numbers) => println!("{}", numbers.iter().fold("ok".to_owned(), |text, one| format!("{text} {one}"))),
            Err(error) => println!("{}", format!("error {error:#}").replace('\n', " ")),
        }
    }
    Ok(())
}

fn vm_config(description: &VmParameters) -> VmConfig {
    VmConfig {
        memory_mib: description.memory_mib,
        backing: if description.backing == Backing::Memfd { MemoryBacking::Shared } else { MemoryBacking::Private },
        pages: match description.pages {
            BackingPages::Small => HostPages::Small,
            BackingPages::Transparent => HostPages::Transparent,
            BackingPages::Hugetlb => HostPages::Hugetlb,
        },
        kernel: description.kernel.clone(),
        initrd: Some(description.initrd.clone()),
        cmdline: PARAMETERS.map(str::to_owned).to_vec(),
        ..VmConfig::default()
    }
}

/// Returns the file of privately mapped memory, with all pages resident: on a tmpfs of this process with such pages, or of the
/// hugetlb pool.
fn memory_file(description: &VmParameters) -> anyhow::Result<Option<File>> {
    if description.backing != Backing::File || description.from.is_some() {
        return Ok(None);
    }
    let file = match description.pages {
        BackingPages::Hugetlb => {
            let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
            File::from(memfd_create(c"memory", flags).context("cannot create a file in the hugetlb pool")?)
        }
        pages => {
            let nothing = None::<&str>;
            mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing)
                .context("cannot make the mounts private")?;
            let huge = if pages == BackingPages::Small { "huge=never" } else { "huge=always" };
            let plain = pages == BackingPages::Small;
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
                .context("cannot create a file on a tmpfs")?
        }
    };
    let length = i64::from(description.memory_mib) << 20;
    file.set_len(length.unsigned_abs())?;
    fallocate(&file, FallocateFlags::empty(), 0, length).context("cannot allocate the pages of the memory file")?;
    // A part that was never written counts as a hole, and a VM has anonymous memory in its place. A file of the pool has none.
    if description.pages != BackingPages::Hugetlb {
        let zeros = vec![0; 1 << 20];
        for at in (0..length.unsigned_abs()).step_by(zeros.len()) {
            file.write_all_at(&zeros, at).context("cannot write the pages of the memory file")?;
        }
    }
    Ok(Some(file))
}

/// Creates the guest's interface, whose tap has an address in this process's network namespace.
fn create_interface() -> anyhow::Result<Box<dyn nacelle_vmm::Device>> {
    let here = NetNs::open(Path::new("/proc/thread-self/ns/net"))?;
    let tap = tap::create(&here, TAP)?;
    link::set_up(TAP, HOST_ADDRESS, PREFIX_LENGTH).context("cannot give the tap an address")?;
    let vhost = net::open_vhost(1).unwrap_or_default();
    Ok(Net::new(NetConfig { taps: vec![tap.fd], mac: [2, 0, 0, 0, 0, 1], mtu: 1500, vhost })?.device())
}

/// The guest's console output, and when it printed the mark.
#[derive(Default)]
struct GuestConsole {
    output: Vec<u8>,
    mark: Option<u64>,
}

impl GuestConsole {
    fn push(&mut self, bytes: &[u8]) {
        /// The maximum output that is kept, in bytes: enough to see why a guest has ended.
        const MAX_OUTPUT: usize = 64 << 10;
        self.output.extend_from_slice(bytes);
        if self.mark.is_none() && self.output.windows(MARK.len()).any(|window| window == MARK.as_bytes()) {
            self.mark = Some(monotonic_ns());
        }
        if self.output.len() > MAX_OUTPUT {
            self.output.drain(..MAX_OUTPUT / 2);
        }
    }

    fn tail(&self) -> String {
        String::from_utf8_lossy(&self.output[self.output.len().saturating_sub(2048)..]).into_owned()
    }
}

/// The connection to the guest's loops.
struct GuestCommands {
    answers: BufReader<UnixStream>,
    commands: UnixStream,
}

fn connect_guest<'g>(guest: &'g mut Option<GuestCommands>, vsock: &Vsock) -> anyhow::Result<&'g mut GuestCommands> {
    if guest.is_none() {
        let commands =
            vsock.connect(COMMAND_PORT, STEP_TIMEOUT).context("cannot connect to the guest's command port")?;
        commands.set_read_timeout(Some(STEP_TIMEOUT))?;
        *guest = Some(GuestCommands { answers: BufReader::new(commands.try_clone()?), commands });
    }
    guest.as_mut().context("the connection to the guest is missing")
}

impl GuestCommands {
    fn query(&mut self, command: &str) -> anyhow::Result<Vec<f64>> {
        self.commands.write_all(format!("{command}\n").as_bytes())?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        parse_numbers(line.trim_end())
    }

    fn run_command(&mut self, command: &str) -> anyhow::Result<Vec<f64>> {
        if let Some(count) = command.strip_prefix(ECHO) {
            let one = |_| {
                let begun = monotonic_ns();
                self.query("nothing").map(|_| milliseconds_between(begun, monotonic_ns()))
            };
            (0..count.parse::<usize>()?).map(one).collect()
        } else if let Some(time) = command.strip_prefix(SEND) {
            let listener = TcpListener::bind((HOST_ADDRESS, 0))?;
            let SocketAddr::V4(here) = listener.local_addr()? else { bail!("the listener has no IPv4 address") };
            let receiver = std::thread::spawn(move || tcp::receive(&listener, STEP_TIMEOUT));
            self.query(&format!("send {HOST_ADDRESS} {} {time}", here.port()))?;
            Ok(vec![join_transfer(receiver)?])
        } else if let Some(time) = command.strip_prefix(RECEIVE) {
            let time = Duration::from_millis(time.parse()?);
            let to = SocketAddrV4::new(GUEST_ADDRESS, RECEIVE_PORT);
            let sender = std::thread::spawn(move || tcp::send(to, time, STEP_TIMEOUT));
            let received = self.query("receive")?;
            join_transfer(sender)?;
            Ok(received)
        } else if command == "address" {
            self.query(&format!("address {GUEST_ADDRESS} {PREFIX_LENGTH}"))
        } else {
            self.query(command)
        }
    }
}

fn join_transfer(thread: std::thread::JoinHandle<std::io::Result<f64>>) -> anyhow::Result<f64> {
    Ok(thread.join().map_err(|_panic| anyhow!("the thread of a TCP connection panicked"))??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_ok_and_numbers() {
        assert_eq!(parse_numbers("ok").unwrap(), Vec::<f64>::new());
        assert_eq!(parse_numbers("ok 1 2.5").unwrap(), [1.0, 2.5]);
        assert_eq!(parse_numbers("error chase: why").unwrap_err().to_string(), "error chase: why");
        assert!(parse_numbers("ok one").is_err() && parse_numbers("").is_err());
    }

    #[test]
    fn the_console_finds_the_mark_in_pieces_and_stays_small() {
        let mut console = GuestConsole::default();
        let (one, two) = MARK.split_at(10);
        console.push(one.as_bytes());
        assert!(console.mark.is_none());
        console.push(two.as_bytes());
        let mark = console.mark;
        assert!(mark.is_some());
        (0..100).for_each(|_| console.push(&[b'x'; 4096]));
        assert_eq!(console.mark, mark);
        assert!(console.output.len() <= 64 << 10 && console.tail().len() == 2048);
    }

    #[test]
    fn backings_and_pages_have_readable_names_in_json() {
        let text = serde_json::to_string(&(Backing::File, BackingPages::Hugetlb)).unwrap();
        assert_eq!(text, r#"["private file","2 MiB hugetlb"]"#);
    }
}
