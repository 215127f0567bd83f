//! Defines why a directory of registry settings cannot be used.

use crate::config::SyntaxError;
use nacelle_base::files::FileError;
use nacelle_base::{Classify, FailureKind};
use std::path::PathBuf;

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostsError {
    /// A directory or file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file is not TOML, or a key or value is unknown. The cause has line and column.
    #[error("cannot parse {path}", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        source: SyntaxError,
    },
    /// A setting that Nacelle does not support.
    #[error("{path}: {key}: {rule}", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key, with its sections.
        key: String,
        /// What is supported instead.
        rule: &'static str,
    },
    /// A host has different settings in two places.
    #[error("{path}: {host} has other settings elsewhere; a host has the same ones wherever it is named", path = path.display())]
    Conflict {
        /// The file.
        path: PathBuf,
        /// The host and port.
        host: String,
    },
}

impl Classify for HostsError {
    fn kind(&self) -> FailureKind {
        match self {
            HostsError::File(error) => error.kind(),
            HostsError::Syntax { .. } | HostsError::Unsupported { .. } | HostsError::Conflict { .. } => {
                FailureKind::Invalid
            }
        }
    }
}
