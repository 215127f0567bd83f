//! Runs one VM under measurement in a process of its own: Nacelle's VMM (this program again, as `nacelle-bench --machine`) or
//! plain QEMU microvm, with the same kernel, initramfs and disks. Both need working KVM.

use crate::cuts;
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{
    BOOT_PORT, DiskSpec, Engine, Machine, MachineSpec, NicSpec, SnapshotDirectory, SnapshotFiles, Touched, fill_holes,
    read_snapshot,
};
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
const COMMAND_PORT: u32 = 1025;
/// The time limit of a start; none takes as long.
pub const START_LIMIT: Duration = Duration::from_secs(120);
/// The command `save DIRECTORY`: pauses and saves one of our VMs; the answer is the duration in milliseconds.
pub const SAVE_COMMAND: &str = "save ";
/// The command to a child to record in a directory which pages its VM, restored from there, has written.
pub const RECORD_COMMAND: &str = "record ";
/// The command `cut METHOD FILE` to a child: saves what its VM has of its own, and resumes it. The answer is JSON: {"pause": ms}.
pub const CUT_COMMAND: &str = "cut ";
/// The command to a child to wait until the cut is complete. The answer is JSON.
pub const CUT_END_COMMAND: &str = "end of the cut";
/// The first argument of `nacelle-bench --machine DESCRIPTION`.
pub const CHILD_ARGUMENT: &str = "--machine";

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
pub struct VmDescription {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub memory_mib: u32,
    /// Raw, writable disk files.
    pub disks: Vec<PathBuf>,
    /// The name of a tap, created in this network namespace.
    pub tap: Option<String>,
    /// The guest does not report itself: its first answer to a command counts as its first message (ours only).
    pub asked: bool,
    /// The directory of a saved VM that is restored instead of booting (ours only).
    pub from: Option<PathBuf>,
    /// It is restored in small pages, so that its working set can be recorded (ours only).
    pub small_pages: bool,
    /// Clones may have more disks and interfaces than this VM (ours only).
    pub template: bool,
    /// A directory of the VM's own.
    pub directory: PathBuf,
}

/// The durations of a start in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct BootTimeline {
    /// From the start of the process to the guest's first message.
    pub total: f64,
    /// The VMM's part until the guest ran; only ours reports it.
    pub vmm_setup: Option<f64>,
    /// The guest kernel's part until its init ran, by its own clock.
    pub kernel: f64,
    /// The init's part until it sent the message.
    pub init: f64,
}

impl BootTimeline {
    /// Returns the rest: the VMM, and the kernel before it has a clock.
    pub fn vmm(&self) -> f64 {
        self.total - self.kernel - self.init
    }

    /// Returns the time that the kernel takes before it has a clock.
    pub fn unclocked(&self) -> f64 {
        self.vmm_setup.map_or(0.0, |setup| self.vmm() - setup)
    }
}

/// A running VM. Dropping it kills it.
pub struct BenchVm {
    process: Child,
    channel: CommandChannel,
    pub timeline: BootTimeline,
}

enum CommandChannel {
    Ours { commands: ChildStdin, answers: BufReader<ChildStdout> },
    Qemu { cid: u32, _boot: VsockStream },
}

/// The guest's first message, and when it arrived (CLOCK_MONOTONIC of the node, nanoseconds).
#[derive(Serialize, Deserialize)]
struct FirstMessage {
    at: u64,
    /// When the guest began to run; 0 if unknown.
    running: u64,
    started: u64,
    sent: u64,
}

/// Returns CLOCK_MONOTONIC in nanoseconds.
pub fn monotonic_nanos() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("the node has a clock");
    u64::try_from(Duration::from(time).as_nanos()).unwrap_or(u64::MAX)
}

/// Reads the agent's first message, or that of the contract's guest, which contains no clock.
fn read_first_message(mut stream: impl Read) -> FirstMessage {
    let mut head = [0; 4];
    stream.read_exact(&mut head).expect("a hello");
    let at = monotonic_nanos();
    if &head == b"hell" {
        return FirstMessage { at, running: 0, started: 0, sent: 0 };
    }
    let mut body = vec![0; u32::from_le_bytes(head).min(1 << 20) as usize];
    stream.read_exact(&mut body).expect("a whole hello");
    let hello = AgentHello::decode(body.as_slice()).expect("the agent's hello");
    FirstMessage { at, running: 0, started: hello.started_nanos, sent: hello.sent_nanos }
}

impl BenchVm {
    /// Starts a VM and waits for its first message.
    pub fn start(vmm: Vmm, description: &VmDescription) -> BenchVm {
        let (process, channel, started, hello) = match vmm {
            Vmm::Ours => start_ours(description),
            Vmm::Qemu => start_qemu(description),
        };
        let ms = |nanos: u64| nanos as f64 / 1e6;
        let timeline = BootTimeline {
            total: ms(hello.at - started),
            vmm_setup: hello.running.checked_sub(started).map(ms),
            kernel: ms(hello.started),
            init: ms(hello.sent - hello.started),
        };
        BenchVm { process, channel, timeline }
    }

