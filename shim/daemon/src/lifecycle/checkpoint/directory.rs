//! Writes the directory of a checkpoint. The daemon creates every file, reaches them through descriptors of its own, and removes them again
//! unless the checkpoint is complete. Only the pod process writes the large ones, and it sees no name. All functions block.

use super::error::{CheckpointError, OutputProblem};
use crate::sys::{WriterCheck, check_writers};
use nacelle_base::files::{FileError, at};
use nacelle_base::retry::retry_interrupted;
use nacelle_model::checkpoint::{COMPLETE_FILE, MANIFEST_FILE};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::sys::statfs::{FsType, TMPFS_MAGIC, fstatfs};
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The file system type of ramfs (linux/magic.h).
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// The time that writers have to close a file after the reply of the pod process. A child of this process that is being started has a copy
/// of each descriptor until its program begins.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// The interval at which writers are looked for.
const CLOSE_INTERVAL: Duration = Duration::from_millis(10);

/// The directory of a checkpoint that is being written. Dropping it removes the files, unless it is complete.
#[derive(Debug)]
pub(super) struct CheckpointDirectory {
    directory: File,
    path: PathBuf,
    /// The files in the order of their creation.
    created: Vec<CreatedFile>,
    is_complete: bool,
}

/// A file of the checkpoint.
#[derive(Debug)]
struct CreatedFile {
    name: &'static str,
    /// Open for reading only, from the creation on: the file is the same even if its name leads elsewhere.
    reader: File,
}

