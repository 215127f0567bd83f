//! Drops the rights of a worker: a process of one thread that opens nothing and only transforms bytes between descriptors that it
//! has inherited as its standard streams or receives over one of them. docs/contributor/jail.md lists what such a process keeps.

use crate::mount_namespace::{self, MountNamespaceError};
use crate::privileges::{FailedStep, drop_privileges};
use crate::scope::{self, NetworkAccess};
use crate::seccomp::{self, SeccompError};
use crate::{Mode, sys};
use nacelle_base::{Classify, FailureKind};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use std::io;
use std::path::Path;

/// A directory that every node has. The empty root is mounted on it, in the worker's own mount namespace.
const MOUNT_POINT: &str = "/proc";
/// The maximum number of open descriptors: the standard streams, one that is received, and those that entering the jail needs.
const MAX_DESCRIPTORS: u64 = 16;
/// The rights that a worker keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerJail {
    /// The reaction to a system call that is not allowed.
    pub seccomp: Mode,
    /// The user and group of the process; `None` keeps both.
    pub user: Option<u32>,
    /// The maximum address space in bytes.
    pub address_space: u64,
    /// The maximum CPU time in seconds.
    pub cpu_seconds: u64,
    /// The maximum size in bytes of the files that it writes.
    pub file_size: u64,
}

/// The process could not enter the jail of a worker. It must end then, because some steps may have been done.
#[derive(Debug, thiserror::Error)]
pub enum WorkerJailError {
    /// The mount namespace could not be set up.
    #[error("cannot enter the mount namespace of the worker")]
    MountNamespace(#[from] MountNamespaceError),
    /// A system call of a step failed.
    #[error("cannot {what} of the worker")]
    Step {
        /// The step: "enter the namespaces", "change the user".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Landlock scopes could not be set up.
    #[error("cannot limit the signals and abstract sockets of the worker")]
    Scope(#[from] landlock::RulesetError),
    /// The seccomp filter could not be installed.
    #[error("cannot install the seccomp filter of the worker")]
    Seccomp(#[from] SeccompError),
}

impl From<FailedStep> for WorkerJailError {
    fn from(FailedStep { what, source }: FailedStep) -> WorkerJailError {
        WorkerJailError::Step { what, source }
    }
}

impl Classify for WorkerJailError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// Drops all rights of the calling process, irrevocably: it keeps its standard streams and the calls of
/// [`worker_calls`](crate::worker_calls). Must be the first action of the process.
///
/// The process dies with the thread that has started it. If that thread may have ended before, the caller must check afterwards that it
/// lives, for example by a message.
///
/// Without root, the process enters a user namespace of its own first, in which it may create the others. If the node does not allow that,
/// this fails.
pub fn confine_worker(jail: WorkerJail) -> Result<(), WorkerJailError> {
    sys::close_inherited().map_err(step("close the inherited descriptors"))?;
    if !geteuid().is_root() {
        unshare(CloneFlags::CLONE_NEWUSER).map_err(failed("enter the user namespace"))?;
    }
    scope::enter_namespaces(&NetworkAccess::None).map_err(step("enter the namespaces"))?;
    mount_namespace::enter_new_root(Vec::new(), Path::new(MOUNT_POINT), None)?;
    for (limit, maximum) in [
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_NOFILE, MAX_DESCRIPTORS),
        (Resource::RLIMIT_AS, jail.address_space),
        (Resource::RLIMIT_CPU, jail.cpu_seconds),
        (Resource::RLIMIT_FSIZE, jail.file_size),
    ] {
        setrlimit(limit, maximum, maximum).map_err(failed("set the resource limits"))?;
    }
    drop_privileges(jail.user, 0)?;
    // Before Linux 6.12 namespaces and filter do this alone.
    scope::restrict_scope(true)?;
    // These come after the change of the user and of the capabilities, which resets both.
    prctl::set_dumpable(false).map_err(failed("set the privileges"))?;
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(failed("set the parent-death signal"))?;
    Ok(seccomp::install_worker_filter(jail.seccomp)?)
}

fn step(what: &'static str) -> impl FnOnce(io::Error) -> WorkerJailError {
    move |source| WorkerJailError::Step { what, source }
}

fn failed(what: &'static str) -> impl FnOnce(Errno) -> WorkerJailError {
    move |errno| WorkerJailError::Step { what, source: errno.into() }
}
