//! Separates the process from the other processes of the node: namespaces without any of them, and Landlock scopes, by which signals and
//! abstract sockets do not leave the process and its children. Only the first thread may call it, while it is the only one.

use landlock::{RestrictionStatus, Ruleset, RulesetAttr, RulesetError, RulesetStatus, Scope};
use nacelle_base::retry::retry_interrupted;
use nix::fcntl::{OFlag, open};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::Mode;
use std::io;
use std::path::PathBuf;

/// The network namespace of the process. Abstract sockets belong to it as well as addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkAccess {
    /// The namespace at this path: that of the pod, in which only CNI plugins run, for moments.
    Join(PathBuf),
    /// A new namespace without interfaces.
    None,
}

/// Enters the namespaces. IPC, UTS and cgroup namespaces are new.
pub(crate) fn enter_namespaces(network: &NetworkAccess) -> io::Result<()> {
    let mut new = CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP;
    match network {
        NetworkAccess::None => new |= CloneFlags::CLONE_NEWNET,
        NetworkAccess::Join(path) => {
            let namespace = retry_interrupted(|| open(path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()))?;
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
        }
    }
    Ok(unshare(new)?)
}

/// Makes a new PID namespace for the children that this thread starts from now on: the first of them is its process 1. This process stays
/// in its own. The thread should end afterwards, because all of its later children are in that namespace.
pub fn create_child_pid_namespace() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWPID).map_err(|errno| {
        let why = format!("cannot create a PID namespace: {errno} (see user.max_pid_namespaces)");
        io::Error::new(io::Error::from(errno).kind(), why)
    })
}

/// Scopes abstract sockets, and signals if `signals` says so, to the process and its children. Returns whether the kernel enforces it:
/// Linux does from 6.12, with Landlock enabled.
pub(crate) fn restrict_scope(signals: bool) -> Result<bool, RulesetError> {
    let scopes = if signals { Scope::AbstractUnixSocket | Scope::Signal } else { Scope::AbstractUnixSocket.into() };
    let ruleset = Ruleset::default().scope(scopes)?;
    let RestrictionStatus { ruleset, .. } = ruleset.create()?.restrict_self()?;
    Ok(ruleset == RulesetStatus::FullyEnforced)
}
