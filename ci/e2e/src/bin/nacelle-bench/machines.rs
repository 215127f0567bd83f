//! Runs one VM under measurement in a process of its own: Nacelle's VMM (this program again, as `nacelle-bench --machine`) or
//! plain QEMU microvm, with the same kernel, initramfs and disks. Both need working KVM.

use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{BOOT_PORT, DiskSpec, Engine, MachineSpec, NicSpec};
use nacelle_net::{NetNs, tap};
use nacelle_proto::agent::AgentHello;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::time::{ClockId, clock_gettime};
use prost::Message;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;
use vsock::{VMADDR_CID_ANY, VsockListener, VsockStream};

/// The port on which the guest of the engines' contract accepts commands.
const COMMANDS: u32 = 1025;
/// The time limit of a start; none takes as long.
pub const LIMIT: Duration = Duration::from_secs(120);
/// The command `save DIRECTORY`: pauses and saves one of our VMs; the answer is the duration in milliseconds.
pub const SAVE: &str = "save ";
/// The first argument of `nacelle-bench --machine DESCRIPTION`.
pub const SERVE: &str = "--machine";

/// The VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vmm {
    /// Nacelle's VMM.
    Ours,
    /// `qemu -M microvm` with KVM.
    Qemu,
}

/// The description of a VM for both VMMs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub memory_mib: u32,
    /// Raw, writable disk files.
    pub disks: Vec<PathBuf>,
    /// The name of a tap, created in this network namespace.
    pub tap: Option<String>,
    /// The directory of a saved VM that is restored instead of booting (ours only).
    pub from: Option<PathBuf>,
    /// A directory of the VM's own.
    pub directory: PathBuf,
}

/// The durations of a start in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    /// From the start of the process to the guest's first message.
    pub total: f64,
    /// The VMM's part until the guest ran; only ours reports it.
    pub setup: Option<f64>,
    /// The guest kernel's part until its init ran, by its own clock.
    pub kernel: f64,
    /// The init's part until it sent the message.
    pub init: f64,
}

impl Timeline {
    /// Returns the rest: the VMM, and the kernel before it has a clock.
    pub fn vmm(&self) -> f64 {
        self.total - self.kernel - self.init
    }

    /// Returns the time that the kernel takes before it has a clock.
    pub fn unclocked(&self) -> f64 {
        self.setup.map_or(0.0, |setup| self.vmm() - setup)
    }
}

/// A running VM. Dropping it kills it.
pub struct Machine {
    process: Child,
    way: Way,
    pub timeline: Timeline,
}

enum Way {
    Ours { commands: ChildStdin, answers: BufReader<ChildStdout> },
    Qemu { cid: u32, _boot: VsockStream },
}

/// The guest's first message, and when it arrived (CLOCK_MONOTONIC of the node, nanoseconds).
#[derive(Serialize, Deserialize)]
struct Hello {
    at: u64,
    /// When the guest began to run; 0 if unknown.
    running: u64,
    started: u64,
    sent: u64,
}

/// Returns CLOCK_MONOTONIC in nanoseconds.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("the node has a clock");
    u64::try_from(Duration::from(time).as_nanos()).unwrap_or(u64::MAX)
}

/// Reads the agent's first message, or that of the contract's guest, which contains no clock.
fn read_hello(mut stream: impl Read) -> Hello {
    let mut head = [0; 4];
    stream.read_exact(&mut head).expect("a hello");
    let at = now();
    if &head == b"hell" {
        return Hello { at, running: 0, started: 0, sent: 0 };
    }
    let mut body = vec![0; u32::from_le_bytes(head).min(1 << 20) as usize];
    stream.read_exact(&mut body).expect("a whole hello");
    let hello = AgentHello::decode(body.as_slice()).expect("the agent's hello");
    Hello { at, running: 0, started: hello.started_nanos, sent: hello.sent_nanos }
}

impl Machine {
    /// Starts a VM and waits for its first message.
    pub fn start(vmm: Vmm, setup: &Setup) -> Machine {
        let (process, way, started, hello) = match vmm {
            Vmm::Ours => start_ours(setup),
            Vmm::Qemu => start_qemu(setup),
        };
        let ms = |nanos: u64| nanos as f64 / 1e6;
        let timeline = Timeline {
            total: ms(hello.at - started),
            setup: hello.running.checked_sub(started).map(ms),
            kernel: ms(hello.started),
            init: ms(hello.sent - hello.started),
        };
        Machine { process, way, timeline }
    }

