//! Owns: the way from the kernel's first instruction in user space to a configured guest: mounts, the handshake with
//! the host, the listening sockets, the zygote. Synchronous, one thread, and as little as possible before the report.
//! May use: `frame`, `sys`, `zygote`.

pub mod apply;
pub mod host;
pub mod mounts;
pub mod netlink;

use nacelle_base::Chain;
use nacelle_base::retry::retry_interrupted;
use nacelle_proto::agent::{AgentHello, BootConfig, BootReport};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, connect, listen, setsockopt, socket, sockopt,
};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::frame::{self, FrameError};
use crate::huge_pages::HugePages;
use crate::image::Disks;
use crate::listener::Socket;
use crate::memory::Memory;
use crate::processors::Processors;
use crate::userns::UserNs;
use crate::zygote::Zygote;

/// The host's port for the handshake.
pub const HANDSHAKE_PORT: u32 = 1024;
/// The guest's port of the gRPC service.
pub const RPC_PORT: u32 = 1025;
/// The guest's port of the streams.
pub const STREAM_PORT: u32 = 1026;
/// How long the host may take to answer, CNI included.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long the host may take to listen.
const CALLING: Duration = Duration::from_secs(60);

/// Why the guest did not become ready.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum BootError {
    #[error("cannot make the folder {path}")]
    Directory { path: String, source: nix::Error },
    #[error("cannot mount {kind} at {path}")]
    Mount { kind: &'static str, path: String, source: nix::Error },
    #[error("cannot get a root of its own")]
    SwitchRoot { source: nix::Error },
    #[error("cannot leave the node's namespaces")]
    Namespaces { source: nix::Error },
    #[error("cannot make the device {path}")]
    Device { path: String, source: nix::Error },
    #[error("cannot reach the host on vsock port {HANDSHAKE_PORT}")]
    Connect { source: nix::Error },
    #[error("cannot listen on vsock port {port}")]
    Listen { port: u32, source: nix::Error },
    #[error("the handshake with the host broke off")]
    Handshake { source: FrameError },
    #[error("cannot set the clock")]
    Clock { source: nix::Error },
    #[error("cannot seed the random pool")]
    Entropy { source: io::Error },
    #[error("cannot set the host name {name:?}")]
    Hostname { name: String, source: nix::Error },
    #[error(
        "{name:?} is no sysctl that a pod may set: net.*, kernel.shm*, kernel.msg*, kernel.sem and fs.mqueue.* are"
    )]
    SysctlName { name: String },
    #[error("cannot set the sysctl {name} to {value:?}")]
    Sysctl { name: String, value: String, source: io::Error },
    #[error("{text:?} is no {what}")]
    Address { what: &'static str, text: String },
    #[error("there is no network device for {name}: the machine has {have}")]
    NoNic { name: String, have: usize },
    #[error("cannot {what}")]
    Network { what: String, source: io::Error },
    #[error("cannot write {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot {what} the pod's user namespace")]
    UserNamespace { what: &'static str, source: io::Error },
    #[error("cannot start the zygote")]
    Zygote { source: io::Error },
    #[error("cannot set a resource limit")]
    Limit { source: io::Error },
}

/// A guest, or a pod on the node, that has reported itself ready.
pub struct Ready {
    /// What the host asked for.
    pub config: BootConfig,
    /// Where images and what containers write lie.
    pub disks: Disks,
    /// Those that the containers run on.
    pub processors: Processors,
    /// What they use.
    pub memory: Memory,
    /// What of it the kernel keeps in huge pages for them.
    pub huge_pages: HugePages,
    /// The PID namespace is the node's.
    pub node_pid: bool,
    /// The containers' user namespace, if it is not the agent's.
    pub users: Option<UserNs>,
    /// Listens on the port of the service.
    pub rpc: Socket,
    /// Listens on the port of the streams.
    pub streams: Socket,
    /// Makes processes.
    pub zygote: Zygote,
}

/// Boots. The hello goes out first, so that the host's answer and the guest's own work overlap.
pub fn boot() -> Result<Ready, BootError> {
    let started_nanos = monotonic_nanos();
    let handshake = |source| BootError::Handshake { source };
    let host = hello(started_nanos)?;
    mounts::first()?;
    crate::log::start();
    let (mut host, config) = configuration(host, started_nanos)?;
    let configured = apply::apply(&config).and_then(|users| Ok((users, listening(RPC_PORT)?, listening(STREAM_PORT)?)));
    let error = configured.as_ref().err().map(|error| Chain(error).to_string()).unwrap_or_default();
    frame::write(&mut host, &BootReport { error }).map_err(handshake)?;
    let (users, rpc, streams) = configured?;

    mounts::rest(config.shm_bytes, false)?;
    apply::write_files(&config)?;
    settle(users.as_ref())?;
    own_cgroup()?;
    promise_memory()?;
    // It would keep the connection open as long as the machine lives.
    drop(host);
    let zygote = Zygote::fork(&[&rpc, &streams]).map_err(|source| BootError::Zygote { source })?;
    crate::sys::limit_files(65_536, 1 << 19).map_err(|source| BootError::Limit { source })?;
    let disks = Disks::new(config.image_disk, config.scratch_disk, config.volume_disk);
    let (rpc, streams) = (Socket::Vsock(rpc), Socket::Vsock(streams));
    let (processors, memory, huge_pages) = (Processors::of_machine(), Memory::of_machine(), HugePages::of_machine());
    Ok(Ready { config, disks, processors, memory, huge_pages, node_pid: false, users, rpc, streams, zygote })
}

/// Makes the user namespace, if there is one, known by its name.
fn settle(users: Option<&UserNs>) -> Result<(), BootError> {
    let settled = users.map_or(Ok(()), UserNs::settle);
    settled.map_err(|source| BootError::UserNamespace { what: "name", source })
}

/// The time since the kernel started its clock, in nanoseconds; 0 if it cannot tell.
fn monotonic_nanos() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map(Duration::from);
    time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Connects to the host and says hello.
fn hello(started_nanos: u64) -> Result<File, BootError> {
    let deadline = Instant::now() + CALLING;
    loop {
        let mut host = File::from(connect_to_host(deadline)?);
        match say_hello(&mut host, started_nanos) {
            Ok(()) => return Ok(host),
            Err(error) if error.is_hung_up() && Instant::now() < deadline => continue,
            Err(source) => return Err(BootError::Handshake { source }),
        }
    }
}

fn say_hello(host: &mut File, started_nanos: u64) -> Result<(), FrameError> {
    let kernel_release =
        nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default();
    let agent_version = env!("CARGO_PKG_VERSION").to_owned();
    let hello = AgentHello { protocol: 1, agent_version, kernel_release, started_nanos, sent_nanos: monotonic_nanos() };
    frame::write(host, &hello)
}

/// Waits for what the host wants. A host that is gone before it has said so is one that this machine was saved under
/// and not restored under: the new one is told hello anew.
fn configuration(mut host: File, started_nanos: u64) -> Result<(File, BootConfig), BootError> {
    loop {
        match frame::read(&mut host) {
            Ok(config) => return Ok((host, config)),
            Err(error) if error.is_hung_up() => {
                tracing::info!("the host is gone: looking for a new one");
                host = hello(started_nanos)?;
            }
            Err(source) => return Err(BootError::Handshake { source }),
        }
    }
}

fn vsock() -> nix::Result<OwnedFd> {
    socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
}

fn connect_to_host(deadline: Instant) -> Result<OwnedFd, BootError> {
    loop {
        let connected = vsock().and_then(|fd| {
            setsockopt(
                &fd,
                sockopt::ReceiveTimeout,
                &nix::sys::time::TimeVal::new(PATIENCE.as_secs().cast_signed(), 0),
            )?;
            let host = VsockAddr::new(libc::VMADDR_CID_HOST, HANDSHAKE_PORT);
            retry_interrupted(|| connect(fd.as_raw_fd(), &host))?;
            Ok(fd)
        });
        match connected {
            Ok(fd) => return Ok(fd),
            Err(source) if Instant::now() >= deadline => return Err(BootError::Connect { source }),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn listening(port: u32) -> Result<OwnedFd, BootError> {
    let listening = || {
        let fd = vsock()?;
        bind(fd.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, port))?;
        listen(&fd, Backlog::new(128)?)?;
        Ok(fd)
    };
    listening().map_err(|source| BootError::Listen { port, source })
}

/// As kubelet sets it on its nodes, so that programs find in a machine what they find elsewhere: a mapping larger than the
/// memory is no error until it is used up (`vm.overcommit_memory`, Documentation/admin-guide/sysctl/vm.rst). What is used
/// is limited by the containers' control groups.
fn promise_memory() -> Result<(), BootError> {
    let path = PathBuf::from("/proc/sys/vm/overcommit_memory");
    fs::write(&path, "1").map_err(|source| BootError::File { path, source })
}

/// Moves the agent to a cgroup of its own, with memory that containers cannot take, and hands all controllers on to
/// the cgroup of the containers.
fn own_cgroup() -> Result<(), BootError> {
    let write = |name: &str, value: &str| {
        let path = PathBuf::from(format!("{}/{name}", crate::paths::CGROUP));
        fs::write(&path, value).map_err(|source| BootError::File { path, source })
    };
    let path = PathBuf::from(format!("{}/cgroup.controllers", crate::paths::CGROUP));
    let controllers = fs::read_to_string(&path).map_err(|source| BootError::File { path, source })?;
    let all: Vec<String> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
    write("cgroup.subtree_control", &all.join(" "))?;
    for folder in ["agent", crate::paths::POD_CGROUP.trim_start_matches('/')] {
        let path = PathBuf::from(format!("{}/{folder}", crate::paths::CGROUP));
        fs::create_dir(&path).map_err(|source| BootError::File { path, source })?;
    }
    write("pod/cgroup.subtree_control", &all.join(" "))?;
    write("agent/memory.min", "33554432")?;
    write("agent/cpu.weight", "10000")?;
    // A fork bomb must leave the agent enough to kill it.
    let path = PathBuf::from("/proc/sys/kernel/threads-max");
    let threads = fs::read_to_string(&path).map_err(|source| BootError::File { path, source })?;
    let threads: u64 = threads.trim().parse().unwrap_or(0);
    write("pod/pids.max", &(threads / 4 * 3).max(64).to_string())?;
    write("agent/cgroup.procs", "1")?;
    let path = PathBuf::from("/proc/self/oom_score_adj");
    fs::write(&path, "-1000").map_err(|source| BootError::File { path, source })
}
