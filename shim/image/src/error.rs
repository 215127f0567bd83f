//! Owns: the errors of this crate and what they mean to a caller.

use nacelle_base::files::FileError;
use nacelle_base::{Classify, Kind};
use std::path::PathBuf;
use std::sync::Arc;

/// Why something with an image failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A text is no image reference.
    #[error("{text:?} is not an image reference: {why}")]
    BadReference {
        /// The text, cut after 300 characters.
        text: String,
        /// The rule it breaks.
        why: &'static str,
    },
    /// No such image here.
    #[error("image {name:?} is not in the store")]
    NotFound {
        /// What was asked for.
        name: String,
    },
    /// A short id fits several images.
    #[error("{name:?} is the beginning of the ids of several images; give more digits")]
    Ambiguous {
        /// What was asked for.
        name: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another caller's pull of the same image, for which this one waited, failed.
    #[error(transparent)]
    Shared(Arc<ImageError>),
    /// The list of images is of a format that this version does not know.
    #[error("{path} has format {version}; this version of Nacelle knows format {known} only", path = path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version it has.
        version: u64,
        /// The version we know.
        known: u64,
    },
}

impl Classify for ImageError {
    fn kind(&self) -> Kind {
        match self {
            ImageError::BadReference { .. } | ImageError::Ambiguous { .. } => Kind::Invalid,
            ImageError::NotFound { .. } => Kind::NotFound,
            ImageError::File(error) => error.kind(),
            ImageError::Shared(error) => error.kind(),
            ImageError::Version { .. } => Kind::Conflict,
        }
    }
}