    /// Sends the contract's guest a command and returns its answer.
    pub fn ask(&mut self, command: &str) -> String {
        match &mut self.way {
            Way::Ours { commands, answers } => {
                writeln!(commands, "{command}").expect("the machine runs");
                let mut line = String::new();
                answers.read_line(&mut line).expect("the machine answers");
                line.trim_end().to_owned()
            }
            Way::Qemu { cid, .. } => {
                converse(VsockStream::connect_with_cid_port(*cid, COMMANDS).expect("a connection"), command)
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn converse(mut stream: impl Read + Write, command: &str) -> String {
    let mut answer = String::new();
    writeln!(stream, "{command}").expect("the guest takes commands");
    stream.read_to_string(&mut answer).expect("the guest answers");
    answer.trim_end().to_owned()
}

fn start_ours(setup: &Setup) -> (Child, Way, u64, Hello) {
    let description = serde_json::to_string(setup).expect("a description is plain data");
    let started = now();
    let mut process = Command::new(std::env::current_exe().expect("this program has a path"))
        .args([SERVE, &description])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program can be started");
    let commands = process.stdin.take().expect("its input is ours");
    let mut answers = BufReader::new(process.stdout.take().expect("its output is ours"));
    let mut line = String::new();
    answers.read_line(&mut line).expect("its output can be read");
    let hello = serde_json::from_str(&line).unwrap_or_else(|error| panic!("no hello of our machine: {error}: {line}"));
    (process, Way::Ours { commands, answers }, started, hello)
}

/// Runs the child of `start_ours`: starts a VM of our engine, prints its first message as JSON, then one line of answer for each
/// line of command, until the input ends.
pub fn serve(description: &str) -> ExitCode {
    let setup: Setup = serde_json::from_str(description).expect("the parent describes the machine");
    let disks = setup.disks.iter().enumerate();
    let disks = disks.map(|(n, path)| DiskSpec::File { path: path.clone(), read_only: false, serial: format!("d{n}") });
    let nic = setup.tap.as_ref().map(|name| {
        let here = NetNs::open(Path::new("/proc/thread-self/ns/net")).expect("this network namespace");
        let tap = tap::create(&here, name).expect("a tap");
        NicSpec { tap: tap.fd, more_queues: vec![], dhcp: None, mac: [2, 0, 0, 0, 0, 1], mtu: 1500 }
    });
    let spec = MachineSpec {
        vcpus: 1,
        topology: None,
        cpu_model: None,
        memory_mib: setup.memory_mib,
        reserve_mib: 0,
        memory_pages: Default::default(),
        console: Default::default(),
        kernel: setup.kernel,
        initrd: setup.initrd,
        cmdline: vec![],
        disks: disks.collect(),
        nics: nic.into_iter().collect(),
        console_log: setup.directory.join("console.log"),
        run_dir: setup.directory,
        guest_cid: 3,
        shares: Vec::new(),
    };
    let engine = KvmEngine::new();
    let spec = spec.check(&engine.limits()).expect("a good description");
    let pausable = "a machine that can stand still";
    let machine = match &setup.from {
        None => engine.start(spec).expect("a machine"),
        Some(from) => {
            let machine = engine.as_restorer().expect("a restorer").restore(spec, from).expect("a restored machine");
            machine.as_pausable().expect(pausable).resume().expect("to resume");
            machine
        }
    };
    let running = now();
    let link = machine.link();
    // The agent waits for its configuration as long as this connection is open.
    let boot = match link.listen(BOOT_PORT).and_then(|incoming| incoming.accept(LIMIT)) {
        Ok(stream) => stream,
        Err(error) => panic!("no hello: {error}; {:?}", machine.wait(Duration::ZERO)),
    };
    println!("{}", serde_json::json!(Hello { running, ..read_hello(&boot) }));
    for command in std::io::stdin().lines() {
        let command = command.expect("a line");
        if let Some(directory) = command.strip_prefix(SAVE) {
            let begin = now();
            machine.as_pausable().expect(pausable).pause().expect("to pause");
            machine.as_snapshottable().expect("a machine that can be saved").save(directory.as_ref()).expect("to save");
            println!("{}", (now() - begin) as f64 / 1e6);
            continue;
        }
        let stream = link.connect(COMMANDS, LIMIT).expect("the guest takes connections");
        println!("{}", converse(&stream, &command));
    }
    ExitCode::SUCCESS
}

fn start_qemu(setup: &Setup) -> (Child, Way, u64, Hello) {
    // Context ids below 3 are reserved; each VM of this process has its own.
    let cid = 3 + std::process::id() % 1_000_000;
    let boot = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, BOOT_PORT).expect("vsock's boot port is free");
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-M", "microvm,x-option-roms=off,acpi=off,pit=off,pic=off,rtc=on,isa-serial=on,accel=kvm"])
        .args(["-cpu", "host", "-smp", "1", "-m", &format!("{}M", setup.memory_mib)])
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-global"])
        .args(["virtio-mmio.force-legacy=off", "-append", "console=ttyS0 quiet reboot=t panic=-1", "-serial"])
        .arg(format!("file:{}", setup.directory.join("console.log").display()))
        .args(["-kernel".as_ref(), setup.kernel.as_os_str(), "-initrd".as_ref(), setup.initrd.as_os_str()])
        .args(["-device", "virtio-rng-device", "-device", &format!("vhost-vsock-device,guest-cid={cid}")]);
    for (n, disk) in setup.disks.iter().enumerate().rev() {
        let drive = format!("id=d{n},format=raw,if=none,aio=io_uring,file={}", disk.display());
        command.args(["-drive", &drive, "-device", &format!("virtio-blk-device,drive=d{n}")]);
    }
    if let Some(tap) = &setup.tap {
        let netdev = format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=on");
        command.args(["-netdev", &netdev, "-device", "virtio-net-device,netdev=net,mac=02:00:00:00:00:01"]);
    }
    let started = now();
    let process = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("QEMU is installed");
    let limit = PollTimeout::try_from(LIMIT).expect("some minutes fit");
    let ready = poll(&mut [PollFd::new(boot.as_fd(), PollFlags::POLLIN)], limit).expect("vsock can be polled");
    assert!(ready > 0, "QEMU's guest does not say hello: {}", setup.directory.display());
    let (stream, _guest) = boot.accept().expect("a connection");
    let hello = read_hello(&stream);
    (process, Way::Qemu { cid, _boot: stream }, started, hello)
}
