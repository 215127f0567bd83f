//! Defines the errors of a container's root: of its file system as such, and of paths in it that a specification names.

use nacelle_base::{Classify, FailureKind};
use nix::errno::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Mounting, reading or removing the root of a container failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", path.display())]
pub struct RootError {
    /// The operation that failed, a verb phrase.
    pub what: &'static str,
    /// The path on which it failed.
    pub path: PathBuf,
    /// The system call's error.
    pub source: io::Error,
}

/// Returns a function for `map_err` that makes a system call's error into "cannot `what` `path`".
pub(crate) fn root_error<E: Into<io::Error>>(
    what: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(E) -> RootError {
    let path = path.into();
    move |source| RootError { what, path, source: source.into() }
}

/// A path of the specification is not usable in the root of its container.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum RootPathError {
    #[error("cannot prepare the {purpose} {} in the container's root: {}", requested.display(), at.display())]
    Prepare { purpose: &'static str, requested: PathBuf, at: PathBuf, source: io::Error },
    #[error("cannot create the device {}: it is in the volume at {}; choose a path outside volumes", device.display(), volume.display())]
    DeviceInVolume { device: PathBuf, volume: PathBuf },
    #[error(
        "cannot mount at {}: it leads to {}, a file system of the container's own; use a path that is not a link",
        at.display(), to.display()
    )]
    Reserved { at: PathBuf, to: PathBuf },
    #[error(
        "cannot mount at {}: it is in sysfs, where nothing can be created, and the kernel has no {}; mount over /sys, or elsewhere",
        at.display(), to.display()
    )]
    NotInSysfs { at: PathBuf, to: PathBuf },
    #[error(
        "a mount of the container is at {}, in its /proc: a volume must not be mounted through a link in another volume",
        at.display()
    )]
    OverProc { at: PathBuf },
}

impl RootPathError {
    pub(super) fn prepare(purpose: &'static str, requested: &Path, at: &Path, error: Errno) -> RootPathError {
        RootPathError::Prepare { purpose, requested: requested.to_owned(), at: at.to_owned(), source: error.into() }
    }
}

impl Classify for RootPathError {
    fn kind(&self) -> FailureKind {
        match self {
            RootPathError::DeviceInVolume { .. }
            | RootPathError::Reserved { .. }
            | RootPathError::NotInSysfs { .. }
            | RootPathError::OverProc { .. } => FailureKind::Invalid,
            RootPathError::Prepare { source, .. } => match source.raw_os_error() {
                Some(libc::ENOTDIR | libc::EISDIR | libc::EEXIST | libc::ELOOP | libc::ENAMETOOLONG | libc::EINVAL) => {
                    FailureKind::Invalid
                }
                _ => match FailureKind::from(source.kind()) {
                    FailureKind::Exhausted => FailureKind::Exhausted,
                    _ => FailureKind::Internal,
                },
            },
        }
    }
}
