//! Defines the error of a copied-in volume.

use nacelle_base::push::{MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH};
use nacelle_base::{Classify, Kind};
use std::io;

/// Reasons writing or removing a copied-in volume fails.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum PushError {
    #[error("{name:?} is no name of a volume: 1 to 128 letters, digits, '_', '-' and '.' are, not starting with '.'")]
    Name { name: String },
    #[error("the volume {name} is being written already")]
    Busy { name: String },
    #[error("the volume {name} was not sent completely")]
    Short { name: String },
    #[error("{path:?} is no path in a volume: at most {MAX_PATH} bytes and {MAX_DEPTH} names without . and .. are")]
    Path { path: String },
    #[error("{path:?} comes before its directory, or for the second time, or is no file, directory or link")]
    Order { path: String },
    #[error("the volume has more than {MAX_ENTRIES} files, directories and links, or {MAX_BYTES} bytes")]
    TooMuch,
    #[error("the volume {name} exists, and is not one that can be updated")]
    Exists { name: String },
    #[error("the volume {name} has a link ..data without its target")]
    NoData { name: String },
    #[error("cannot {what} {path:?} of a volume")]
    Write { what: &'static str, path: String, source: io::Error },
    #[error("no space for {path:?} of a volume: all copied-in volumes together have half of the guest's memory")]
    Full { path: String },
    #[error("cannot {what} the directory of copied-in volumes")]
    Directory { what: &'static str, source: io::Error },
}

impl Classify for PushError {
    fn kind(&self) -> Kind {
        match self {
            PushError::Name { .. } | PushError::Path { .. } | PushError::Order { .. } => Kind::Invalid,
            PushError::Busy { .. } | PushError::Exists { .. } | PushError::NoData { .. } => Kind::Conflict,
            PushError::TooMuch | PushError::Full { .. } => Kind::Exhausted,
            PushError::Short { .. } => Kind::Unavailable,
            PushError::Write { .. } | PushError::Directory { .. } => Kind::Internal,
        }
    }
}
