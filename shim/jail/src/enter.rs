//! Defines the order in which the pod process drops its rights. Only the first thread may run this, while it is the only
//! one, because the restrictions apply to the calling thread and those that it creates.

use crate::mount_namespace::{self, MountNamespaceError};
use crate::privileges::{FailedStep, drop_privileges};
use crate::scope::{self, NetworkAccess};
use crate::seccomp::{self, SeccompError};
use crate::{Mode, Profile, SocketUse, VisiblePath, cgroup, sys};
use nacelle_base::{Chain, Classify, FailureKind};
use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io;
use std::path::PathBuf;

/// What the process keeps.
#[derive(Clone, Debug)]
pub struct JailPlan {
    /// The files and directories that stay visible.
    pub visible_paths: Vec<VisiblePath>,
    /// A directory of this process on which the new root is mounted.
    pub mount_point: PathBuf,
    /// The cgroup of the process, which is created if it is missing.
    pub cgroup: Option<PathBuf>,
    /// The user id and the group id of the process. `None` keeps those that it has.
    pub user: Option<u32>,
    /// The network namespace of the process.
    pub network: NetworkAccess,
    /// The process signals a process that it has started before: signals are not limited to its later children.
    pub signals_earlier_children: bool,
    /// The resource limits of the process, which its children inherit.
    pub limits: ResourceLimits,
    /// The reaction to a system call that is not allowed.
    pub seccomp: Mode,
    /// Whether the process starts other programs.
    pub profile: Profile,
}

/// The resource limits of a process (getrlimit(2)). Neither it nor its children can raise them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceLimits {
    /// Locked memory in bytes: what passed-through devices access of a VM's memory.
    pub locked_bytes: u64,
    /// Open files of each process; `None` keeps the limit that it has.
    pub open_files: Option<u64>,
    /// Threads of all processes of the user; `None` keeps the limit. The kernel does not apply it to root.
    pub threads: Option<u64>,
}

/// The process could not enter its jail. It must end then, because some steps may have been done.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// The mount namespace could not be set up.
    #[error("cannot enter the mount namespace of the pod process")]
    MountNamespace(#[from] MountNamespaceError),
    /// A system call of a step failed.
    #[error("cannot {what} of the pod process")]
    Step {
        /// The step: "set the resource limits", "change the user", "drop the capabilities".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Landlock scopes could not be set up.
    #[error("cannot limit the signals and abstract sockets of the pod process")]
    Scope(#[from] landlock::RulesetError),
    /// A seccomp filter could not be installed.
    #[error("cannot install the seccomp filters of the pod process")]
    Seccomp(#[from] SeccompError),
}

impl From<FailedStep> for JailError {
    fn from(FailedStep { what, source }: FailedStep) -> JailError {
        JailError::Step { what, source }
    }
}

impl Classify for JailError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// Closes all inherited descriptors except the standard streams. Must be the first action of the process, because it also
/// closes what the process has opened before.
pub fn close_inherited() -> Result<(), JailError> {
    sys::close_inherited().map_err(step_failed("close the inherited descriptors"))
}

/// Drops all rights except those of the plan, irrevocably. Open descriptors stay open. If the node does not allow the
/// cgroup, that is only logged.
pub fn enter(plan: JailPlan) -> Result<(), JailError> {
    if let Some(group) = &plan.cgroup
        && let Err(error) = cgroup::join(group)
    {
        tracing::warn!(group = %group.display(), "the pod process stays in its cgroup: {}", Chain(&error));
    }
    scope::enter_namespaces(&plan.network).map_err(step_failed("enter the namespaces"))?;
    mount_namespace::enter_new_root(plan.visible_paths, &plan.mount_point, plan.user)?;
    set_limits(plan.limits)?;
    drop_privileges(plan.user, 0)?;
    restrict_scope(!plan.signals_earlier_children)?;
    // This comes last, because changing the user or the capabilities may set the flag again.
    prctl::set_dumpable(false).map_err(|errno| step_failed("forbid memory dumps")(errno.into()))?;
    seccomp::install_process_filter(plan.seccomp, plan.profile)?;
    Ok(())
}

/// Drops all rights except these capabilities (one bit each), irrevocably. For a process of one thread that has a root of
/// its own already, starts no program and uses only open descriptors.
pub fn confine(seccomp: Mode, capabilities: u64, sockets: SocketUse) -> Result<(), JailError> {
    set_limits(ResourceLimits::default())?;
    drop_privileges(None, capabilities)?;
    restrict_scope(true)?;
    Ok(seccomp::install_single_thread_filter(seccomp, sockets)?)
}

fn restrict_scope(signals: bool) -> Result<(), JailError> {
    if !scope::restrict_scope(signals)? {
        tracing::warn!("this kernel does not limit signals and abstract sockets by Landlock (Linux 6.12 does)");
    }
    Ok(())
}

fn set_limits(limits: ResourceLimits) -> Result<(), JailError> {
    // Guest memory must not be written to a core dump; memory must not be locked unless a device needs it.
    let fixed = [(Resource::RLIMIT_CORE, Some(0)), (Resource::RLIMIT_MEMLOCK, Some(limits.locked_bytes))];
    let own = [(Resource::RLIMIT_NOFILE, limits.open_files), (Resource::RLIMIT_NPROC, limits.threads)];
    for (limit, maximum) in fixed.into_iter().chain(own).filter_map(|(limit, maximum)| Some((limit, maximum?))) {
        let allowed = match setrlimit(limit, maximum, maximum) {
            // Inside a container, limits cannot be raised: the existing limit is kept.
            Err(Errno::EPERM) => {
                getrlimit(limit).and_then(|(_, hard)| setrlimit(limit, hard.min(maximum), hard.min(maximum)))
            }
            other => other,
        };
        allowed.map_err(|errno| step_failed("set the resource limits")(errno.into()))?;
    }
    Ok(())
}

fn step_failed(what: &'static str) -> impl FnOnce(io::Error) -> JailError {
    move |source| JailError::Step { what, source }
}