    /// Returns the id of the VM's process.
    pub fn pid(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// Sends the contract's guest a command and returns its answer.
    pub fn send_command(&mut self, command: &str) -> String {
        match &mut self.channel {
            CommandChannel::Ours { commands, answers } => {
                writeln!(commands, "{command}").expect("the machine runs");
                let mut line = String::new();
                answers.read_line(&mut line).expect("the machine answers");
                line.trim_end().to_owned()
            }
            CommandChannel::Qemu { cid, .. } => {
                exchange_line(VsockStream::connect_with_cid_port(*cid, COMMAND_PORT).expect("a connection"), command)
            }
        }
    }
}

impl Drop for BenchVm {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn exchange_line(mut stream: impl Read + Write, command: &str) -> String {
    let mut answer = String::new();
    writeln!(stream, "{command}").expect("the guest takes commands");
    stream.read_to_string(&mut answer).expect("the guest answers");
    answer.trim_end().to_owned()
}

fn start_ours(description: &VmDescription) -> (Child, CommandChannel, u64, FirstMessage) {
    let description = serde_json::to_string(description).expect("a description is plain data");
    let started = monotonic_nanos();
    let mut process = Command::new(std::env::current_exe().expect("this program has a path"))
        .args([CHILD_ARGUMENT, &description])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program can be started");
    let commands = process.stdin.take().expect("its input is ours");
    let mut answers = BufReader::new(process.stdout.take().expect("its output is ours"));
    let mut line = String::new();
    answers.read_line(&mut line).expect("its output can be read");
    let hello = serde_json::from_str(&line).unwrap_or_else(|error| panic!("no hello of our machine: {error}: {line}"));
    (process, CommandChannel::Ours { commands, answers }, started, hello)
}

/// Runs the child of `start_ours`: starts a VM of our engine, prints its first message as JSON, then one line of answer for each
/// line of command, until the input ends.
pub fn run_vm_child(description: &str) -> ExitCode {
    let description: VmDescription = serde_json::from_str(description).expect("the parent describes the machine");
    let disks = description.disks.iter().enumerate();
    let disks = disks.map(|(n, path)| DiskSpec::File { path: path.clone(), read_only: false, serial: format!("d{n}") });
    let nic = description.tap.as_ref().map(|name| {
        let here = NetNs::open(Path::new("/proc/thread-self/ns/net")).expect("this network namespace");
        let tap = tap::create(&here, name).expect("a tap");
        NicSpec { tap: tap.fd, more_queues: vec![], dhcp: None, mac: [2, 0, 0, 0, 0, 1], mtu: 1500 }
    });
    let spec = MachineSpec {
        vcpus: 1,
        topology: None,
        cpu_model: None,
        memory_mib: description.memory_mib,
        hotplug_mib: 0,
        memory_pages: Default::default(),
        console: Default::default(),
        kernel: description.kernel,
        initrd: description.initrd,
        cmdline: vec![],
        disks: disks.collect(),
        nics: nic.into_iter().collect(),
        console_log: description.directory.join("console.log"),
        run_dir: description.directory,
        guest_cid: 3,
        shares: Vec::new(),
    };
    let engine = KvmEngine::new();
    let spec = spec.check(&engine.limits()).expect("a good description");
    let pausable = "a VM that can be paused";
    let machine = match &description.from {
        None if description.template => {
            engine.as_restorer().expect("a restorer").start_template(spec).expect("a template")
        }
        None => engine.start(spec).expect("a machine"),
        Some(from) => {
            let saved = SnapshotFiles::open(from).and_then(read_snapshot).expect("a snapshot");
            let restorer = engine.as_restorer().expect("a restorer");
            let restored = match description.small_pages {
                true => restorer.restore_in_small_pages(spec, saved),
                false => restorer.restore(spec, saved),
            };
            let machine = restored.expect("a restored machine");
            machine.as_pausable().expect(pausable).resume().expect("to resume");
            machine
        }
    };
    let running = monotonic_nanos();
    let link = machine.link();
    if description.asked {
        let stream = link.connect(COMMAND_PORT, START_LIMIT).expect("the guest takes connections");
        exchange_line(&stream, "cpus");
        let at = monotonic_nanos();
        println!("{}", serde_json::json!(FirstMessage { at, running, started: 0, sent: 0 }));
        return serve_commands(&*machine);
    }
    // The agent waits for its configuration as long as this connection is open.
    let boot = match link.listen(BOOT_PORT).and_then(|incoming| incoming.accept(START_LIMIT)) {
        Ok(stream) => stream,
        Err(error) => panic!("no hello: {error}; {:?}", machine.wait(Duration::ZERO)),
    };
    println!("{}", serde_json::json!(FirstMessage { running, ..read_first_message(&boot) }));
    serve_commands(&*machine)
}

/// Answers each line of standard input with a line, until its end.
fn serve_commands(machine: &dyn Machine) -> ExitCode {
    let (link, pausable) = (machine.link(), "a VM that can be paused");
    let mut open_cut = None;
    for command in std::io::stdin().lines() {
        let command = command.expect("a line");
        if let Some((method, path)) = command.strip_prefix(CUT_COMMAND).and_then(|command| command.rsplit_once(' ')) {
            let (method, busy) = method.strip_suffix("+busy").map_or((method, false), |method| (method, true));
            let loop_of_guest = busy.then(|| {
                let stream = link.connect(COMMAND_PORT, START_LIMIT).expect("the guest takes connections");
                let looped = std::thread::spawn(move || exchange_line(&stream, "faults 32"));
                std::thread::sleep(Duration::from_millis(20));
                looped
            });
            let (pause, cut) = cuts::cut(machine, method, path.as_ref());
            open_cut = Some((cut, PathBuf::from(path)));
            if let Some(looped) = loop_of_guest {
                looped.join().expect("the guest's loop ends");
            }
            println!("{}", serde_json::json!({"pause": pause}));
            continue;
        }
        if command == CUT_END_COMMAND {
            let (cut, path) = open_cut.take().expect("a cut");
            println!("{}", cut.finish(&path));
            continue;
        }
        if let Some(directory) = command.strip_prefix(SAVE_COMMAND) {
            let begin = monotonic_nanos();
            machine.as_pausable().expect(pausable).pause().expect("to pause");
            let directory = SnapshotDirectory::create(directory.as_ref()).expect("a directory");
            machine.as_snapshottable().expect("a VM that can be saved").save(directory.files()).expect("to save");
            fill_holes(directory.files()).expect("to allocate memory");
            directory.commit().expect("to save");
            println!("{}", (monotonic_nanos() - begin) as f64 / 1e6);
            continue;
        }
        if let Some(directory) = command.strip_prefix(RECORD_COMMAND) {
            machine.as_pausable().expect(pausable).pause().expect("to pause");
            let files = SnapshotFiles::open_to_complete(directory.as_ref()).expect("a snapshot");
            machine
                .as_snapshottable()
                .expect("a VM that can be saved")
                .record_working_set(&files, Touched::Early)
                .expect("to record");
            println!("0");
            continue;
        }
        let stream = link.connect(COMMAND_PORT, START_LIMIT).expect("the guest takes connections");
        println!("{}", exchange_line(&stream, &command));
    }
    ExitCode::SUCCESS
}

fn start_qemu(description: &VmDescription) -> (Child, CommandChannel, u64, FirstMessage) {
    // Context ids below 3 are reserved; each VM of this process has its own.
    let cid = 3 + std::process::id() % 1_000_000;
    let boot = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, BOOT_PORT).expect("vsock's boot port is free");
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-M", "microvm,x-option-roms=off,acpi=off,pit=off,pic=off,rtc=on,isa-serial=on,accel=kvm"])
        .args(["-cpu", "host", "-smp", "1", "-m", &format!("{}M", description.memory_mib)])
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-global"])
        .args(["virtio-mmio.force-legacy=off", "-append", "console=ttyS0 quiet reboot=t panic=-1", "-serial"])
        .arg(format!("file:{}", description.directory.join("console.log").display()))
        .args(["-kernel".as_ref(), description.kernel.as_os_str(), "-initrd".as_ref(), description.initrd.as_os_str()])
        .args(["-device", "virtio-rng-device", "-device", &format!("vhost-vsock-device,guest-cid={cid}")]);
    for (n, disk) in description.disks.iter().enumerate().rev() {
        let drive = format!("id=d{n},format=raw,if=none,aio=io_uring,file={}", disk.display());
        command.args(["-drive", &drive, "-device", &format!("virtio-blk-device,drive=d{n}")]);
    }
    if let Some(tap) = &description.tap {
        let netdev = format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=on");
        command.args(["-netdev", &netdev, "-device", "virtio-net-device,netdev=net,mac=02:00:00:00:00:01"]);
    }
    let started = monotonic_nanos();
    let process = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("QEMU is installed");
    let limit = PollTimeout::try_from(START_LIMIT).expect("some minutes fit");
    let ready = poll(&mut [PollFd::new(boot.as_fd(), PollFlags::POLLIN)], limit).expect("vsock can be polled");
    assert!(ready > 0, "QEMU's guest does not say hello: {}", description.directory.display());
    let (stream, _guest) = boot.accept().expect("a connection");
    let hello = read_first_message(&stream);
    (process, CommandChannel::Qemu { cid, _boot: stream }, started, hello)
}
