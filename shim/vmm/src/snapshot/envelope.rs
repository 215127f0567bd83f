//! Encodes and decodes the file `state`: a header of 32 bytes (magic, version, checksum, length) and a document, which is CBOR
//! (RFC 8949) in version 2 and JSON in version 1. The reader trusts no byte: any input gives a state or an error.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::error::Error;
use std::path::Path;

use super::SnapshotError;

/// The version of newly written files. Older ones are converted when they are read.
pub const VERSION: u32 = 2;
/// The last version whose document is JSON.
const LAST_JSON: u32 = 1;
/// The longest byte string of a document, in bytes: the extended registers of a vCPU.
const MAX_STRING: usize = 4096;

/// The maximum size of the file `state` in bytes. A VM with 64 vCPUs needs less than a fourth of it.
pub const MAX_STATE_BYTES: u64 = 16 << 20;

const MAGIC: [u8; 8] = *b"NACELLE\x1a";
/// The size of the header: magic, version, checksum, length of the document, and eight zero bytes.
const HEADER_BYTES: usize = 32;

struct StateHeader {
    version: u32,
    checksum: u32,
    length: u64,
}

impl StateHeader {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.checksum.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes
    }

    /// Splits the bytes into header and document. Returns `None` if they do not start with a header.
    fn split(bytes: &[u8]) -> Option<(StateHeader, &[u8])> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (version, rest) = rest.split_first_chunk()?;
        let (checksum, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (_reserved, document) = rest.split_first_chunk::<8>()?;
        let header = StateHeader {
            version: u32::from_le_bytes(*version),
            checksum: u32::from_le_bytes(*checksum),
            length: u64::from_le_bytes(*length),
        };
        Some((header, document))
    }
}

/// Computes the checksum. It covers the version too, because the version decides how the document is read.
fn checksum(version: u32, document: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&version.to_le_bytes());
    hasher.update(document);
    hasher.finalize()
}

/// Encodes a state as the bytes of the file.
pub(super) fn encode(state: &impl Serialize) -> Result<Vec<u8>, SnapshotError> {
    let mut document = Vec::new();
    ciborium::into_writer(state, &mut document).map_err(|source| SnapshotError::Encode { source: Box::new(source) })?;
    add_header(VERSION, &document)
}

/// Adds the header to a document of this version.
pub(super) fn add_header(version: u32, document: &[u8]) -> Result<Vec<u8>, SnapshotError> {
    let length = document.len() as u64;
    let bytes = length.saturating_add(HEADER_BYTES as u64);
    if bytes > MAX_STATE_BYTES {
        return Err(SnapshotError::TooLarge { bytes, max: MAX_STATE_BYTES });
    }
    let mut bytes = StateHeader { version, checksum: checksum(version, document), length }.bytes();
    bytes.extend(document);
    Ok(bytes)
}

/// Decodes the state from the file's bytes. `path` is used in error messages only.
pub(super) fn decode<S: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<S, SnapshotError> {
    let path = || path.to_owned();
    if bytes.len() as u64 > MAX_STATE_BYTES {
        return Err(SnapshotError::TooLarge { bytes: bytes.len() as u64, max: MAX_STATE_BYTES });
    }
    let (header, document) = StateHeader::split(bytes).ok_or_else(|| SnapshotError::NotASnapshot { path: path() })?;
    // Checks the version first, because a newer version may have a different header after it.
    if !(1..=VERSION).contains(&header.version) {
        return Err(SnapshotError::Version { path: path(), got: header.version });
    }
    if document.len() as u64 != header.length {
        let (got, expected) = (bytes.len() as u64, header.length.saturating_add(HEADER_BYTES as u64));
        return Err(SnapshotError::Length { path: path(), got, expected });
    }
    let got = checksum(header.version, document);
    if got != header.checksum {
        return Err(SnapshotError::Checksum { path: path(), got, expected: header.checksum });
    }
    let decoded = match header.version {
        ..=LAST_JSON => serde_json::from_slice(document).map_err(Box::from),
        _ => decode_cbor(document),
    };
    decoded.map_err(|source| SnapshotError::Decode { path: path(), source })
}

/// Decodes a whole CBOR document. The decoder allocates as bytes arrive and limits the depth.
fn decode_cbor<S: DeserializeOwned>(document: &[u8]) -> Result<S, Box<dyn Error + Send + Sync>> {
    let mut rest = document;
    let state = ciborium::de::from_reader_with_buffer(&mut rest, &mut [0; MAX_STRING])?;
    match rest {
        [] => Ok(state),
        rest => Err(format!("{} bytes follow the document", rest.len()).into()),
    }
}
