//! Opens the log file of a container by its name, for the daemon. The pod process receives the descriptor only: it reaches no file by a
//! name in kubelet's directories.

use super::{ClientError, PodClient};
use nacelle_base::files::{FileError, at};
use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Classify, FailureKind};
use nacelle_proto::{common, pod as proto};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};

/// A log file that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error(
    "the log file {path} cannot be opened; its directory must be writable and have no symbolic links below kubelet's, and the file must be a regular one", path = path.display()
)]
pub struct LogFileError {
    /// The path of the log file.
    pub path: PathBuf,
    /// The reason.
    pub source: FileError,
}

impl Classify for LogFileError {
    fn kind(&self) -> FailureKind {
        // A link, a FIFO without a reader, or a path outside of the log directory: the operator or kubelet corrects that.
        let is_wrong_file = matches!(self.source.source.raw_os_error(), Some(libc::ELOOP | libc::ENXIO))
            || self.source.source.kind() == io::ErrorKind::InvalidInput;
        if is_wrong_file { FailureKind::Conflict } else { self.source.kind() }
    }
}

/// Opens the log file `path` for appending. Creates the file and missing directories. `directory` and what is below it must not be symbolic
/// links, and the file must be a regular one. Blocks.
pub fn open_log(directory: &Path, path: &Path) -> Result<File, LogFileError> {
    open_below(directory, path).map_err(|source| LogFileError { path: path.to_owned(), source })
}

fn open_below(directory: &Path, path: &Path) -> Result<File, FileError> {
    let outside = || {
        let why = format!("it is not below the pod's log directory {}", directory.display());
        at("log to", path)(io::Error::new(io::ErrorKind::InvalidInput, why))
    };
    let below = path.strip_prefix(directory).map_err(|_not_below| outside())?;
    if below.components().any(|part| !matches!(part, Component::Normal(_))) {
        return Err(outside());
    }
    let name = below.file_name().ok_or_else(outside)?;
    let mut current = directory.to_owned();
    std::fs::create_dir_all(directory).map_err(at("create", directory))?;
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    let mut parent = retry_interrupted(|| nix::fcntl::open(directory, flags, Mode::empty()))
        .map_err(|errno| at("open", directory)(errno.into()))?;
    for part in below.parent().into_iter().flat_map(Path::components) {
        current.push(part);
        match mkdirat(&parent, part.as_os_str(), Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
            Err(errno) => return Err(at("create", &current)(errno.into())),
        }
        parent = retry_interrupted(|| openat(&parent, part.as_os_str(), flags, Mode::empty()))
            .map_err(|errno| at("open", &current)(errno.into()))?;
    }
    let flags = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    // With O_NONBLOCK the open does not wait for a reader if the name is a FIFO; it has no effect on a regular file.
    let flags = flags | OFlag::O_NONBLOCK;
    let file = retry_interrupted(|| openat(&parent, name, flags, Mode::from_bits_truncate(0o640)))
        .map_err(|errno| at("open", path)(errno.into()))?;
    let file = File::from(file);
    if !file.metadata().map_err(at("read", path))?.is_file() {
        return Err(at("log to", path)(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    Ok(file)
}

impl PodClient {
    /// Makes the pod process write the output of a created container to this file from now on. Without a file the output is
    /// discarded.
    pub async fn set_log(&self, id: &str, file: File) -> Result<(), ClientError> {
        let open = proto::StreamOpen { id: id.to_owned(), stream: common::Stream::Log.into(), ..Default::default() };
        self.open_with_descriptors(open, &[file.into()]).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_must_stay_below_the_directory() {
        let world = tempfile::tempdir().unwrap();
        let directory = world.path().join("a");
        for bad in ["b/0.log", "a/../b", "a", "a/c/..", ""] {
            let path = if bad.is_empty() { PathBuf::from("0.log") } else { world.path().join(bad) };
            let error = open_log(&directory, &path).unwrap_err();
            assert_eq!(error.source.source.kind(), io::ErrorKind::InvalidInput, "{bad}");
            assert_eq!(error.kind(), FailureKind::Conflict, "{bad}");
        }
        assert!(!directory.exists(), "nothing was created");
        open_log(&directory, &directory.join("c/0.log")).unwrap();
        assert!(directory.join("c/0.log").exists());
    }

    #[test]
    fn links_are_not_followed() {
        let world = tempfile::tempdir().unwrap();
        let logs = world.path().join("logs");
        std::fs::create_dir(&logs).unwrap();
        std::os::unix::fs::symlink(world.path(), logs.join("directory")).unwrap();
        std::os::unix::fs::symlink(world.path().join("victim"), logs.join("file.log")).unwrap();
        for name in ["directory/x.log", "file.log"] {
            assert_eq!(open_log(&logs, &logs.join(name)).unwrap_err().kind(), FailureKind::Conflict);
        }
        let link = world.path().join("link");
        std::os::unix::fs::symlink(world.path(), &link).unwrap();
        assert!(open_log(&link, &link.join("x.log")).is_err());
        assert!(!world.path().join("victim").exists() && !world.path().join("x.log").exists());
        nix::unistd::mkfifo(&logs.join("fifo"), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let _reader = nix::fcntl::open(&logs.join("fifo"), OFlag::O_RDONLY | OFlag::O_NONBLOCK, Mode::empty()).unwrap();
        assert_eq!(open_log(&logs, &logs.join("fifo")).unwrap_err().source.source.kind(), io::ErrorKind::InvalidInput);
    }
}
