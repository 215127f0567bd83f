//! Defines the errors of changing a slot.

use nacelle_base::{Classify, FailureKind};
use std::path::PathBuf;

/// A slot could not be created or changed. An existing slot is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The serial number does not consist of 1 to 20 bytes of printable ASCII.
    #[error("disk serial {serial:?} is invalid: it must be 1 to 20 printable ASCII characters")]
    Serial {
        /// The serial number.
        serial: String,
    },
    /// An offset or length is not a multiple of 512, or too large.
    #[error("{what} {value} is invalid: it must be a multiple of 512 and at most 1 EiB")]
    Unaligned {
        /// The name of the number.
        what: &'static str,
        /// The number in bytes.
        value: u64,
    },
    /// The image is empty.
    #[error("cannot place an empty image at {at}")]
    Empty {
        /// The requested position in bytes.
        at: u64,
    },
    /// The range overlaps another one.
    #[error("cannot place {length} bytes at {at}: they overlap the {other_length} bytes at {other}")]
    Overlap {
        /// The requested position in bytes.
        at: u64,
        /// The length in bytes.
        length: u64,
        /// The position of the other range in bytes.
        other: u64,
        /// The length of the other range in bytes.
        other_length: u64,
    },
    /// The file cannot be opened, or not extended to the size of the slot.
    #[error("cannot use {path} as a disk")]
    Open {
        /// The file or block device.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is shorter than the extent requires.
    #[error("{path} is too short: it has {length} bytes, {needed} are needed")]
    TooShort {
        /// The file or block device.
        path: PathBuf,
        /// The length of the file in bytes.
        length: u64,
        /// The end of the extent in bytes.
        needed: u64,
    },
    /// The disk cannot be copied.
    #[error("cannot copy disk {serial}")]
    Copy {
        /// The serial number of the slot.
        serial: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The disk is being copied already.
    #[error("cannot copy disk {serial}: another copy of it has not ended")]
    Copying {
        /// The serial number of the slot.
        serial: String,
    },
    /// The caller has stopped the copy.
    #[error("the copy of disk {serial} was stopped")]
    CopyStopped {
        /// The serial number of the slot.
        serial: String,
    },
    /// The slot is of the wrong kind for the operation (place: read-only; place_volume: for volumes; resize, copy: read-write).
    #[error("cannot {operation} disk slot {serial}: it is {slot_kind}")]
    WrongKind {
        /// The serial number of the slot.
        serial: String,
        /// The kind of the slot.
        slot_kind: &'static str,
        /// The operation.
        operation: &'static str,
    },
}

impl Classify for BlockError {
    fn kind(&self) -> FailureKind {
        match self {
            BlockError::Serial { .. } | BlockError::Unaligned { .. } | BlockError::Empty { .. } => FailureKind::Invalid,
            BlockError::Overlap { .. } => FailureKind::AlreadyExists,
            BlockError::Open { source, .. } | BlockError::Copy { source, .. } => source.kind().into(),
            BlockError::TooShort { .. } | BlockError::WrongKind { .. } | BlockError::Copying { .. } => {
                FailureKind::Conflict
            }
            BlockError::CopyStopped { .. } => FailureKind::Unavailable,
        }
    }
}
