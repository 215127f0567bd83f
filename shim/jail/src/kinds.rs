//! Owns: the kinds of threads, and what a filter does. Pure.

use serde::{Deserialize, Serialize};

/// What a thread is for; each kind has its own list of system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadKind {
    /// The first thread: requests of the daemon, the state of the pod. Its filter is the whole process's.
    Main,
    /// Work that blocks, for the first thread: files of logs and images, calls of the engine, the guest's hello.
    Blocking,
    /// Starts a machine, its devices and processors, and waits for its end.
    Machine,
    /// Runs one virtual processor and answers what the guest asks of its bus.
    Vcpu,
    /// Serves queues of a device: block, net, rng, balloon, console.
    Queue,
    /// Serves a queue of the file-system device, or lends it to the process that has the files.
    Share,
    /// Serves the control queue of a network device: which queues of its tap take part, and who serves them.
    NetControl,
    /// Serves the vsock device.
    Vsock,
    /// Serves a device to another process over vhost-user, and starts its queues' threads.
    VhostUser,
    /// Watches a machine for its whole life; starts QEMU and reads what it prints.
    Warden,
    /// Writes what a container prints to its log.
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

/// What happens at a system call that is not allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// There are no filters.
    Off,
    /// The kernel logs it, and lets it pass: to find out what is missing from a list.
    Log,
    /// The process is killed (SIGSYS).
    #[default]
    Kill,
}

/// What the machine is made of: whether another program must run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// The machine lives in this process: what is not listed is forbidden, and no program can be executed.
    InProcess,
    /// Another program (QEMU) is started, which inherits the process's filter: that one only forbids what neither
    /// needs. Threads that start no program have their own lists, as above.
    Spawns,
}
