//! Owns: what can be wrong with a snapshot.

use nacelle_base::{Classify, Kind};
use std::io;
use std::path::PathBuf;

use super::envelope::VERSION;

/// A snapshot could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// There is something in the folder already.
    #[error("{} exists already", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The folder has no name that a file can have.
    #[error("{} is no place for a snapshot", path.display())]
    Place {
        /// The folder.
        path: PathBuf,
    },
    /// A file could not be used.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The state cannot be written down.
    #[error("cannot write the machine's state down")]
    Encode {
        /// Why not.
        source: serde_json::Error,
    },
    /// The state is larger than any machine's.
    #[error("a state of {bytes} bytes: at most {max}")]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// The most.
        max: u64,
    },
    /// The file is something else.
    #[error("{} is no machine's state", path.display())]
    NotASnapshot {
        /// The file.
        path: PathBuf,
    },
    /// A version that this Nacelle does not know.
    #[error("{} has format version {got}; this Nacelle reads 1 to {VERSION}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        got: u32,
    },
    /// Bytes are missing or too many.
    #[error("{} has {got} bytes instead of {expected}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        got: u64,
        /// The length that it should have.
        expected: u64,
    },
    /// Bytes are not those that were written.
    #[error("{} is damaged: its checksum is {got:08x} instead of {expected:08x}", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Of the bytes that are there.
        got: u32,
        /// As written.
        expected: u32,
    },
    /// The state is whole, and is not what it should be.
    #[error("{} does not describe a machine", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The machine's state cannot be taken.
    #[error("cannot take the machine's state")]
    Machine {
        /// Why not.
        source: crate::machine::Error,
    },
}

impl Classify for SnapshotError {
    fn kind(&self) -> Kind {
        match self {
            SnapshotError::Exists { .. } => Kind::AlreadyExists,
            SnapshotError::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => Kind::NotFound,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Kind::Exhausted,
                _ => Kind::Internal,
            },
            SnapshotError::Version { .. } => Kind::Unsupported,
            SnapshotError::TooLarge { .. } => Kind::Exhausted,
            SnapshotError::Machine { source } => source.kind(),
            SnapshotError::Encode { .. } => Kind::Internal,
            SnapshotError::Place { .. }
            | SnapshotError::NotASnapshot { .. }
            | SnapshotError::Length { .. }
            | SnapshotError::Checksum { .. }
            | SnapshotError::Decode { .. } => Kind::Invalid,
        }
    }
}
