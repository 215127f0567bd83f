//! Defines the errors of sharing volumes of the node.

use nacelle_base::{Classify, Kind};
use nacelle_jail::JailError;
use std::io;
use std::path::PathBuf;

/// Volumes of the node cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// A step in the life of the file-server process failed.
    #[error("the process for the volumes of the node cannot {what}")]
    Step {
        /// The step, in the passive voice or as an infinitive: "be started", "leave the node's files".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The process could not enter its jail.
    #[error("the process for the volumes of the node cannot be shut in")]
    Jail {
        /// The cause.
        #[from]
        source: JailError,
    },
    /// The process ended, or did not become ready in time.
    #[error("the process for the volumes of the node did not start; the pod's log has its reason")]
    Silent {
        /// The error of reading from the process.
        source: io::Error,
    },
    /// A volume does not exist, or could not be mounted.
    #[error("cannot {what} the volume {}", path.display())]
    Volume {
        /// The step: "open", "mount", "make a place for".
        what: &'static str,
        /// The path on the node.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The volume lies on a mount that does not propagate mounts below it.
    #[error("the volume {} lies on the mount {}, which is not {needed}", path.display(), at.display())]
    NotShared {
        /// The path on the node.
        path: PathBuf,
        /// The mount point of that mount.
        at: PathBuf,
        /// The required propagation: "shared".
        needed: &'static str,
    },
    /// The file system does not support idmapped mounts, or the user namespace could not be created.
    #[error("cannot map the owners of the volume {}", path.display())]
    Owners {
        /// The path on the node.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Volumes could not be unmounted.
    #[error("cannot take back the volumes of container {container}")]
    Detach {
        /// The id of their container.
        container: String,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for ShareError {
    fn kind(&self) -> Kind {
        match self {
            ShareError::Volume { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => Kind::NotFound,
                _ => Kind::Internal,
            },
            ShareError::NotShared { .. } => Kind::Conflict,
            // mount_setattr(2) fails with EINVAL for a file system without idmapped mounts.
            ShareError::Owners { source, .. } if source.kind() == io::ErrorKind::InvalidInput => Kind::Unsupported,
            _ => Kind::Internal,
        }
    }
}
