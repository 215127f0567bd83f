//! Creates the directory of a snapshot, which appears atomically: under a temporary name in the same parent directory, flushed, then
//! renamed.

use nacelle_base::guest_warn;
use nix::errno::Errno;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{STATE_FILE, SnapshotError, SnapshotFiles};

/// The directory of a snapshot that is being written. Dropping it before `commit` removes it.
#[derive(Debug)]
pub struct SnapshotDirectory {
    files: SnapshotFiles,
    target: PathBuf,
    parent: PathBuf,
    partial: PathBuf,
    is_committed: bool,
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::Io { what, path, source }
}

impl SnapshotDirectory {
    /// Creates a temporary directory with empty files for a snapshot in `target`, which must be empty or not exist. After a crash,
    /// `.NAME.PID.N.partial` remains in the parent directory.
    pub fn create(target: &Path) -> Result<SnapshotDirectory, SnapshotError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let invalid_path = || SnapshotError::InvalidPath { path: target.to_owned() };
        let name = target.file_name().and_then(|name| name.to_str()).ok_or_else(invalid_path)?;
        let parent = match target.parent().ok_or_else(invalid_path)? {
            here if here.as_os_str().is_empty() => PathBuf::from("."),
            parent => parent.to_owned(),
        };
        // An early check, before memory is written; the rename is authoritative.
        match fs::read_dir(target).map(|mut entries| entries.next().is_some()) {
            Ok(true) => return Err(SnapshotError::Exists { path: target.to_owned() }),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("list", target)(error)),
            _ => {}
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let partial = parent.join(format!(".{name}.{}.{number}.partial", std::process::id()));
        // Mode 0700: no other user may read the guest's memory.
        DirBuilder::new().mode(0o700).create(&partial).map_err(failed("create the directory", &partial))?;
        match SnapshotFiles::create(&partial) {
            Ok(files) => {
                Ok(SnapshotDirectory { files, target: target.to_owned(), parent, partial, is_committed: false })
            }
            Err(error) => {
                remove(&partial);
                Err(error)
            }
        }
    }

    /// Returns the files, for [`save_to_files`](super::save_to_files).
    pub fn files(&self) -> &SnapshotFiles {
        &self.files
    }

    /// Renames the directory to its final name: from then on the snapshot is there, on stable storage. Without a saved snapshot this is
    /// an error.
    pub fn commit(mut self) -> Result<(), SnapshotError> {
        let path = self.partial.join(STATE_FILE);
        match self.files.state.metadata().map(|state| state.len()) {
            Ok(0) => return Err(SnapshotError::NotASnapshot { path }),
            Ok(_) => {}
            Err(source) => return Err(SnapshotError::Io { what: "read the size of", path, source }),
        }
        let flush =
            |path: &Path| File::open(path).and_then(|directory| directory.sync_all()).map_err(failed("flush", path));
        flush(&self.partial)?;
        fs::rename(&self.partial, &self.target).map_err(|source| match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOTEMPTY | Errno::EEXIST) => SnapshotError::Exists { path: self.target.clone() },
            _ => SnapshotError::Io { what: "rename the directory to", path: self.target.clone(), source },
        })?;
        self.is_committed = true;
        flush(&self.parent)
    }
}

impl Drop for SnapshotDirectory {
    fn drop(&mut self) {
        if !self.is_committed {
            remove(&self.partial);
        }
    }
}

fn remove(partial: &Path) {
    if let Err(error) = fs::remove_dir_all(partial) {
        guest_warn!(%error, directory = %partial.display(), "cannot remove an incomplete snapshot");
    }
}
