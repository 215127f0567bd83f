//! Seals the finished files of a store with fs-verity (`crate::verity`), where the file system of the store offers it, and compares the
//! fs-verity digests of files with the recorded ones. A store without fs-verity works in the same way without seals.

use crate::damage::FileDamage;
use crate::verity::{Measurement, enable_verity, is_unsupported, is_verity_open_error, measure_path, measure_verity};
use nacelle_base::Chain;
use nacelle_base::files::{FileError, at, remove_if_there};
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io;
use std::path::Path;

/// Whether a store seals its files. This is decided once, when the store is opened.
#[derive(Debug)]
pub struct Seals {
    /// The reason that files are not sealed.
    unavailable: Option<io::Error>,
}

impl Seals {
    /// Decides by sealing an empty file at `path`, which is in a directory of the store that holds temporary files. A failure, such as that
    /// of a full disk, decides against seals. Blocks.
    pub fn probe(path: &Path) -> Seals {
        let probed = remove_if_there(path).map_err(|error| error.source).and_then(|()| {
            drop(File::create_new(path)?);
            Self::seal_file(path)
        });
        if let Err(error) = remove_if_there(path) {
            tracing::warn!(error = %Chain(&error), "cannot remove a temporary file; the next start removes it");
        }
        Seals { unavailable: probed.err() }
    }

    /// Returns the reason that files of the store are not sealed, or `None`.
    pub fn unavailable(&self) -> Option<&io::Error> {
        self.unavailable.as_ref()
    }

    /// Seals a file that is synced and that no process has open for writing, durably. Returns its fs-verity digest; `None` if the store
    /// does not seal files, or this file cannot be sealed. Blocks while the kernel reads the whole file.
    ///
    /// # Errors
    ///
    /// Those of the disk, such as ENOSPC.
    pub fn seal(&self, path: &Path) -> Result<Option<Digest>, FileError> {
        if self.unavailable.is_some() {
            return Ok(None);
        }
        match Self::seal_file(path) {
            Err(error) if is_unsupported(&error) => {
                tracing::warn!(file = %path.display(), %error, "cannot enable fs-verity for a file of the image store");
                Ok(None)
            }
            sealed => sealed.map(Some).map_err(at("enable fs-verity for", path)),
        }
    }

    fn seal_file(path: &Path) -> io::Result<Digest> {
        let file = File::open(path)?;
        if measure_verity(&file)? == Measurement::Unsealed {
            enable_verity(&file)?;
            // A file that is visible after a crash has its seal.
            file.sync_all()?;
        }
        match measure_verity(&file)? {
            Measurement::Sealed(digest) => Ok(digest),
            // ENOPKG: another program has enabled it with another algorithm.
            Measurement::Unsealed => Err(io::Error::from_raw_os_error(libc::ENOPKG)),
            Measurement::Unsupported => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        }
    }
}

/// Compares the seal of a file with the recorded fs-verity digest, in constant time. A file system that does not offer fs-verity, to which
/// the store may have been moved, is no damage. Returns the error of the file if it proves no damage. Blocks.
pub fn find_seal_damage(path: &Path, expected: Digest) -> io::Result<Option<FileDamage>> {
    match measure_path(path) {
        Ok(Measurement::Sealed(found)) if found != expected => Ok(Some(FileDamage::Verity { found, expected })),
        Ok(Measurement::Sealed(_) | Measurement::Unsupported) => Ok(None),
        Ok(Measurement::Unsealed) => Ok(Some(FileDamage::Unsealed)),
        Err(error) if is_verity_open_error(&error) => Ok(Some(FileDamage::Unreadable { why: error.to_string() })),
        Err(error) => FileDamage::from_read_error(&error).map(Some).ok_or(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_without_verity_works_without_seals() {
        // tmpfs has no fs-verity in any kernel.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let (probe, path) = (directory.path().join("probe"), directory.path().join("f"));
        std::fs::write(&probe, b"left by a crash").unwrap();
        let seals = Seals::probe(&probe);
        let why = seals.unavailable().unwrap();
        assert_eq!(why.raw_os_error(), Some(libc::EOPNOTSUPP));
        assert!(!probe.exists());
        std::fs::write(&path, b"content").unwrap();
        assert_eq!(seals.seal(&path).unwrap(), None);
        // The store was moved from a file system with fs-verity.
        assert_eq!(find_seal_damage(&path, Digest([1; 32])).unwrap(), None);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(find_seal_damage(&path, Digest([1; 32])).unwrap(), Some(FileDamage::Missing));
        let nowhere = Seals::probe(&directory.path().join("none/probe"));
        assert!(nowhere.unavailable().is_some(), "a failure does not keep the store from opening");
    }
}
