//! Defines the kinds of threads, each of which has a seccomp filter of its own, and the modes of the filters.

use serde::{Deserialize, Serialize};

/// The purpose of a thread; each kind has its own list of system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadKind {
    /// The first thread: requests of the daemon, state of the pod. Its filter applies to the whole process.
    Main,
    /// Does the blocking work that the first thread hands over: logs and images that the daemon has opened, calls of the engine, the guest's hello.
    Blocking,
    /// Starts a VM with its devices and vCPUs, and waits for its end.
    Machine,
    /// Runs one vCPU and emulates the guest's accesses to its bus.
    Vcpu,
    /// Serves virtqueues of a device: block, net, rng, balloon, console.
    Queue,
    /// Serves a virtqueue of the file-system device, or shares it with the file-server process.
    Share,
    /// Serves the control queue of a network device: which queues of its tap are active, and what serves them.
    NetControl,
    /// Serves the vsock device.
    Vsock,
    /// Serves a device to another process over vhost-user, and starts the threads of its virtqueues.
    VhostUser,
    /// Watches a VM until its end; starts QEMU and reads its output.
    Warden,
    /// Writes the output of a container to its log.
    Log,
}

impl ThreadKind {
    /// All kinds.
    pub const ALL: [ThreadKind; 11] = [
        ThreadKind::Main,
        ThreadKind::Blocking,
        ThreadKind::Machine,
        ThreadKind::Vcpu,
        ThreadKind::Queue,
        ThreadKind::Share,
        ThreadKind::NetControl,
        ThreadKind::Vsock,
        ThreadKind::VhostUser,
        ThreadKind::Warden,
        ThreadKind::Log,
    ];
}

/// The reaction to a system call that is not allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// No filter is installed.
    Off,
    /// The kernel logs the call and allows it, to find calls that are missing from a list.
    Log,
    /// The process is killed (SIGSYS).
    #[default]
    Kill,
}

/// Whether the VM needs another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// The VM runs in this process: every call that is not listed is forbidden, and no program can be executed.
    InProcess,
    /// The process starts another program (QEMU), which inherits the process's filter: it only forbids what neither needs.
    /// Threads that start no program have the same lists as with `InProcess`.
    StartsPrograms,
}

/// What a process of one thread does with sockets that it receives. It creates none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketUse {
    /// It reads and writes them.
    Open,
    /// It connects them, too.
    Connect,
}
