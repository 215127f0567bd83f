//! Defines the errors of writing and reading snapshots.

use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::PathBuf;

use super::envelope::VERSION;

/// A snapshot could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The directory exists and is not empty.
    #[error("cannot save to {}: it exists already", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The path has no valid file name.
    #[error("cannot save a snapshot to {}: the path has no file name", path.display())]
    InvalidPath {
        /// The path.
        path: PathBuf,
    },
    /// An operation on a file failed.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation, as an infinitive.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The state cannot be serialized.
    #[error("cannot serialize the VM's state")]
    Encode {
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The state exceeds the maximum size.
    #[error("the VM's state is too large ({bytes} bytes): the maximum is {max}")]
    TooLarge {
        /// The size of the state in bytes.
        bytes: u64,
        /// The maximum in bytes.
        max: u64,
    },
    /// The file does not begin with a valid header.
    #[error("{} is not the state file of a snapshot", path.display())]
    NotASnapshot {
        /// The file.
        path: PathBuf,
    },
    /// This release cannot read the format version.
    #[error("{} has format version {got}; this Nacelle reads 1 to {VERSION}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version of the file.
        got: u32,
    },
    /// The file is shorter or longer than its header states.
    #[error("{} has {got} bytes instead of {expected}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// The file's length in bytes.
        got: u64,
        /// The length that the header states.
        expected: u64,
    },
    /// The content does not match its checksum.
    #[error("{} is damaged: its checksum is {got:08x} instead of {expected:08x}", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The checksum of the content.
        got: u32,
        /// The checksum in the header.
        expected: u32,
    },
    /// The document is intact but does not have the expected structure.
    #[error("{} does not contain a valid VM state", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller stopped the saving of a running VM.
    #[error("saving the VM was stopped")]
    Stopped,
    /// The kernel tracks no writes to memory that other processes share, nor to pages of the hugetlb pool.
    #[error(
        "cannot save the running VM: writes to shared memory and to huge pages of the pool are not tracked; pause the VM and save it"
    )]
    Untracked,
    /// The VM's state cannot be saved.
    #[error("cannot read the VM's state")]
    Machine {
        /// The cause.
        source: crate::machine::Error,
    },
}

impl Classify for SnapshotError {
    fn kind(&self) -> FailureKind {
        match self {
            SnapshotError::Exists { .. } => FailureKind::AlreadyExists,
            SnapshotError::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => FailureKind::NotFound,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FailureKind::Exhausted,
                _ => FailureKind::Internal,
            },
            SnapshotError::Version { .. } | SnapshotError::Untracked => FailureKind::Unsupported,
            SnapshotError::Stopped => FailureKind::Unavailable,
            SnapshotError::TooLarge { .. } => FailureKind::Exhausted,
            SnapshotError::Machine { source } => source.kind(),
            SnapshotError::Encode { .. } => FailureKind::Internal,
            SnapshotError::InvalidPath { .. }
            | SnapshotError::NotASnapshot { .. }
            | SnapshotError::Length { .. }
            | SnapshotError::Checksum { .. }
            | SnapshotError::Decode { .. } => FailureKind::Invalid,
        }
    }
}
