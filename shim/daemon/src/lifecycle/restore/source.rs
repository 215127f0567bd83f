//! Reads the manifest of a checkpoint, and checks that its files are whole and that only root can have written them. All functions block.

use super::error::PodRestoreError;
use nacelle_base::files::at;
use nacelle_base::retry::retry_interrupted;
use nacelle_model::checkpoint::{
    COMPLETE_FILE, CheckpointManifest, MANIFEST_FILE, MAX_MANIFEST_BYTES, MEMORY_FILE, SCRATCH_FILE, STATE_FILE,
};
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The bits of a mode with which others than the owner may write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Checks that only root can have put a checkpoint into these directories, the first of which is the outer one.
pub(super) fn check_parents(directories: &[&Path]) -> Result<(), PodRestoreError> {
    directories.iter().try_for_each(|path| Directory::open(path).map(drop))
}

/// Reads the manifest of a complete checkpoint.
pub fn read(path: &Path) -> Result<CheckpointManifest, PodRestoreError> {
    let directory = Directory::open(path)?;
    directory.file(COMPLETE_FILE)?;
    let mut bytes = Vec::new();
    let limit = u64::try_from(MAX_MANIFEST_BYTES).unwrap_or(u64::MAX).saturating_add(1);
    let name = directory.path.join(MANIFEST_FILE);
    directory.file(MANIFEST_FILE)?.take(limit).read_to_end(&mut bytes).map_err(at("read", &name))?;
    let manifest = CheckpointManifest::decode(&bytes)?;
    let files = manifest.files;
    for (name, expected) in [(STATE_FILE, files.state), (MEMORY_FILE, files.memory), (SCRATCH_FILE, files.scratch)] {
        let found = directory.file(name)?.metadata().map_err(at("inspect", &directory.path.join(name)))?.len();
        if found != expected {
            return Err(PodRestoreError::Length { name, found, expected });
        }
    }
    Ok(manifest)
}

/// The directory of a checkpoint.
struct Directory {
    directory: File,
    path: PathBuf,
}

impl Directory {
    fn open(path: &Path) -> Result<Directory, PodRestoreError> {
        // Without a slash at the end, after which the kernel would follow a link.
        let path: PathBuf = path.components().collect();
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let why = match retry_interrupted(|| nix::fcntl::open(&path, flags, Mode::empty())) {
            Ok(directory) => {
                let directory = Directory { directory: File::from(directory), path };
                directory.check_owner(&directory.directory)?;
                return Ok(directory);
            }
            Err(Errno::ENOENT) => return Err(PodRestoreError::NoDirectory { path }),
            Err(Errno::ENOTDIR | Errno::ELOOP) => "it is not a directory (a symbolic link to one is not followed)",
            Err(errno) => return Err(at("open", &path)(errno.into()).into()),
        };
        Err(PodRestoreError::Source { path, why })
    }

    /// Opens a regular file of the directory.
    fn file(&self, name: &'static str) -> Result<File, PodRestoreError> {
        let refuse = |why| PodRestoreError::Source { path: self.path.join(name), why };
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match retry_interrupted(|| openat(&self.directory, name, flags, Mode::empty())) {
            Ok(file) => File::from(file),
            Err(Errno::ENOENT) => return Err(refuse("it does not exist, so the checkpoint is not complete")),
            Err(Errno::ELOOP) => return Err(refuse("it is a symbolic link")),
            Err(errno) => return Err(at("open", &self.path.join(name))(errno.into()).into()),
        };
        match file.metadata().map_err(at("inspect", &self.path.join(name)))?.is_file() {
            true => self.check_owner(&file).map(|()| file),
            false => Err(refuse("it is not a regular file")),
        }
    }

    /// Refuses what another user may have written: the manifest decides what runs as which user, and the files hold all of its memory.
    fn check_owner(&self, file: &File) -> Result<(), PodRestoreError> {
        let found = file.metadata().map_err(at("inspect", &self.path))?;
        let is_ours = found.uid() == nix::unistd::geteuid().as_raw() && found.mode() & WRITABLE_BY_OTHERS == 0;
        let why = "it or a file in it belongs to another user, or others may write to it; let only root write to it";
        is_ours.then_some(()).ok_or_else(|| PodRestoreError::Source { path: self.path.clone(), why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// The current version of the format, with the lengths of its three files.
    const GOLDEN: &str = include_str!("../../../../model/tests/golden/checkpoint-v1.json");

    #[test]
    fn only_a_whole_checkpoint_of_root_is_read() {
        let world = tempfile::tempdir().unwrap();
        let path = world.path().join("checkpoint");
        let refusal = || read(&path).unwrap_err().to_string();
        assert!(matches!(read(&path), Err(PodRestoreError::NoDirectory { .. })));
        fs::create_dir(&path).unwrap();
        let files = CheckpointManifest::decode(GOLDEN.as_bytes()).unwrap().files;
        fs::write(path.join(MANIFEST_FILE), GOLDEN).unwrap();
        for (name, length) in [(STATE_FILE, files.state), (MEMORY_FILE, files.memory), (SCRATCH_FILE, files.scratch)] {
            File::create(path.join(name)).unwrap().set_len(length).unwrap();
        }
        assert!(refusal().contains("complete: it does not exist"), "{}", refusal());
        fs::write(path.join(COMPLETE_FILE), "").unwrap();
        assert_eq!(read(&path).unwrap().files, files);
        assert!(read(&world.path().join("checkpoint/")).is_ok());

        let mode = |name: &str, mode| fs::set_permissions(path.join(name), fs::Permissions::from_mode(mode)).unwrap();
        for name in ["", MEMORY_FILE, MANIFEST_FILE] {
            let before = fs::metadata(path.join(name)).unwrap().permissions().mode();
            mode(name, 0o777);
            assert!(refusal().contains("let only root write"), "{name}: {}", refusal());
            mode(name, before);
        }
        fs::rename(path.join(STATE_FILE), world.path().join("state")).unwrap();
        symlink(world.path().join("state"), path.join(STATE_FILE)).unwrap();
        assert!(refusal().contains("symbolic link"), "{}", refusal());
        fs::remove_file(path.join(STATE_FILE)).unwrap();
        fs::create_dir(path.join(STATE_FILE)).unwrap();
        assert!(refusal().contains("not a regular file"), "{}", refusal());
        fs::remove_dir(path.join(STATE_FILE)).unwrap();
        fs::write(path.join(STATE_FILE), "short").unwrap();
        assert!(matches!(read(&path), Err(PodRestoreError::Length { name: STATE_FILE, found: 5, .. })));
        fs::write(path.join(MANIFEST_FILE), GOLDEN.replace("\"version\": 1", "\"version\": 2")).unwrap();
        assert!(matches!(read(&path), Err(PodRestoreError::Manifest(_))));
        symlink(&path, world.path().join("link")).unwrap();
        assert!(read(&world.path().join("link/")).is_err());
    }
}
