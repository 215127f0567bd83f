//! Owns: why volumes of the node cannot be shared.

use nacelle_base::{Classify, Kind};
use nacelle_jail::JailError;
use std::io;
use std::path::PathBuf;

/// What failed.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// A step of the process that has the volumes.
    #[error("the process for the volumes of the node cannot {what}")]
    Step {
        /// "be started", "leave the node's files".
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Its rights could not be given up.
    #[error("the process for the volumes of the node cannot be shut in")]
    Jail {
        /// Why.
        #[from]
        source: JailError,
    },
    /// It ended, or said nothing.
    #[error("the process for the volumes of the node did not start; the pod's log has its reason")]
    Silent {
        /// What reading of it gave.
        source: io::Error,
    },
    /// A volume is not there, or could not be mounted.
    #[error("cannot {what} the volume {}", path.display())]
    Volume {
        /// "open", "mount", "make a place for".
        what: &'static str,
        /// Of the node.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It lies on a mount that tells nobody of what is mounted below it.
    #[error("the volume {} lies on the mount {}, which is not {needed}", path.display(), at.display())]
    NotShared {
        /// Of the node.
        path: PathBuf,
        /// Where that is mounted.
        at: PathBuf,
        /// "shared".
        needed: &'static str,
    },
    /// Its file system cannot show other owners than it has, or there can be no user namespace that says which.
    #[error("cannot map the owners of the volume {}", path.display())]
    Owners {
        /// Of the node.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Volumes could not be taken back.
    #[error("cannot take back the volumes of container {container}")]
    Detach {
        /// Whose they are.
        container: String,
        /// Why.
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
            // What mount_setattr(2) says of a file system without mapped mounts.
            ShareError::Owners { source, .. } if source.kind() == io::ErrorKind::InvalidInput => Kind::Unsupported,
            _ => Kind::Internal,
        }
    }
}
