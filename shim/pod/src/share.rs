//! Owns: the process beside a pod process that has the pod's volumes of the node (`nacelle-fs`; without a guest, the agent):
//! its start, and how the daemon finds it and puts volumes into it.
//! Threads: the start is on the first one, while it is the only one; the daemon's calls block on threads of the pool.

use crate::error::PodError;
use crate::identity::{self, IdentityError};
use crate::spec::{EngineSpec, PodSpec};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Classify, Kind};
pub use nacelle_fs::{Owners, Propagation, Taker, Volume, VolumeAccess};
use nacelle_fs::{Share, ShareError, Shown};
use nacelle_model::process::ProcessIdentity;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Which process has the volumes, in the daemon's part of the pod's run directory.
const FILE: &str = "share.json";

/// Why a pod's volumes could not be mounted or taken back.
#[derive(Debug, thiserror::Error)]
pub enum VolumesError {
    /// The process that has them is gone, or was never there.
    #[error("the pod in {} has no process for volumes of the node", dir.display())]
    Gone {
        /// The pod's run directory.
        dir: PathBuf,
    },
    /// It could not be found.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// It does not take them.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The work did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for VolumesError {
    fn kind(&self) -> Kind {
        match self {
            VolumesError::Gone { .. } => Kind::Unavailable,
            VolumesError::Identity(source) => source.kind(),
            VolumesError::Share(source) => source.kind(),
            VolumesError::Task(source) => source.kind(),
        }
    }
}

/// Starts the process, for pods that are jailed machines, in the pod's control group. None: the pod needs none. One for containers
/// has all volumes in one share; a machine of the pod's own making has a share for each of its file systems.
pub(crate) fn start(spec: &PodSpec, dir: &Path) -> Result<Option<Share>, PodError> {
    let shown = match spec.engine {
        EngineSpec::Kvm {} | EngineSpec::Qemu { .. } => Shown::All,
        EngineSpec::Keeper { shares: count @ 1.., .. } => Shown::Parts(count),
        EngineSpec::Keeper { .. } | EngineSpec::Host { .. } => return Ok(None),
    };
    let Some(jail) = &spec.jail else { return Ok(None) };
    if let Some(group) = &jail.cgroup {
        // If the node does not allow it, that is said when this process joins it for good.
        let _ = nacelle_jail::cgroup::join(group);
    }
    let share = nacelle_fs::start(dir, jail.seccomp, Duration::from_secs(spec.volume_cache_seconds), shown)?;
    introduce(share.process().as_raw(), dir)?;
    Ok(Some(share))
}

/// The process that has the volumes of the pod of this directory; none if there was none.
pub(crate) fn identity(dir: &Path) -> Result<Option<ProcessIdentity>, IdentityError> {
    identity::read_from(&dir.join(FILE))
}

/// Says which child of this process has the volumes. The process writes it before it is jailed: later it does not see the file.
pub(crate) fn introduce(process: i32, dir: &Path) -> Result<(), IdentityError> {
    identity::write_to(&identity::of(process)?, &dir.join(FILE))
}

/// Mounts volumes of the node for a container of the pod that is served from `dir`: its agent finds the n-th at
/// `nacelle_base::share::FOLDER/CONTAINER/n`. If one cannot be mounted, none is.
pub async fn attach(dir: &Path, taker: Taker, container: &str, volumes: Vec<Volume>) -> Result<(), VolumesError> {
    let container = container.to_owned();
    with(dir, move |process| match process {
        Ok(process) => Ok(nacelle_fs::attach(process.as_fd(), taker, &container, &volumes)?),
        Err(error) => Err(error),
    })
    .await
}

/// Takes the volumes of a container back. If the process is gone, so are they.
pub async fn detach(dir: &Path, taker: Taker, container: &str) -> Result<(), VolumesError> {
    let container = container.to_owned();
    with(dir, move |process| match process {
        Ok(process) => Ok(nacelle_fs::detach(process.as_fd(), taker, &container)?),
        Err(VolumesError::Gone { .. }) => Ok(()),
        Err(error) => Err(error),
    })
    .await
}

async fn with(
    dir: &Path,
    work: impl FnOnce(Result<OwnedFd, VolumesError>) -> Result<(), VolumesError> + Send + 'static,
) -> Result<(), VolumesError> {
    let dir = dir.to_owned();
    run_blocking("change the volumes of the file-server process", move || work(find(&dir))).await?
}

/// A handle on the process, which must be a child of the pod process.
fn find(dir: &Path) -> Result<OwnedFd, VolumesError> {
    let gone = || VolumesError::Gone { dir: dir.to_owned() };
    let pod = identity::read(dir)?.ok_or_else(gone)?;
    let share = identity(dir)?.ok_or_else(gone)?;
    let handle = identity::open(&share)?.ok_or_else(gone)?;
    // Looked at while the handle is held, and the pod process is still the one that was started.
    let child = identity::parent(&share)? == Some(pod.pid);
    // Nothing is mounted where the node's own mounts are.
    if !child || !has_own_mounts(share.pid) || !identity::is_alive(&pod)? || !identity::is_alive(&share)? {
        return Err(gone());
    }
    Ok(handle)
}

fn has_own_mounts(process: i32) -> bool {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/mnt"));
    match (namespace("self"), namespace(&process.to_string())) {
        (Ok(ours), Ok(theirs)) => ours != theirs,
        _ => false,
    }
}
