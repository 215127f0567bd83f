//! Owns: writing a file whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {path}", path = path.display())]
pub struct FileError {
    /// The operation: "write", "read", "create".
    pub what: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl crate::Classify for FileError {
    fn kind(&self) -> crate::Kind {
        match self.source.kind().into() {
            crate::Kind::NotFound | crate::Kind::AlreadyExists => crate::Kind::Internal,
            kind => kind,
        }
    }
}

/// Adds the operation and the path to an I/O error: `.map_err(at("read", path))`.
pub fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError { what, path, source }
}

/// Replaces `path` by a file of mode 0600 with these bytes, durably: after a crash the file has its old or
/// its new content.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let temporary = path.with_extension(format!("tmp.{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
            _ => Ok(()),
        }
    })();
    if written.is_err() {
        // The error that matters is the first one; a temporary file that stays is removed at the next start.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(at("write", path))
}

/// Removes a file; one that is not there is no failure.
pub fn remove_if_there(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(at("remove", path)),
    }
}

/// Removes a folder and what is in it; one that is not there is no failure.
pub fn remove_tree_if_there(path: &Path) -> Result<(), FileError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(at("remove", path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn replaces_whole_and_leaves_nothing_beside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_whole(&path, b"one").unwrap();
        write_whole(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let error = write_whole(&folder.path().join("none/a"), b"").unwrap_err();
        assert!(error.to_string().starts_with("cannot write "), "{error}");
    }

    #[test]
    fn removing_twice_is_fine() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "").unwrap();
        remove_if_there(&path).unwrap();
        remove_if_there(&path).unwrap();
        remove_tree_if_there(&folder.path().join("none")).unwrap();
    }
}
