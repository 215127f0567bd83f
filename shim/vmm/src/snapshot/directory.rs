//! Writes a directory that appears atomically: under a temporary name in the same parent directory, flushed, then renamed.

use nacelle_base::guest_warn;
use nix::errno::Errno;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::SnapshotError;

/// A directory that is being written. Dropping it before `commit` removes it.
#[derive(Debug)]
pub(super) struct PartialDirectory {
    target: PathBuf,
    parent: PathBuf,
    partial: PathBuf,
    is_committed: bool,
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::Io { what, path, source }
}

impl PartialDirectory {
    /// Creates the temporary directory for `target`. After a crash, `.NAME.PID.N.partial` remains in the parent directory.
    pub(super) fn begin(target: &Path) -> Result<PartialDirectory, SnapshotError> {
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
        Ok(PartialDirectory { target: target.to_owned(), parent, partial, is_committed: false })
    }

    /// Writes one file and flushes it to disk.
    pub(super) fn file(&self, name: &str, write: impl FnOnce(&File) -> io::Result<()>) -> Result<(), SnapshotError> {
        let path = self.partial.join(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(failed("create", &path))?;
        write(&file).map_err(failed("write", &path))?;
        file.sync_all().map_err(failed("flush", &path))
    }

    /// Renames the directory to its final name.
    pub(super) fn commit(mut self) -> Result<(), SnapshotError> {
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

impl Drop for PartialDirectory {
    fn drop(&mut self) {
        if self.is_committed {
            return;
        }
        if let Err(error) = fs::remove_dir_all(&self.partial) {
            guest_warn!(%error, directory = %self.partial.display(), "cannot remove an incomplete snapshot");
        }
    }
}
