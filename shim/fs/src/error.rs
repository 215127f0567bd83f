//! Defines the errors of sharing volumes of the node.

use nacelle_base::{Classify, FailureKind};
use nacelle_jail::JailError;
use std::io;
use std::path::PathBuf;

/// Volumes of the node cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// A step in the life of the file-server process failed.
    #[error("cannot {what}")]
    Step {
        /// The step, as an infinitive with its object: "start the file-server process".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The process could not enter its jail.
    #[error("cannot jail the file-server process of the pod")]
    Jail {
        /// The cause.
        #[from]
        source: JailError,
    },
    /// The process ended, or did not become ready in time.
    #[error("the file-server process of the pod did not become ready; see the pod's log for the cause")]
    NotReady {
        /// The error of reading from the process.
        source: io::Error,
    },
    /// A volume does not exist, or could not be mounted.
    #[error("cannot {what} the volume {}", path.display())]
    Volume {
        /// The step: "open", "mount", "find the mount of".
        what: &'static str,
        /// The path on the node.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The volume lies on a mount that does not propagate mounts below it.
    #[error("cannot propagate mounts to or from the volume {}: its mount {} is not {needed}; change it with mount --make-shared", path.display(), mount_point.display())]
    NotShared {
        /// The path on the node.
        path: PathBuf,
        /// The mount point of that mount.
        mount_point: PathBuf,
        /// The required propagation: "shared", "shared, nor a slave of a shared mount".
        needed: &'static str,
    },
    /// The file system does not support idmapped mounts, or the user namespace could not be created.
    #[error("cannot map the file owners of the volume {}", path.display())]
    Owners {
        /// The path on the node.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Volumes could not be unmounted.
    #[error("cannot unmount the volumes of container {container}")]
    Unmount {
        /// The id of their container.
        container: String,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for ShareError {
    fn kind(&self) -> FailureKind {
        match self {
            ShareError::Volume { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => FailureKind::NotFound,
                _ => FailureKind::Internal,
            },
            ShareError::NotShared { .. } => FailureKind::Conflict,
            // mount_setattr(2) fails with EINVAL for a file system without idmapped mounts.
            ShareError::Owners { source, .. } if source.kind() == io::ErrorKind::InvalidInput => {
                FailureKind::Unsupported
            }
            _ => FailureKind::Internal,
        }
    }
}
