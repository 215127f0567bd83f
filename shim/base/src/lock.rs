//! Locks paths of the node that only one process may use at a time, such as a directory in which a daemon removes
//! everything that it does not know. The kernel releases a lock when its holder ends, however that happens; the lock file
//! stays.

use crate::file_error::{FileError, at};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The pause between two attempts to acquire a lock that another process holds.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The maximum number of bytes that are read from a lock file: a process id.
const MAX_PID_BYTES: u64 = 20;

/// A lock cannot be acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The lock file cannot be opened, locked or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another process holds the lock.
    #[error("process {pid} holds the lock {path}", path = path.display())]
    Held {
        /// The path of the lock file.
        path: PathBuf,
        /// The process id that the holder wrote into it, or "unknown".
        pid: String,
    },
}

impl crate::Classify for LockError {
    fn kind(&self) -> crate::FailureKind {
        match self {
            LockError::File(error) => error.kind(),
            LockError::Held { .. } => crate::FailureKind::Conflict,
        }
    }
}

/// A lock that this process holds until the value is dropped.
#[derive(Debug)]
pub struct PathLock {
    _file: File,
}

impl PathLock {
    /// Acquires the lock of this file, which is created with mode 0600 if it is missing; its directory must exist. Waits for
    /// at most `timeout`, because a process that was killed may hold a lock for a moment longer. Blocks.
    pub fn acquire(path: &Path, timeout: Duration) -> Result<PathLock, LockError> {
        let deadline = Instant::now() + timeout;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(path).map_err(at("open", path))?;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(RETRY_INTERVAL),
                Err(TryLockError::WouldBlock) => {
                    return Err(LockError::Held { path: path.to_owned(), pid: read_holder_pid(&file) });
                }
                Err(TryLockError::Error(source)) => return Err(at("lock", path)(source).into()),
            }
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(std::process::id().to_string().as_bytes()))
            .map_err(at("write", path))?;
        Ok(PathLock { _file: file })
    }

    /// Returns the path of the lock file for a path whose directory this process does not own: `/run/netns` has
    /// `/run/.netns.nacelle-lock`.
    pub fn path_beside(path: &Path) -> PathBuf {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        path.with_file_name(format!(".{name}.nacelle-lock"))
    }
}

/// Reads the process id in a lock file.
fn read_holder_pid(file: &File) -> String {
    let mut text = String::new();
    let read = file.take(MAX_PID_BYTES).read_to_string(&mut text);
    match read {
        Ok(_) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => text,
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_one_holder_and_the_error_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let held = PathLock::acquire(&path, Duration::ZERO).unwrap();
        let error = PathLock::acquire(&path, Duration::from_millis(50)).unwrap_err();
        let expected = format!("process {} holds the lock {}", std::process::id(), path.display());
        assert_eq!(error.to_string(), expected);
        drop(held);
        PathLock::acquire(&path, Duration::ZERO).unwrap();
        std::os::unix::fs::symlink("elsewhere", directory.path().join("link")).unwrap();
        assert!(matches!(PathLock::acquire(&directory.path().join("link"), Duration::ZERO), Err(LockError::File(_))));
        assert!(!directory.path().join("elsewhere").exists());
    }

    #[test]
    fn the_lock_of_a_shared_directory_lies_beside_it() {
        assert_eq!(PathLock::path_beside(Path::new("/run/netns")), Path::new("/run/.netns.nacelle-lock"));
    }
}
