//! Defines why a container's volume cannot be used for a machine, and the paths at which its volumes are expected.

use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::{Path, PathBuf};

/// The container's directory of mounted volumes.
pub(super) const VOLUMES_DIRECTORY: &str = "/run/nacelle/vm";

/// Returns the container path at which a secret is mounted.
pub(super) fn secret_path(name: &str) -> PathBuf {
    Path::new(VOLUMES_DIRECTORY).join(format!("secret-{name}"))
}

/// Why a volume cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A field of the request, or the file that it names, is invalid.
    #[error("{field} is {value:?}: {rule}")]
    Field {
        /// The field's path.
        field: &'static str,
        /// The value.
        value: String,
        /// The rule.
        rule: String,
    },
    /// The container lacks the mount or device.
    #[error("{user} is {volume}, which the container does not have: {rule}")]
    Missing {
        /// The user of the volume: "disk data".
        user: String,
        /// The volume: "claim data".
        volume: String,
        /// The expected path.
        rule: String,
    },
    /// The node itself uses the device.
    #[error("disk {disk}: {path} is in use on the node (mounted, or part of another device): stop its use first")]
    Busy {
        /// The disk's name.
        disk: String,
        /// The device's path.
        path: String,
    },
    /// A file operation failed.
    #[error("{user}: cannot {operation} {}", path.display())]
    Io {
        /// The user of the volume: "disk data".
        user: String,
        /// The operation: "open".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for VolumeError {
    fn kind(&self) -> FailureKind {
        match self {
            VolumeError::Field { .. } | VolumeError::Missing { .. } => FailureKind::Invalid,
            VolumeError::Busy { .. } => FailureKind::Conflict,
            VolumeError::Io { source, .. } => source.kind().into(),
        }
    }
}

pub(super) fn invalid_field<T>(field: &'static str, value: &str, rule: impl Into<String>) -> Result<T, VolumeError> {
    Err(VolumeError::Field { field, value: value.to_owned(), rule: rule.into() })
}
