//! Owns: what can go wrong when the host changes a slot.

use nacelle_base::{Classify, Kind};
use std::path::PathBuf;

/// A slot could not be made or changed. The slot is as it was.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// A serial number is 1 to 20 bytes of printable ASCII.
    #[error("{serial:?} is no serial number of a disk: it has 1 to 20 printable ASCII characters")]
    Serial {
        /// The one given.
        serial: String,
    },
    /// Offsets and lengths are multiples of 512 and small enough to add up.
    #[error("{what} {value} is not a multiple of 512 or too large")]
    Unaligned {
        /// Which number.
        what: &'static str,
        /// The number, in bytes.
        value: u64,
    },
    /// Nothing to place.
    #[error("cannot place an image of no bytes at {at}")]
    Empty {
        /// Where it should have gone, in bytes.
        at: u64,
    },
    /// Something lies there already.
    #[error("cannot place {length} bytes at {at}: {other_length} bytes lie at {other}")]
    Overlap {
        /// Where it should have gone, in bytes.
        at: u64,
        /// Its length in bytes.
        length: u64,
        /// Where the other one begins, in bytes.
        other: u64,
        /// The other one's length in bytes.
        other_length: u64,
    },
    /// The file cannot be opened or made as long as the slot.
    #[error("cannot use {path} as a disk")]
    Open {
        /// The file or block device.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file ends before the extent does.
    #[error("{path} has {length} bytes, {needed} are needed")]
    TooShort {
        /// The file or block device.
        path: PathBuf,
        /// Its length in bytes.
        length: u64,
        /// Where the extent ends, in bytes.
        needed: u64,
    },
    /// The operation belongs to another sort of slot (place: read-only; place_volume: for volumes; resize: read-write).
    #[error("slot {serial} is {sort}: cannot {operation} it")]
    WrongSort {
        /// The slot.
        serial: String,
        /// Its sort.
        sort: &'static str,
        /// What was asked.
        operation: &'static str,
    },
}

impl Classify for BlockError {
    fn kind(&self) -> Kind {
        match self {
            BlockError::Serial { .. } | BlockError::Unaligned { .. } | BlockError::Empty { .. } => Kind::Invalid,
            BlockError::Overlap { .. } => Kind::AlreadyExists,
            BlockError::Open { source, .. } => source.kind().into(),
            BlockError::TooShort { .. } | BlockError::WrongSort { .. } => Kind::Conflict,
        }
    }
}
