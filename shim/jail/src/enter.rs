//! Defines the order in which the pod process drops its rights. Only the first thread may run this, while it is the only
//! one, because the restrictions apply to the calling thread and those that it creates.

use crate::seccomp::{self, SeccompError};
use crate::walls::{self, WallError};
use crate::{Mode, Place, Profile, cgroup, sys};
use nacelle_base::{Chain, Classify, Kind};
use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io;
use std::path::PathBuf;

/// What the process keeps.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The files and directories that stay visible.
    pub places: Vec<Place>,
    /// A directory of this process on which the new root is mounted.
    pub scaffold: PathBuf,
    /// The cgroup of the process, which is created if it is missing.
    pub cgroup: Option<PathBuf>,
    /// The limit of locked memory in bytes: what passed-through devices access of a VM's memory.
    pub locked_bytes: u64,
    /// The reaction to a system call that is not allowed.
    pub seccomp: Mode,
    /// Whether the process starts other programs.
    pub profile: Profile,
}

/// The process could not enter its jail. It must end then, because some steps may have been done.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// The mount namespace could not be set up.
    #[error("the pod process cannot be shut in")]
    Walls(#[from] WallError),
    /// A system call of a step failed.
    #[error("the pod process cannot {what}")]
    Step {
        /// The step: "limit itself", "give up its capabilities".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A seccomp filter could not be installed.
    #[error("the pod process cannot filter its system calls")]
    Seccomp(#[from] SeccompError),
}

impl Classify for JailError {
    fn kind(&self) -> Kind {
        Kind::Internal
    }
}

/// Closes all inherited descriptors except the standard streams. Must be the first action of the process, because it also
/// closes what the process has opened before.
pub fn close_inherited() -> Result<(), JailError> {
    sys::close_inherited().map_err(step("close what it inherited"))
}

/// Drops all rights except those of the plan, irrevocably. Open descriptors stay open. If the node does not allow the
/// cgroup, that is only logged.
pub fn enter(plan: Plan) -> Result<(), JailError> {
    if let Some(group) = &plan.cgroup
        && let Err(error) = cgroup::join(group)
    {
        tracing::warn!(group = %group.display(), "no control group of its own: {}", Chain(&error));
    }
    walls::build(plan.places, &plan.scaffold)?;
    limit(0, plan.locked_bytes)?;
    // This comes last, because changing the capabilities may set the flag again.
    prctl::set_dumpable(false).map_err(|errno| step("limit itself")(errno.into()))?;
    seccomp::arm(plan.seccomp, plan.profile)?;
    Ok(())
}

/// Drops all rights except these capabilities (one bit each), irrevocably. For a process of one thread that has a root of
/// its own already, starts no program and uses only open descriptors.
pub fn confine(seccomp: Mode, capabilities: u64) -> Result<(), JailError> {
    limit(capabilities, 0)?;
    Ok(seccomp::arm_single(seccomp)?)
}

fn limit(capabilities: u64, locked_bytes: u64) -> Result<(), JailError> {
    let limited = "limit itself";
    // Guest memory must not be written to a core dump; memory must not be locked unless a device needs it.
    for (limit, most) in [(Resource::RLIMIT_CORE, 0), (Resource::RLIMIT_MEMLOCK, locked_bytes)] {
        let allowed = match setrlimit(limit, most, most) {
            // Inside a container, limits cannot be raised: the existing limit is kept.
            Err(Errno::EPERM) => {
                getrlimit(limit).and_then(|(_, hard)| setrlimit(limit, hard.min(most), hard.min(most)))
            }
            other => other,
        };
        allowed.map_err(|errno| step(limited)(errno.into()))?;
    }
    prctl::set_no_new_privs().map_err(|errno| step(limited)(errno.into()))?;
    sys::drop_capabilities(capabilities).map_err(step("give up its capabilities"))
}

fn step(what: &'static str) -> impl FnOnce(io::Error) -> JailError {
    move |source| JailError::Step { what, source }
}
