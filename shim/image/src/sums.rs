//! Records the length and the SHA-256 of the files that this node makes itself: blob and index of a layer, metadata of an image. Their
//! names are digests of something else. The record is the file `.sum` beside them, written before they become visible. Stores of
//! Nacelle 0.1 have none; a verification adds it.

use nacelle_base::files::{FileError, at, write_whole};
use nacelle_base::retry::retry_interrupted;
use nacelle_model::digest::Digest;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::layer::PIECE;

const FORMAT_VERSION: u64 = 1;

/// The maximum size of a record in bytes.
const MAX_RECORD: u64 = 4096;

/// The length and the digest of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSum {
    /// The length in bytes.
    pub length: u64,
    /// The digest of all bytes.
    pub digest: Digest,
    /// The fs-verity digest, if the file was written with one (`crate::store_verity`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verity: Option<Digest>,
}

impl FileSum {
    /// Returns whether both files have the same bytes.
    pub fn has_same_content(&self, other: &FileSum) -> bool {
        (self.length, self.digest) == (other.length, other.digest)
    }
}

/// The sums of the files of a layer, or of the metadata of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentSums {
    version: u64,
    /// The sum of the layer's blob, or of the metadata.
    pub main: FileSum,
    /// The sum of the layer's index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<FileSum>,
}

/// The part of a record that every version has.
#[derive(Deserialize)]
struct RecordVersion {
    version: u64,
}

impl ContentSums {
    /// Returns the sums of a layer (`index`) or of metadata.
    pub fn new(main: FileSum, index: Option<FileSum>) -> ContentSums {
        ContentSums { version: FORMAT_VERSION, main, index }
    }

    /// Reads a record. Returns `None` if there is none, or if a newer version wrote it. Blocks.
    ///
    /// # Errors
    ///
    /// `InvalidData` if it is damaged, otherwise the error of the file.
    pub fn read(path: &Path) -> io::Result<Option<ContentSums>> {
        let bytes = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Ok(metadata) if metadata.len() > MAX_RECORD => return Err(io::ErrorKind::InvalidData.into()),
            Err(error) => return Err(error),
            Ok(_) => match fs::read(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                other => other?,
            },
        };
        match serde_json::from_slice(&bytes) {
            Ok(RecordVersion { version: FORMAT_VERSION }) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Ok(_newer) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the record durably. Blocks.
    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        let bytes = serde_json::to_vec(self).map_err(|error| at("write", path)(error.into()))?;
        write_whole(path, &bytes)
    }
}

/// Computes the sum of a file's first `length` bytes, or of all bytes. Calls `proceed` with the number of bytes after each piece.
/// Returns `None` if that returned false. Blocks; does not use the file's position.
pub fn sum_file(
    file: &File,
    length: Option<u64>,
    mut proceed: impl FnMut(usize) -> bool,
) -> io::Result<Option<FileSum>> {
    let (mut hash, mut position, mut piece) = (Sha256::new(), 0u64, vec![0; PIECE]);
    loop {
        let left = length.map_or(u64::MAX, |length| length.saturating_sub(position));
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        let buffer = piece.get_mut(..most).unwrap_or_default();
        let got = retry_interrupted(|| file.read_at(buffer, position))?;
        if got == 0 {
            return Ok(Some(FileSum { length: position, digest: Digest(hash.finalize().into()), verity: None }));
        }
        hash.update(buffer.get(..got).unwrap_or_default());
        position += got as u64;
        if !proceed(got) {
            return Ok(None);
        }
    }
}

/// Computes the sum of the file at this path. Blocks.
pub fn sum_path(path: &Path) -> Result<FileSum, FileError> {
    let file = File::open(path).map_err(at("open", path))?;
    let sum = sum_file(&file, None, |_| true).map_err(at("read", path))?;
    sum.ok_or_else(|| at("read", path)(io::ErrorKind::Interrupted.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_that_of_the_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        let bytes: Vec<u8> = (0..PIECE * 2 + 7).map(|number| (number % 251) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let whole = FileSum { length: bytes.len() as u64, digest: Digest::of(&bytes), verity: None };
        assert_eq!(sum_path(&path).unwrap(), whole);
        let file = File::open(&path).unwrap();
        let part = sum_file(&file, Some(PIECE as u64 + 1), |_| true).unwrap().unwrap();
        let digest = Digest::of(&bytes[..PIECE + 1]);
        assert_eq!(part, FileSum { length: PIECE as u64 + 1, digest, verity: None });
        let mut pieces = 0;
        let stopped = sum_file(&file, None, |_| {
            pieces += 1;
            pieces < 2
        });
        assert_eq!((stopped.unwrap(), pieces), (None, 2));
        assert_eq!(sum_path(&directory.path().join("none")).unwrap_err().source.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn records_are_read_as_written_and_damage_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sum");
        assert_eq!(ContentSums::read(&path).unwrap(), None);
        let sum = FileSum { length: 3, digest: Digest::of(b"abc"), verity: None };
        for index in [None, Some(sum), Some(FileSum { verity: Some(Digest([7; 32])), ..sum })] {
            let sums = ContentSums::new(sum, index);
            sums.write(&path).unwrap();
            assert_eq!(ContentSums::read(&path).unwrap(), Some(sums));
        }
        fs::write(&path, r#"{"version":2,"other":1}"#).unwrap();
        assert_eq!(ContentSums::read(&path).unwrap(), None);
        for damaged in ["", "{", r#"{"version":1}"#, &" ".repeat(5000)] {
            fs::write(&path, damaged).unwrap();
            let error = ContentSums::read(&path).unwrap_err();
            assert!(
                matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof),
                "{damaged:?}: {error:?}"
            );
        }
    }
}
