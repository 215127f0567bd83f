//! Owns: the order in which the pod process gives things up.
//! Threads: the first one, while it is the only one.

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
    /// The files and folders that it still sees.
    pub places: Vec<Place>,
    /// A folder of the process's own, on which the new root is made.
    pub scaffold: PathBuf,
    /// Its control group, made if it is missing.
    pub cgroup: Option<PathBuf>,
    /// Memory that it may lock, in bytes: what devices of the node reach of a machine's.
    pub locked_bytes: u64,
    /// What happens at a system call that is not allowed.
    pub seccomp: Mode,
    /// Whether it starts other programs.
    pub profile: Profile,
}

/// Why the process is not in its jail. It must end then: a part of it may be done.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// No mount namespace of its own.
    #[error("the pod process cannot be shut in")]
    Walls(#[from] WallError),
    /// A system call of this step failed.
    #[error("the pod process cannot {what}")]
    Step {
        /// "limit itself", "give up its capabilities".
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No filter.
    #[error("the pod process cannot filter its system calls")]
    Seccomp(#[from] SeccompError),
}

impl Classify for JailError {
    fn kind(&self) -> Kind {
        Kind::Internal
    }
}

/// Closes what the process inherited, its standard streams aside. The first thing that it does: whatever it has
/// opened before is closed, too.
pub fn close_inherited() -> Result<(), JailError> {
    sys::close_inherited().map_err(step("close what it inherited"))
}

/// Gives up everything but what the plan keeps; there is no way back. What is open stays open. A control group that
/// the node does not allow is no failure: it is said in the log.
pub fn enter(plan: Plan) -> Result<(), JailError> {
    if let Some(group) = &plan.cgroup
        && let Err(error) = cgroup::join(group)
    {
        tracing::warn!(group = %group.display(), "no control group of its own: {}", Chain(&error));
    }
    walls::build(plan.places, &plan.scaffold)?;
    limit(0, plan.locked_bytes)?;
    // Afterwards, because the change of capabilities may set it again.
    prctl::set_dumpable(false).map_err(|errno| step("limit itself")(errno.into()))?;
    seccomp::arm(plan.seccomp, plan.profile)?;
    Ok(())
}

/// Gives up everything but these capabilities (a bit each), for a process of one thread that has a root of its own already,
/// starts nothing and talks over what is open. There is no way back.
pub fn confine(seccomp: Mode, capabilities: u64) -> Result<(), JailError> {
    limit(capabilities, 0)?;
    Ok(seccomp::arm_single(seccomp)?)
}

fn limit(capabilities: u64, locked_bytes: u64) -> Result<(), JailError> {
    let limited = "limit itself";
    // No image of guest memory on the node's disk; nothing that cannot be swapped or moved, where no device needs it.
    for (limit, most) in [(Resource::RLIMIT_CORE, 0), (Resource::RLIMIT_MEMLOCK, locked_bytes)] {
        let allowed = match setrlimit(limit, most, most) {
            // A node that is somebody's container may raise nothing: what it has is what there is.
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