impl CheckpointDirectory {
    /// Opens an empty directory on a disk. Only its own name must not be a symbolic link.
    pub(super) fn open(path: &Path) -> Result<CheckpointDirectory, CheckpointError> {
        // Without a slash at the end, after which the kernel would follow a link.
        let path: PathBuf = path.components().collect();
        let refuse = |why| CheckpointError::Output { path: path.clone(), why };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let directory = match retry_interrupted(|| nix::fcntl::open(&path, flags, Mode::empty())) {
            Ok(directory) => File::from(directory),
            Err(Errno::ENOENT) => return Err(refuse(OutputProblem::Missing)),
            Err(Errno::ENOTDIR | Errno::ELOOP) => return Err(refuse(OutputProblem::NotADirectory)),
            Err(errno) => return Err(at("open", &path)(errno.into()).into()),
        };
        let file_system = fstatfs(&directory).map_err(|errno| at("stat", &path)(errno.into()))?.filesystem_type();
        if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&file_system) {
            return Err(refuse(OutputProblem::InMemory));
        }
        let list = || -> nix::Result<bool> {
            for entry in retry_interrupted(|| Dir::openat(&directory, ".", flags, Mode::empty()))?.iter() {
                if ![c".", c".."].contains(&entry?.file_name()) {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        match list().map_err(|errno| at("list", &path)(errno.into()))? {
            true => Ok(CheckpointDirectory { directory, path, created: Vec::new(), is_complete: false }),
            false => Err(refuse(OutputProblem::NotEmpty)),
        }
    }

    /// Creates a file that only root may read, and returns it open for writing.
    pub(super) fn create(&mut self, name: &'static str) -> Result<File, CheckpointError> {
        let open = |flags: OFlag| {
            let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let opened = retry_interrupted(|| openat(&self.directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR));
            opened.map(File::from).map_err(|errno| at("create", &self.path.join(name))(errno.into()))
        };
        let writer = open(OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL)?;
        let reader = open(OFlag::O_RDONLY | OFlag::O_NONBLOCK).inspect_err(|_| self.remove(name))?;
        self.created.push(CreatedFile { name, reader });
        Ok(writer)
    }

    /// Waits until no process can write a created file any more, and flushes it. Returns its length in bytes. Fails as soon as `check` does.
    pub(super) fn seal(
        &self,
        name: &'static str,
        check: impl Fn() -> Result<(), CheckpointError>,
    ) -> Result<u64, CheckpointError> {
        let file = self.created.iter().find(|created| created.name == name);
        let missing = || self.failed("find", name)(std::io::ErrorKind::NotFound.into());
        let CreatedFile { reader, .. } = file.ok_or_else(missing)?;
        let limit = Instant::now() + CLOSE_LIMIT;
        loop {
            check()?;
            match check_writers(reader).map_err(|error| self.failed("lease", name)(error))? {
                WriterCheck::None => break,
                WriterCheck::Unsupported => {
                    let path = self.path.display();
                    tracing::warn!(%path, name, "the file system has no leases: a file may still be open for writing");
                    break;
                }
                WriterCheck::Open if Instant::now() < limit => sleep(CLOSE_INTERVAL),
                WriterCheck::Open => return Err(CheckpointError::StillOpen { name }),
            }
        }
        reader.sync_all().map_err(self.failed("flush", name))?;
        Ok(reader.metadata().map_err(self.failed("stat", name))?.len())
    }

    /// Writes the manifest, and last the marker of a complete checkpoint, if `check` succeeds right before that. All is durable when this
    /// returns.
    pub(super) fn complete(
        mut self,
        manifest: &[u8],
        check: impl Fn() -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let mut file = self.create(MANIFEST_FILE)?;
        file.write_all(manifest).map_err(self.failed("write", MANIFEST_FILE))?;
        file.sync_all().map_err(self.failed("flush", MANIFEST_FILE))?;
        self.flush()?;
        check()?;
        self.create(COMPLETE_FILE)?.sync_all().map_err(self.failed("flush", COMPLETE_FILE))?;
        self.flush()?;
        // The caller may have given up meanwhile; then the files are removed, this one first.
        check()?;
        self.is_complete = true;
        Ok(())
    }

    /// Flushes the names of the files.
    fn flush(&self) -> Result<(), FileError> {
        self.directory.sync_all().map_err(at("flush", &self.path))
    }

    fn failed(&self, what: &'static str, name: &str) -> impl FnOnce(std::io::Error) -> FileError + use<> {
        let path = self.path.join(name);
        move |source| FileError { what, path, source }
    }

    fn remove(&self, name: &str) {
        match unlinkat(&self.directory, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => {
                let path = self.path.join(name);
                tracing::warn!(path = %path.display(), "cannot remove a file of an incomplete checkpoint: {error}");
            }
        }
    }
}

impl Drop for CheckpointDirectory {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        // The marker, if there is one, is the last and goes first.
        self.created.iter().rev().for_each(|created| self.remove(created.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_model::checkpoint::{MEMORY_FILE, STATE_FILE};
    use std::os::unix::fs::PermissionsExt;

    /// Returns a directory on a disk.
    fn disk() -> tempfile::TempDir {
        tempfile::tempdir_in("/var/tmp").unwrap()
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            path.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_an_empty_directory_on_a_disk_can_have_a_checkpoint() {
        let world = disk();
        let path = |name: &str| world.path().join(name);
        std::fs::create_dir(path("empty")).unwrap();
        std::fs::create_dir_all(path("full/x")).unwrap();
        std::fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink(path("empty"), path("link")).unwrap();
        CheckpointDirectory::open(&path("empty")).unwrap();
        CheckpointDirectory::open(&path("empty/.//")).unwrap();
        for (path, expected, kind) in [
            (path("none"), OutputProblem::Missing, FailureKind::Invalid),
            (path("file"), OutputProblem::NotADirectory, FailureKind::Invalid),
            (path("link"), OutputProblem::NotADirectory, FailureKind::Invalid),
            (path("link/"), OutputProblem::NotADirectory, FailureKind::Invalid),
            (path("full"), OutputProblem::NotEmpty, FailureKind::Conflict),
            ("/dev/shm".into(), OutputProblem::InMemory, FailureKind::Conflict),
        ] {
            let error = CheckpointDirectory::open(&path).unwrap_err();
            assert!(matches!(error, CheckpointError::Output { why, .. } if why == expected), "{path:?}: {error}");
            assert_eq!(error.kind(), kind, "{error}");
        }
    }

    #[test]
    fn a_checkpoint_is_complete_or_its_files_are_removed() {
        let world = disk();
        let fill = || {
            let mut directory = CheckpointDirectory::open(world.path()).unwrap();
            directory.create(STATE_FILE).unwrap().write_all(b"state").unwrap();
            assert_eq!(directory.seal(STATE_FILE, || Ok(())).unwrap(), 5);
            directory
        };
        let stop = || Err(CheckpointError::StillOpen { name: "x" });
        drop(fill());
        assert!(fill().complete(b"manifest", stop).is_err());
        assert!(names(world.path()).is_empty());
        let directory = fill();
        std::fs::write(world.path().join(COMPLETE_FILE), "of another process").unwrap();
        let error = directory.complete(b"manifest", || Ok(())).unwrap_err();
        assert!(error.to_string().starts_with("cannot create "), "{error}");
        assert_eq!(names(world.path()), [COMPLETE_FILE], "only files of this checkpoint are removed");
        std::fs::remove_file(world.path().join(COMPLETE_FILE)).unwrap();
        fill().complete(b"manifest", || Ok(())).unwrap();
        assert_eq!(names(world.path()), [COMPLETE_FILE, MANIFEST_FILE, STATE_FILE]);
        for entry in world.path().read_dir().unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(std::fs::read(world.path().join(MANIFEST_FILE)).unwrap(), b"manifest");
    }

    #[test]
    fn a_file_is_sealed_when_its_last_writer_has_closed_it() {
        let world = disk();
        let mut directory = CheckpointDirectory::open(world.path()).unwrap();
        let writer = directory.create(MEMORY_FILE).unwrap();
        let error = directory.seal(MEMORY_FILE, || Ok(())).unwrap_err();
        assert!(matches!(error, CheckpointError::StillOpen { name: MEMORY_FILE }), "{error}");
        let closes = std::thread::spawn(move || {
            sleep(Duration::from_millis(50));
            drop(writer);
        });
        assert_eq!(directory.seal(MEMORY_FILE, || Ok(())).unwrap(), 0);
        closes.join().unwrap();
        // Afterwards the file can be opened as before.
        File::options().write(true).open(world.path().join(MEMORY_FILE)).unwrap();
    }
}
