//! Defines the error of a copied-in volume.

use nacelle_base::copied_in::{MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH};
use nacelle_base::{Classify, FailureKind};
use std::io;

/// Reasons writing or removing a copied-in volume fails.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum CopiedInVolumeError {
    #[error(
        "invalid volume name {name:?}: 1 to 128 letters, digits, '_', '-' and '.' are allowed, not starting with '.'"
    )]
    Name { name: String },
    #[error("the volume {name} is being written already")]
    Busy { name: String },
    #[error("the volume {name} was not sent completely")]
    Short { name: String },
    #[error(
        "invalid path {path:?} in a volume: at most {MAX_PATH} bytes and {MAX_DEPTH} names other than . and .. are allowed"
    )]
    Path { path: String },
    #[error(
        "cannot add {path:?} to a volume: its directory is missing, it exists already, or it is not a file, directory or link"
    )]
    Order { path: String },
    #[error("the volume has more than {MAX_ENTRIES} files, directories and links, or {MAX_BYTES} bytes")]
    TooMuch,
    #[error("cannot update the volume {name}: it exists without kubelet's layout")]
    Exists { name: String },
    #[error("the volume {name} has a link ..data without its target")]
    NoData { name: String },
    #[error("cannot open the copied-in file {name}")]
    NoFile { name: String, source: io::Error },
    #[error("cannot {what} {path:?} of a volume")]
    Write { what: &'static str, path: String, source: io::Error },
    #[error("no space for {path:?} of a volume: all copied-in volumes together have half of the guest's memory")]
    Full { path: String },
    #[error("cannot {what} the directory of copied-in volumes")]
    Directory { what: &'static str, source: io::Error },
}

impl Classify for CopiedInVolumeError {
    fn kind(&self) -> FailureKind {
        match self {
            CopiedInVolumeError::Name { .. } | CopiedInVolumeError::Path { .. } | CopiedInVolumeError::Order { .. } => {
                FailureKind::Invalid
            }
            CopiedInVolumeError::Busy { .. }
            | CopiedInVolumeError::Exists { .. }
            | CopiedInVolumeError::NoData { .. } => FailureKind::Conflict,
            CopiedInVolumeError::TooMuch | CopiedInVolumeError::Full { .. } => FailureKind::Exhausted,
            CopiedInVolumeError::NoFile { .. } => FailureKind::NotFound,
            CopiedInVolumeError::Short { .. } => FailureKind::Unavailable,
            CopiedInVolumeError::Write { .. } | CopiedInVolumeError::Directory { .. } => FailureKind::Internal,
        }
    }
}
