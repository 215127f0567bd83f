//! Starts the process beside a pod process that holds the pod's volumes of the node (`nacelle-fs`; without a guest, the
//! agent), and mounts volumes into it for the daemon.
//!
//! The start runs on the first thread, while it is the only one; the daemon's calls run on the blocking pool.

use crate::error::PodError;
use crate::identity::{self, IdentityError};
use crate::spec::{EngineSpec, PodSpec};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Classify, FailureKind};
use nacelle_fs::{FileServerConfig, FileServerProcess, ShareError, ShareLayout};
pub use nacelle_fs::{Owners, Propagation, VolumeAccess, VolumeTarget, VolumeToMount};
use nacelle_jail::SocketUse;
use nacelle_model::process::ProcessIdentity;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The name of the file that identifies the process, in the daemon's part of the pod's run directory.
const FILE: &str = "share.json";

/// A pod's volumes cannot be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum VolumesError {
    /// The process that holds the volumes is gone, or was never started.
    #[error("cannot mount or unmount volumes of the pod in {}: it has no file-server process", dir.display())]
    Gone {
        /// The pod's run directory.
        dir: PathBuf,
    },
    /// The process cannot be identified.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The process does not accept the volumes.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The work on the blocking pool did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for VolumesError {
    fn kind(&self) -> FailureKind {
        match self {
            VolumesError::Gone { .. } => FailureKind::Unavailable,
            VolumesError::Identity(source) => source.kind(),
            VolumesError::Share(source) => source.kind(),
            VolumesError::Task(source) => source.kind(),
        }
    }
}

/// Starts the file-server process for pods that are jailed VMs, in the pod's cgroup. Returns `None` if the pod needs none.
/// The process of a container pod serves all volumes as one share; that of a machine pod has one share for each file
/// system.
pub(crate) fn start(spec: &PodSpec, dir: &Path) -> Result<Option<FileServerProcess>, PodError> {
    let layout = match spec.engine {
        EngineSpec::Kvm {} | EngineSpec::Qemu { .. } => ShareLayout::Single,
        EngineSpec::Keeper { shares: count @ 1.., .. } => ShareLayout::PerVolume(count),
        EngineSpec::Keeper { .. } | EngineSpec::Host { .. } => return Ok(None),
    };
    let Some(jail) = &spec.jail else { return Ok(None) };
    if let Some(group) = &jail.cgroup {
        // If this fails, the error is reported when the pod process joins the cgroup for good.
        let _ = nacelle_jail::cgroup::join(group);
    }
    let sockets = if spec.has_sockets { SocketUse::Connect } else { SocketUse::Open };
    let cache = Duration::from_secs(spec.volume_cache_seconds);
    let config = FileServerConfig { seccomp: jail.seccomp, cache, layout, sockets, user: jail.user };
    let share = nacelle_fs::start_file_server(dir, config)?;
    record_process(share.pid().as_raw(), dir)?;
    Ok(Some(share))
}

/// Returns the identity of the process that holds the volumes of the pod of this directory; `None` if there was none.
pub(crate) fn read_identity(dir: &Path) -> Result<Option<ProcessIdentity>, IdentityError> {
    identity::read_from(&dir.join(FILE))
}

/// Records which child of this process holds the volumes. The pod process calls it before it is jailed, because the file is
/// not accessible in the jail.
pub(crate) fn record_process(process: i32, dir: &Path) -> Result<(), IdentityError> {
    identity::write_to(&identity::of_child(process)?, &dir.join(FILE))
}

/// Mounts volumes of the node for a container of the pod in `dir`: the agent finds the n-th at
/// `nacelle_base::share::DIRECTORY/CONTAINER/n`. Mounts all or none.
pub async fn attach(
    dir: &Path,
    taker: VolumeTarget,
    container: &str,
    volumes: Vec<VolumeToMount>,
) -> Result<(), VolumesError> {
    let container = container.to_owned();
    with_process(dir, move |process| match process {
        Ok(process) => Ok(nacelle_fs::mount_volumes(process.as_fd(), taker, &container, &volumes)?),
        Err(error) => Err(error),
    })
    .await
}

/// Unmounts the volumes of a container. Succeeds if the process is gone, and its mounts with it.
pub async fn detach(dir: &Path, taker: VolumeTarget, container: &str) -> Result<(), VolumesError> {
    let container = container.to_owned();
    with_process(dir, move |process| match process {
        Ok(process) => Ok(nacelle_fs::unmount_volumes(process.as_fd(), taker, &container)?),
        Err(VolumesError::Gone { .. }) => Ok(()),
        Err(error) => Err(error),
    })
    .await
}

async fn with_process(
    dir: &Path,
    work: impl FnOnce(Result<OwnedFd, VolumesError>) -> Result<(), VolumesError> + Send + 'static,
) -> Result<(), VolumesError> {
    let dir = dir.to_owned();
    run_blocking("change the volumes of the file-server process", move || work(open_process(&dir))).await?
}

/// Opens a pidfd of the process, which must be a child of the pod process.
fn open_process(dir: &Path) -> Result<OwnedFd, VolumesError> {
    let gone = || VolumesError::Gone { dir: dir.to_owned() };
    let pod = identity::read(dir)?.ok_or_else(gone)?;
    let share = read_identity(dir)?.ok_or_else(gone)?;
    let handle = identity::open(&share)?.ok_or_else(gone)?;
    // The parent is read while the pidfd is held, and before the check that the pod process is still the one that was started.
    let child = identity::parent(&share)? == Some(pod.pid);
    // Nothing may be mounted in the node's own mount namespace.
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
