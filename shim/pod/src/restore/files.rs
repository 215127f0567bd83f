//! Opens the files of a checkpoint, and reads the state of its VM.

use super::spec::CheckpointBase;
use crate::error::PodError;
use crate::scratch;
use nacelle_base::files::{FileError, at};
use nacelle_engine::{Snapshot, SnapshotFiles, read_snapshot};
use nacelle_model::checkpoint::{COMPLETE_FILE, MEMORY_FILE, SCRATCH_FILE, STATE_FILE};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The open files of the VM of a checkpoint.
pub struct CheckpointFiles(SnapshotFiles);

impl CheckpointFiles {
    /// Opens the files, with the rights that this process has before it enters its jail. Does not read them.
    pub fn open(base: &CheckpointBase) -> Result<CheckpointFiles, PodError> {
        let directory = &base.directory;
        open(&directory.join(COMPLETE_FILE))?;
        let (state, memory) = (open(&directory.join(STATE_FILE))?, open(&directory.join(MEMORY_FILE))?);
        Ok(CheckpointFiles(SnapshotFiles { directory: directory.clone(), state, memory, pagemap: None }))
    }

    /// Reads the state. Must be called in the jail: it may hold any bytes. Blocks.
    pub fn read(self, base: &CheckpointBase) -> Result<Snapshot, PodError> {
        let saved = read_snapshot(self.0)?;
        match saved.memory_mib() == base.booted_mib && !saved.is_template() {
            true => Ok(saved),
            false => Err(PodError::OtherCheckpoint { directory: base.directory.clone() }),
        }
    }
}

/// Copies the scratch disk of a checkpoint, which must have this size, to a new file, whose directory may be missing.
pub fn copy_scratch(base: &CheckpointBase, size_mib: u64, to: &Path) -> Result<(), PodError> {
    if let Some(directory) = to.parent() {
        scratch::create_directory(directory)?;
    }
    let from = base.directory.join(SCRATCH_FILE);
    let length = open(&from)?.metadata().map_err(at("inspect", &from))?.len();
    if length != size_mib << 20 {
        return Err(PodError::OtherCheckpoint { directory: base.directory.clone() });
    }
    Ok(scratch::copy_template(&from, to)?)
}

/// Opens a regular file. Does not follow a link in its place.
fn open(path: &Path) -> Result<File, FileError> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = file.map_err(at("open", path))?;
    match file.metadata().map_err(at("inspect", path))?.is_file() {
        true => Ok(file),
        false => Err(at("open", path)(io::ErrorKind::InvalidInput.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_whole_checkpoints_are_opened() {
        let directory = tempfile::tempdir().unwrap();
        let base = CheckpointBase {
            directory: directory.path().to_owned(),
            booted_mib: 64,
            reserve_used_bytes: 0,
            containers: Vec::new(),
            images: Vec::new(),
        };
        let path = |name: &str| directory.path().join(name);
        let names = [COMPLETE_FILE, STATE_FILE, MEMORY_FILE];
        for name in names {
            assert!(CheckpointFiles::open(&base).is_err(), "without {name}");
            fs::write(path(name), "").unwrap();
        }
        let files = CheckpointFiles::open(&base).unwrap();
        assert!(matches!(files.read(&base), Err(PodError::Checkpoint(_))), "an empty state");
        for name in names {
            fs::rename(path(name), path("aside")).unwrap();
            symlink("aside", path(name)).unwrap();
            assert!(CheckpointFiles::open(&base).is_err(), "a link as {name}");
            fs::rename(path("aside"), path(name)).unwrap();
        }
        assert!(CheckpointFiles::open(&base).is_ok());

        let disk = path("disks/disk");
        assert!(matches!(copy_scratch(&base, 1, &disk), Err(PodError::File(_))));
        fs::write(path(SCRATCH_FILE), vec![7; 1 << 20]).unwrap();
        assert!(matches!(copy_scratch(&base, 2, &disk), Err(PodError::OtherCheckpoint { .. })));
        assert!(!disk.exists());
        copy_scratch(&base, 1, &disk).unwrap();
        assert_eq!(fs::read(disk).unwrap(), vec![7; 1 << 20]);
    }
}
