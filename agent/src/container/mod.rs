//! Owns: the containers of the pod: who they are, which processes they have, and the rule that what is said twice is
//! done once. The verbs are in `verbs`; this file is the table and its processes.
//! May use: `zygote`, `image`, `stdio`, `sys`. Knows no gRPC.
//! Threads: `Pod` is shared; its state is behind one lock that is never held while waiting.

pub mod cgroup;
pub mod devices;
pub mod limits;
pub mod places;
pub mod root;
pub mod shown;
pub mod spec;
pub mod targets;
pub mod user;
mod verbs;
pub mod volumes;

pub use verbs::{CreateOptions, ExecOptions};

use libcontainer::oci_spec::runtime::{Capability, LinuxSeccomp, Process as SpecProcess};
use nacelle_base::{Classify, Kind, retry};
use nacelle_proto::agent::{ContainerState, Exit};
use nacelle_proto::common::CreateContainerResponse;
use nix::poll::{PollFd, PollFlags};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{OnceCell, watch};

use crate::empty_dirs::{EmptyDirError, EmptyDirs};
use crate::huge_pages::{HugePages, HugePagesError};
use crate::image::{DiskError, Disks};
use crate::memory::MemoryError;
use crate::processors::ProcessorsError;
use crate::pushed::{PushError, Volumes};
use crate::stats::Layers;
use crate::stdio::Stdio;
use crate::sys;
use crate::userns::UserNs;
use crate::zygote::{NewProcess, Zygote, ZygoteError};

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum PodError {
    #[error("{id:?} is no id: 1 to 128 characters from letters, digits, '_', '-' and '.' are, not starting with '.'")]
    Id { id: String },
    #[error("there is no container {id}")]
    NoContainer { id: String },
    #[error("container {id} has no process {exec_id}")]
    NoExec { id: String, exec_id: String },
    #[error("command {exec_id} of container {id} was killed before it started")]
    Killed { id: String, exec_id: String },
    #[error("container {id} is not running")]
    NotRunning { id: String },
    #[error("{signal} is no signal")]
    Signal { signal: u32 },
    #[error("an exec needs a program")]
    NoProgram,
    #[error("container {id} has no terminal to resize")]
    NoTerminal { id: String },
    #[error("container {id} did not end within {seconds} s of being killed")]
    StillAlive { id: String, seconds: u64 },
    #[error("cannot find the user of container {id}")]
    User { id: String, source: user::UserError },
    #[error("container {id} cannot run as this user")]
    Numbers { id: String, source: user::IdError },
    #[error("cannot use the specification of container {id}")]
    Spec { id: String, source: spec::SpecError },
    #[error("cannot change the limits of container {id}")]
    Limits { id: String, source: limits::LimitError },
    #[error("cannot give container {id} its huge pages")]
    HugePages { id: String, source: HugePagesError },
    #[error("cannot prepare the root of container {id}")]
    Root { id: String, source: root::RootError },
    #[error("cannot mount what container {id} asks for")]
    Mount { id: String, source: places::PlaceError },
    #[error("the image of container {id} cannot be used as the specification asks")]
    Target { id: String, source: targets::TargetError },
    #[error("cannot mount a volume of container {id}")]
    Volume { id: String, source: volumes::VolumeError },
    #[error("cannot start a process of container {id}")]
    Zygote { id: String, source: ZygoteError },
    #[error("cannot {what} of container {id}")]
    Io { what: &'static str, id: String, source: io::Error },
    #[error(transparent)]
    Push(#[from] PushError),
    #[error(transparent)]
    EmptyDir(#[from] EmptyDirError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Processors(#[from] ProcessorsError),
    #[error("cannot use the disk")]
    Disk {
        #[from]
        source: DiskError,
    },
    #[error("a task of the agent was cancelled")]
    Task {
        #[from]
        source: tokio::task::JoinError,
    },
}

impl Classify for PodError {
    fn kind(&self) -> Kind {
        match self {
            PodError::Id { .. }
            | PodError::Signal { .. }
            | PodError::NoProgram
            | PodError::User { .. }
            | PodError::Numbers { .. } => Kind::Invalid,
            PodError::NoContainer { .. } | PodError::NoExec { .. } => Kind::NotFound,
            PodError::NotRunning { .. } | PodError::Killed { .. } | PodError::NoTerminal { .. } => Kind::Conflict,
            PodError::Spec { source: spec::SpecError::Unsupported { .. }, .. } => Kind::Unsupported,
            PodError::Spec { .. } => Kind::Invalid,
            PodError::StillAlive { .. } => Kind::Timeout,
            PodError::Root { source, .. } => match Kind::from(source.source.kind()) {
                Kind::Exhausted => Kind::Exhausted,
                _ => Kind::Internal,
            },
            PodError::Mount { source, .. } => source.kind(),
            PodError::Target { source, .. } => source.kind(),
            PodError::Volume { source, .. } => source.kind(),
            PodError::Limits { source, .. } => source.kind(),
            PodError::HugePages { source, .. } => source.kind(),
            PodError::Zygote { source, .. } => source.kind(),
            PodError::Io { .. } | PodError::Task { .. } => Kind::Internal,
            PodError::Push(source) => source.kind(),
            PodError::Memory(source) => source.kind(),
            PodError::Processors(source) => source.kind(),
            PodError::EmptyDir(source) => source.kind(),
            PodError::Disk { source } => source.kind(),
        }
    }
}

/// One process that a host asked for: a container's first, or an exec.
#[derive(Debug)]
pub struct Process {
    /// Its number in the agent's PID namespace.
    pub pid: i32,
    /// Refers to it even when the number is used again; none if it was over before it could be opened.
    pidfd: Option<OwnedFd>,
    /// How it ended, once it has.
    exit: watch::Sender<Option<Exit>>,
    /// Its streams.
    pub stdio: Stdio,
    /// Its container's cgroup.
    cgroup: PathBuf,
    /// When it ends, the rest of the cgroup is killed: no PID namespace does it.
    last: bool,
}

impl Process {
    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Waits for its end, at most so long.
    pub async fn wait(&self, limit: Duration) -> Option<Exit> {
        let mut receiver = self.exit.subscribe();
        match tokio::time::timeout(limit, receiver.wait_for(Option::is_some)).await {
            Ok(Ok(exit)) => *exit,
            _ => None,
        }
    }

    fn signal(&self, signal: i32) -> io::Result<()> {
        match self.pidfd.as_ref().filter(|_| self.exit().is_none()).map(|pidfd| sys::pidfd_signal(pidfd, signal)) {
            None => Ok(()),
            Some(Err(error)) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            Some(result) => result,
        }
    }

    /// Records its end. `status` is the kernel's wait status.
    fn ended(&self, status: i32) {
        let signaled = libc::WIFSIGNALED(status);
        let code = if signaled { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) };
        // Killed itself, or a shell that reports that its child was.
        let killed = code == 128 + libc::SIGKILL;
        let out_of_memory = if killed { cgroup::out_of_memory(&self.cgroup) } else { None };
        let exit = Exit {
            code: code.unsigned_abs(),
            oom_killed: out_of_memory.is_some(),
            finished_at_unix_nanos: now(),
            guest_out_of_memory: out_of_memory == Some(cgroup::OutOfMemory::Guest),
        };
        if self.last
            && let Err(error) = cgroup::kill(&self.cgroup)
        {
            tracing::warn!(%error, "cannot kill what a container left");
        }
        self.exit.send_replace(Some(exit));
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// A further process of a container, from the first word of it on.
#[derive(Debug)]
struct ExecEntry {
    /// Grows with each entry.
    count: u64,
    /// The process, once it is made.
    process: OnceCell<Arc<Process>>,
    /// It was to be killed, perhaps before it was made.
    killed: AtomicBool,
}

impl ExecEntry {
    /// Nothing of it runs or will.
    fn is_over(&self) -> bool {
        self.process.get().map_or(self.killed.load(Ordering::SeqCst), |process| process.exit().is_some())
    }
}

type Execs = HashMap<String, Arc<ExecEntry>>;

/// A container that was created.
#[derive(Debug)]
pub struct Container {
    id: String,
    process: SpecProcess,
    seccomp: Option<LinuxSeccomp>,
    cgroup_namespace: bool,
    pid_namespace: spec::PidNamespace,
    cgroup: PathBuf,
    created: CreateContainerResponse,
    init: Arc<Process>,
    started: AtomicBool,
    execs: Mutex<Execs>,
}

#[derive(Default)]
struct State {
    containers: HashMap<String, Arc<Container>>,
    turns: HashMap<String, Arc<tokio::sync::Mutex<()>>>,
    /// Running processes that a host knows.
    processes: HashMap<i32, Arc<Process>>,
    /// Ends of processes that nobody knows yet, while some are being made.
    strays: HashMap<i32, i32>,
    making: usize,
    exec_count: u64,
}

/// The pod.
pub struct Pod {
    zygote: Zygote,
    /// Its disks.
    pub disks: Disks,
    /// What its containers wrote.
    pub layers: Arc<Layers>,
    /// What was pushed for them.
    pub volumes: Volumes,
    /// Their volumes that are the machine's own.
    pub empty_dirs: EmptyDirs,
    huge_pages: HugePages,
    shared_pid: bool,
    node_pid: bool,
    users: Option<UserNs>,
    pause: OnceCell<i32>,
    /// Held while a container is made that others see: for writing if one of them may trace it and is frozen, and while one that may
    /// trace starts. Held for reading while an exec's process is made: its container must not be frozen then.
    unseen: tokio::sync::RwLock<()>,
    state: Mutex<State>,
}

impl Container {
    /// Its processes see this PID namespace.
    fn is_in(&self, namespace: &spec::PidNamespace) -> bool {
        match namespace {
            spec::PidNamespace::Of(pid) if self.init.pid == *pid => true,
            spec::PidNamespace::Own => false,
            _ => self.pid_namespace == *namespace,
        }
    }

    /// The PID namespace that its processes are in, as another container joins it.
    fn processes_namespace(&self) -> spec::PidNamespace {
        match &self.pid_namespace {
            spec::PidNamespace::Own => spec::PidNamespace::Of(self.init.pid),
            shared => shared.clone(),
        }
    }

    /// Its processes may look into those that they see, whatever these may do.
    fn may_trace(&self) -> bool {
        let bounding = self.process.capabilities().as_ref().and_then(|sets| sets.bounding().as_ref());
        self.init.exit().is_none() && bounding.is_none_or(|set| set.contains(&Capability::SysPtrace))
    }
}

/// While one is held, ends of unknown processes are remembered.
struct Making(Arc<Pod>);

impl Drop for Making {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.making = state.making.saturating_sub(1);
        if state.making == 0 {
            state.strays.clear();
        }
    }
}

impl Pod {
    /// A pod without containers. Its PID namespace: one for all containers, or the node's, else each has one. Its user
    /// namespace: the agent's, if there is no other.
    pub fn new(
        zygote: Zygote,
        disks: Disks,
        huge_pages: HugePages,
        shared_pid: bool,
        node_pid: bool,
        users: Option<UserNs>,
    ) -> Arc<Pod> {
        Arc::new(Pod {
            zygote,
            disks,
            layers: Arc::default(),
            volumes: Volumes::default(),
            empty_dirs: EmptyDirs::default(),
            huge_pages,
            shared_pid,
            node_pid,
            users,
            pause: OnceCell::new(),
            unseen: tokio::sync::RwLock::default(),
            state: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reaps every process that has ended.
    pub fn reap(&self) {
        let mut state = self.lock();
        loop {
            // Under the lock, so that a process is never reaped between being made and being known.
            let (pid, status) = match sys::reap_one() {
                Some(ended) => ended,
                None => return,
            };
            match state.processes.remove(&pid) {
                Some(process) => process.ended(status),
                None if state.making > 0 => drop(state.strays.insert(pid, status)),
                None => {}
            }
        }
    }

    fn making(self: &Arc<Self>) -> Making {
        self.lock().making += 1;
        Making(Arc::clone(self))
    }

    /// Makes a process known. The caller holds a `Making` since before it was made.
    fn know(&self, made: NewProcess, stdio: Stdio, cgroup: PathBuf, last: bool) -> Arc<Process> {
        let mut state = self.lock();
        let (pid, pidfd) = made.keep();
        // An end may be that of a process that had this number before.
        let stray = state.strays.remove(&pid).filter(|_| pidfd.as_ref().is_none_or(has_ended));
        let process = Arc::new(Process { pid, pidfd, exit: watch::Sender::new(None), stdio, cgroup, last });
        match stray {
            Some(status) => process.ended(status),
            None => drop(state.processes.insert(pid, Arc::clone(&process))),
        }
        process
    }

    fn container(&self, id: &str) -> Result<Arc<Container>, PodError> {
        let container = self.lock().containers.get(id).cloned();
        container.ok_or_else(|| PodError::NoContainer { id: id.to_owned() })
    }

    /// A container's first process, or the exec of that id.
    pub fn process(&self, id: &str, exec_id: &str) -> Result<Arc<Process>, PodError> {
        let container = self.container(id)?;
        if exec_id.is_empty() {
            return Ok(Arc::clone(&container.init));
        }
        let execs = container.execs.lock().unwrap_or_else(PoisonError::into_inner);
        let found = execs.get(exec_id).and_then(|entry| entry.process.get()).cloned();
        found.ok_or_else(|| PodError::NoExec { id: id.to_owned(), exec_id: exec_id.to_owned() })
    }

    /// Every container.
    pub fn list(&self) -> Vec<ContainerState> {
        let state = self.lock();
        let describe = |container: &Arc<Container>| ContainerState {
            id: container.id.clone(),
            started: container.started.load(Ordering::Acquire),
            exit: container.init.exit(),
        };
        state.containers.values().map(describe).collect()
    }
}

/// Whether a process has ended, reaped or not: its pidfd is readable (pidfd_open(2)).
fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    // What cannot be asked counts as the number says.
    retry::poll(&mut fds, Some(Instant::now())).map_or(true, |ready| ready > 0)
}

/// May this be an id of a container or an exec? It becomes the name of folders and of a cgroup.
fn check_id(id: &str) -> Result<(), PodError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if (1..=128).contains(&id.len()) && !id.starts_with('.') && id.chars().all(plain) {
        Ok(())
    } else {
        Err(PodError::Id { id: id.chars().take(140).collect() })
    }
}
