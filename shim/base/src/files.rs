//! Writes files atomically, and re-exports the removal of files and the error of file operations.

use crate::draft::Draft;
pub use crate::file_error::{FileError, at, disk_advice};
pub use crate::removal::{remove_if_there, remove_tree_if_there};
use std::io::Write;
use std::path::Path;

/// Replaces `path` with a file of mode 0600 with these bytes, durably: after a crash the file has its old or its new content.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut draft = Draft::create(path).map_err(|error| at("write", path)(error.source))?;
    draft.file.write_all(bytes).map_err(at("write", path))?;
    draft.commit()
}

/// Fails if the path exists and is not a regular file, but a device, a FIFO or a symbolic link, for example: a file that is renamed to
/// the path would replace it. Blocks.
pub fn ensure_replaceable(path: &Path) -> Result<(), FileError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => {
            let other = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it exists and is not a regular file");
            Err(at("replace", path)(other))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn replaces_whole_and_leaves_nothing_beside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        write_whole(&path, b"one").unwrap();
        write_whole(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        let error = write_whole(&directory.path().join("none/a"), b"").unwrap_err();
        assert!(error.to_string().starts_with("cannot write "), "{error}");
    }
}
