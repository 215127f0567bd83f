//! The error of a copied-in volume.

use nacelle_base::push::{MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH};
use nacelle_base::{Classify, Kind};
use std::io;

/// Reasons a volume cannot be written or removed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum PushError {
    #[error("{name:?} is no name of a volume: 1 to 128 letters, digits, '_', '-' and '.' are, not starting with '.'")]
    Name { name: String },
    #[error("the volume {name} is being pushed already")]
    Busy { name: String },
    #[error("the volume {name} was not pushed to its end")]
    Short { name: String },
    #[error("{path:?} is no path in a volume: at most {MAX_PATH} bytes and {MAX_DEPTH} names without . and .. are")]
    Path { path: String },
    #[error("{path:?} comes before the folder that it is in, or for the second time, or is no type that is pushed")]
    Order { path: String },
    #[error("the volume has more than {MAX_ENTRIES} files, folders and links, or {MAX_BYTES} bytes")]
    TooMuch,
    #[error("the volume {name} is there, and is not one that can be pushed again")]
    There { name: String },
    #[error("the volume {name} came without the files that it leads to")]
    NoData { name: String },
    #[error("cannot {what} {path:?} of a volume")]
    Write { what: &'static str, path: String, source: io::Error },
    #[error("no room for {path:?} of a volume: all of them have half of the guest's memory")]
    Full { path: String },
    #[error("cannot {what} the folder of pushed volumes")]
    Folder { what: &'static str, source: io::Error },
}

impl Classify for PushError {
    fn kind(&self) -> Kind {
        match self {
            PushError::Name { .. } | PushError::Path { .. } | PushError::Order { .. } => Kind::Invalid,
            PushError::Busy { .. } | PushError::There { .. } | PushError::NoData { .. } => Kind::Conflict,
            PushError::TooMuch | PushError::Full { .. } => Kind::Exhausted,
            PushError::Short { .. } => Kind::Unavailable,
            PushError::Write { .. } | PushError::Folder { .. } => Kind::Internal,
        }
    }
}
