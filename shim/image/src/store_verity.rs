//! Enables fs-verity (`crate::verity_ioctl`) for the finished files of a store, where the file system of the store offers it, and compares
//! the fs-verity digests of files with the recorded ones. A store without fs-verity works in the same way.

use crate::damage::FileDamage;
use crate::verity_ioctl::{
    Measurement, enable_verity, is_unsupported, is_verity_open_error, measure_path, measure_verity,
};
use nacelle_base::Chain;
use nacelle_base::files::{FileError, at, remove_if_there};
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io;
use std::path::Path;

/// Whether the files of a store get fs-verity. This is decided once, when the store is opened.
#[derive(Debug)]
pub struct StoreVerity {
    /// The reason that files get no fs-verity.
    unavailable: Option<io::Error>,
}

impl StoreVerity {
    /// Decides by enabling fs-verity for an empty file at `path`, which is in a directory of the store that holds temporary files. A
    /// failure, such as that of a full disk, decides against fs-verity. Blocks.
    pub fn probe(path: &Path) -> StoreVerity {
        let probed = remove_if_there(path).map_err(|error| error.source).and_then(|()| {
            drop(File::create_new(path)?);
            Self::enable_for(path)
        });
        if let Err(error) = remove_if_there(path) {
            tracing::warn!(error = %Chain(&error), "cannot remove a temporary file; the next start removes it");
        }
        StoreVerity { unavailable: probed.err() }
    }

    /// Returns the reason that files of the store get no fs-verity, or `None`.
    pub fn unavailable(&self) -> Option<&io::Error> {
        self.unavailable.as_ref()
    }

    /// Enables fs-verity durably for a file that is synced and that no process has open for writing. Returns its fs-verity digest; `None`
    /// if the store or this file can do without. Blocks while the kernel reads the whole file.
    ///
    /// # Errors
    ///
    /// Those of the disk, such as ENOSPC.
    pub fn enable(&self, path: &Path) -> Result<Option<Digest>, FileError> {
        if self.unavailable.is_some() {
            return Ok(None);
        }
        match Self::enable_for(path) {
            Err(error) if is_unsupported(&error) => {
                tracing::warn!(file = %path.display(), %error, "cannot enable fs-verity for a file of the image store");
                Ok(None)
            }
            enabled => enabled.map(Some).map_err(at("enable fs-verity for", path)),
        }
    }

    /// Returns whether the file has fs-verity with this digest. Blocks.
    pub fn has(&self, path: &Path, digest: Digest) -> bool {
        matches!(measure_path(path), Ok(Measurement::Enabled(found)) if found == digest)
    }

    /// Compares the fs-verity digest of a file with the recorded one, in constant time. No damage: a file without fs-verity in a store
    /// that cannot enable it, to which the store was copied. Returns the error of the file if it proves no damage. Blocks.
    pub fn find_damage(&self, path: &Path, expected: Digest) -> io::Result<Option<FileDamage>> {
        self.judge(measure_path(path), expected)
    }

    fn judge(&self, measured: io::Result<Measurement>, expected: Digest) -> io::Result<Option<FileDamage>> {
        match measured {
            Ok(Measurement::Enabled(found)) if found != expected => Ok(Some(FileDamage::Verity { found, expected })),
            Ok(Measurement::Enabled(_) | Measurement::Unsupported) => Ok(None),
            Ok(Measurement::Disabled) if self.unavailable.as_ref().is_some_and(is_inability) => Ok(None),
            Ok(Measurement::Disabled) => Ok(Some(FileDamage::VerityLost)),
            Err(error) if is_verity_open_error(&error) => Ok(Some(FileDamage::Unreadable { why: error.to_string() })),
            Err(error) => FileDamage::from_read_error(&error).map(Some).ok_or(error),
        }
    }

    fn enable_for(path: &Path) -> io::Result<Digest> {
        let file = File::open(path)?;
        if measure_verity(&file)? == Measurement::Disabled {
            enable_verity(&file)?;
            // A file that is visible after a crash has its fs-verity.
            file.sync_all()?;
        }
        match measure_verity(&file)? {
            Measurement::Enabled(digest) => Ok(digest),
            // ENOPKG: another program has enabled it with another algorithm.
            Measurement::Disabled => Err(io::Error::from_raw_os_error(libc::ENOPKG)),
            Measurement::Unsupported => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        }
    }
}

/// Returns whether a probe has failed because the file system or the kernel cannot enable fs-verity, and not by a fault that passes.
fn is_inability(error: &io::Error) -> bool {
    // fs.verity.require_signatures: EPERM; a block size that the kernel cannot verify: EINVAL.
    let inability = [libc::ENOTTY, libc::EOPNOTSUPP, libc::ENOPKG, libc::EPERM, libc::EINVAL];
    error.raw_os_error().is_some_and(|number| inability.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_works_without_verity() {
        // tmpfs has no fs-verity in any kernel.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let (probe, path) = (directory.path().join("probe"), directory.path().join("f"));
        std::fs::write(&probe, b"left by a crash").unwrap();
        let verity = StoreVerity::probe(&probe);
        let why = verity.unavailable().unwrap();
        assert_eq!(why.raw_os_error(), Some(libc::EOPNOTSUPP));
        assert!(!probe.exists());
        std::fs::write(&path, b"content").unwrap();
        assert_eq!(verity.enable(&path).unwrap(), None);
        // The store was moved from a file system with fs-verity.
        assert_eq!(verity.find_damage(&path, Digest([1; 32])).unwrap(), None);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(verity.find_damage(&path, Digest([1; 32])).unwrap(), Some(FileDamage::Missing));
        let nowhere = StoreVerity::probe(&directory.path().join("none/probe"));
        assert!(nowhere.unavailable().is_some(), "a failure does not keep the store from opening");
    }

    #[test]
    fn a_file_without_verity_is_damaged_only_where_the_store_enables_it() {
        let [found, expected] = [Digest([1; 32]), Digest([2; 32])];
        let without = |number| StoreVerity { unavailable: Some(io::Error::from_raw_os_error(number)) };
        let enabled = StoreVerity { unavailable: None };
        let lost = Some(FileDamage::VerityLost);
        assert_eq!(enabled.judge(Ok(Measurement::Disabled), expected).unwrap(), lost);
        for number in [libc::EPERM, libc::EINVAL] {
            assert_eq!(without(number).judge(Ok(Measurement::Disabled), expected).unwrap(), None);
        }
        for number in [libc::ENOSPC, libc::EMFILE, libc::EACCES, libc::EBUSY] {
            assert_eq!(without(number).judge(Ok(Measurement::Disabled), expected).unwrap(), lost);
        }
        let replaced = Some(FileDamage::Verity { found, expected });
        assert_eq!(without(libc::EPERM).judge(Ok(Measurement::Enabled(found)), expected).unwrap(), replaced);
        let open_error = |number| Err(io::Error::from_raw_os_error(number));
        // f2fs under a kernel without fs-verity.
        let unsupported = Some(FileDamage::VerityUnsupported);
        assert_eq!(without(libc::EOPNOTSUPP).judge(open_error(libc::EOPNOTSUPP), expected).unwrap(), unsupported);
        let broken = enabled.judge(open_error(libc::EINVAL), expected).unwrap();
        assert!(matches!(broken, Some(FileDamage::Unreadable { .. })));
        assert!(enabled.judge(open_error(libc::EACCES), expected).is_err());
    }
}
