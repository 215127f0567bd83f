//! Opens, reads and removes files in directories that a jailed process can write to. Every name in such a directory may be
//! a symbolic link, a FIFO, a device, a directory or a file of any size: nothing here follows a link, waits for a writer,
//! or reads more than a bounded number of bytes. `ci/jailed.txt` lists the source files that may reach such directories
//! through this module only.

use crate::file_error::{FileError, at};
use crate::retry::{retry_interrupted, retry_transient};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, statat, unlinkat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The maximum number of entries of such a directory that are read.
const MAX_ENTRIES: usize = 16_384;

/// The name of a file in a directory that a jailed process writes. It is a separate type so that it cannot be joined to a
/// path by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JailedFile(&'static str);

impl JailedFile {
    /// Returns the file of this name.
    pub const fn new(name: &'static str) -> JailedFile {
        JailedFile(name)
    }

    /// Returns the path of the file, for use inside the jail itself.
    pub fn in_jail(self, dir: &Path) -> PathBuf {
        dir.join(self.0)
    }
}

impl AsRef<str> for JailedFile {
    fn as_ref(&self) -> &str {
        self.0
    }
}

/// A directory that a jailed process writes. No such process may be able to write to the directories above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JailedDir(PathBuf);

/// A socket that was found without following a symbolic link. Its path refers to that very inode as long as this value exists.
#[derive(Debug)]
pub struct JailedSocket(OwnedFd);

impl JailedSocket {
    /// Returns a path to connect to, valid for the calling process only.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

impl JailedDir {
    /// Returns the directory of this path; opens nothing yet.
    pub fn new(path: impl Into<PathBuf>) -> JailedDir {
        JailedDir(path.into())
    }

    /// Opens a regular file for reading; returns `None` if there is no entry of this name. An entry of another type is an error.
    pub fn open(&self, name: impl AsRef<str>) -> Result<Option<File>, FileError> {
        let name = name.as_ref();
        self.with_open_directory(|dir| open_regular(dir, name)).map_err(at("open", &self.0.join(name)))
    }

    /// Reads a regular file of at max `max` bytes; returns `None` if there is no entry of this name. A larger file is an
    /// error, and nothing of it is read.
    pub fn read(&self, name: impl AsRef<str>, max: u64) -> Result<Option<Vec<u8>>, FileError> {
        let name = name.as_ref();
        let Some(file) = self.open(name)? else { return Ok(None) };
        let read = || {
            let length = file.metadata()?.len();
            if length > max {
                return Err(invalid_data(format!("it has {length} bytes (maximum {max})")));
            }
            let mut bytes = Vec::new();
            // The file may grow while it is read.
            file.take(max).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        Ok(Some(read().map_err(at("read", &self.0.join(name)))?))
    }

    /// Reads the last `max` bytes of a regular file of any size; returns `None` if there is no entry of this name.
    pub fn tail(&self, name: impl AsRef<str>, max: u64) -> Result<Option<Vec<u8>>, FileError> {
        let name = name.as_ref();
        let Some(mut file) = self.open(name)? else { return Ok(None) };
        let mut read = || {
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(max)))?;
            let mut bytes = Vec::new();
            file.by_ref().take(max).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        Ok(Some(read().map_err(at("read", &self.0.join(name)))?))
    }

    /// Returns whether there is an entry of this name, of any type.
    pub fn has(&self, name: impl AsRef<str>) -> Result<bool, FileError> {
        let name = name.as_ref();
        let found = self
            .with_open_directory(|dir| none_if_not_found(statat(dir, check_name(name)?, AtFlags::SYMLINK_NOFOLLOW)));
        Ok(found.map_err(at("stat", &self.0.join(name)))?.is_some())
    }

    /// Returns the sorted names of the regular files, without names that are not UTF-8. Fails if there are more than 16,384 entries.
    pub fn files(&self) -> Result<Vec<String>, FileError> {
        let names = self.list_entries(FileType::RegularFile).map_err(at("read", &self.0))?;
        let mut names: Vec<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// Finds a socket; returns `None` if there is no entry of this name. An entry of another type is an error.
    pub fn socket(&self, name: impl AsRef<str>) -> Result<Option<JailedSocket>, FileError> {
        let name = name.as_ref();
        let found = self.with_open_directory(|dir| {
            let Some(found) = open_beneath(dir, name, OFlags::PATH)? else { return Ok(None) };
            match file_type_of(&found)? {
                FileType::Socket => Ok(Some(JailedSocket(found))),
                other => Err(invalid_data(format!("it is {}, not a socket", describe(other)))),
            }
        });
        found.map_err(at("connect to", &self.0.join(name)))
    }

    /// Removes an entry that is not a directory; succeeds if it does not exist.
    pub fn remove(&self, name: impl AsRef<str>) -> Result<(), FileError> {
        let name = name.as_ref();
        let removed =
            self.with_open_directory(|dir| none_if_not_found(unlinkat(dir, check_name(name)?, AtFlags::empty())));
        removed.map(drop).map_err(at("remove", &self.0.join(name)))
    }

    /// Removes all sockets.
    pub fn remove_sockets(&self) -> Result<(), FileError> {
        for name in self.list_entries(FileType::Socket).map_err(at("read", &self.0))? {
            let removed =
                self.with_open_directory(|dir| none_if_not_found(unlinkat(dir, name.as_c_str(), AtFlags::empty())));
            removed.map_err(at("remove", &self.0.join(name.to_string_lossy().as_ref())))?;
        }
        Ok(())
    }

    /// Calls `work` with the open directory; returns `None` if the directory does not exist.
    fn with_open_directory<T>(&self, work: impl FnOnce(&OwnedFd) -> io::Result<Option<T>>) -> io::Result<Option<T>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = retry_interrupted(|| openat(rustix::fs::CWD, &self.0, flags, Mode::empty()));
        match none_if_not_found(opened)? {
            Some(dir) => work(&dir),
            None => Ok(None),
        }
    }

    fn list_entries(&self, wanted: FileType) -> io::Result<Vec<std::ffi::CString>> {
        let names = self.with_open_directory(|dir| {
            let mut names = Vec::new();
            for (count, entry) in Dir::read_from(dir)?.enumerate() {
                let entry = entry?;
                if count >= MAX_ENTRIES {
                    return Err(invalid_data(format!("it has more than {MAX_ENTRIES} entries")));
                }
                let found = match entry.file_type() {
                    FileType::Unknown => none_if_not_found(statat(dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW))?
                        .map(|stat| FileType::from_raw_mode(stat.st_mode)),
                    known => Some(known),
                };
                if found == Some(wanted) {
                    names.push(entry.file_name().to_owned());
                }
            }
            Ok(Some(names))
        });
        Ok(names?.unwrap_or_default())
    }
}

/// Opens an entry of this directory without following links; returns `None` if it does not exist.
fn open_beneath(dir: impl AsFd, name: &str, flags: OFlags) -> io::Result<Option<OwnedFd>> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let name = check_name(name)?;
    let opened = retry_transient(|| openat2(&dir, name, flags | OFlags::CLOEXEC, Mode::empty(), resolve));
    match none_if_not_found(opened) {
        // openat2(2) found a symbolic link, which is not allowed here.
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            Err(invalid_data("it is a symbolic link".to_owned()))
        }
        other => other,
    }
}

fn open_regular(dir: &OwnedFd, name: &str) -> io::Result<Option<File>> {
    // The type is checked before the entry is opened, because opening a device or a FIFO has side effects.
    let Some(found) = open_beneath(dir, name, OFlags::PATH)? else { return Ok(None) };
    expect_regular(file_type_of(&found)?)?;
    let Some(opened) = open_beneath(dir, name, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)? else {
        return Ok(None);
    };
    // The name may refer to another entry by now.
    expect_regular(file_type_of(&opened)?)?;
    Ok(Some(opened.into()))
}

fn expect_regular(found: FileType) -> io::Result<()> {
    match found {
        FileType::RegularFile => Ok(()),
        other => Err(invalid_data(format!("it is {}, not a regular file", describe(other)))),
    }
}

fn file_type_of(file: impl AsFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(fstat(file)?.st_mode))
}

fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "a file of an unknown type",
    }
}

/// Checks that the text is a plain name and not a path.
fn check_name(name: &str) -> io::Result<&str> {
    match name {
        "" | "." | ".." => Err(io::ErrorKind::InvalidInput.into()),
        name if name.contains('/') => Err(io::ErrorKind::InvalidInput.into()),
        name => Ok(name),
    }
}

fn none_if_not_found<T>(found: Result<T, Errno>) -> io::Result<Option<T>> {
    match found {
        Err(Errno::NOENT) => Ok(None),
        other => Ok(Some(other?)),
    }
}

fn invalid_data(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    fn error_text<T: std::fmt::Debug>(outcome: Result<T, FileError>) -> String {
        crate::Chain(&outcome.unwrap_err()).to_string()
    }

    /// Creates one entry of each type that a process could create, named after its type.
    fn hostile_directory() -> (tempfile::TempDir, JailedDir) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("jail");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(root.path().join("secret"), "secret").unwrap();
        std::fs::write(dir.join("file"), "0123456789").unwrap();
        std::fs::create_dir(dir.join("directory")).unwrap();
        symlink("../secret", dir.join("link")).unwrap();
        symlink("file", dir.join("inner")).unwrap();
        symlink("/proc/self/mem", dir.join("magic")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, dir.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        File::create(dir.join("sparse")).unwrap().set_len(3 << 30).unwrap();
        drop(UnixListener::bind(dir.join("socket")).unwrap());
        (root, JailedDir::new(dir))
    }

    #[test]
    fn only_a_regular_file_within_its_bound_is_read() {
        let (_root, dir) = hostile_directory();
        assert_eq!(dir.read("file", 10).unwrap().unwrap(), b"0123456789");
        assert_eq!(dir.tail("file", 3).unwrap().unwrap(), b"789");
        assert_eq!(dir.tail("sparse", 3).unwrap().unwrap(), [0; 3]);
        assert!(dir.read("none", 10).unwrap().is_none());
        assert!(JailedDir::new("/nowhere/at/all").read("file", 10).unwrap().is_none());
        for (name, expected) in [
            ("directory", "it is a directory, not a regular file"),
            ("link", "symbolic link"),
            ("inner", "symbolic link"),
            ("magic", "symbolic link"),
            ("fifo", "it is a FIFO, not a regular file"),
            ("socket", "it is a socket, not a regular file"),
            ("sparse", "it has 3221225472 bytes (maximum 10)"),
            ("../secret", "invalid"),
            ("..", "invalid"),
            ("/etc/shadow", "invalid"),
        ] {
            let error = error_text(dir.read(name, 10));
            assert!(error.contains(expected), "{name}: {error}");
        }
        assert!(error_text(dir.tail("fifo", 10)).contains("FIFO"));
        assert!(error_text(dir.read("file", 9)).contains("it has 10 bytes (maximum 9)"));
    }

    #[test]
    fn a_directory_that_was_replaced_by_a_link_is_not_followed() {
        let (root, _dir) = hostile_directory();
        let link = root.path().join("replaced");
        symlink("/etc", &link).unwrap();
        assert!(JailedDir::new(&link).read("passwd", 1 << 20).is_err());
        assert!(JailedDir::new(&link).files().is_err());
    }

    #[test]
    fn entries_are_found_and_removed_without_following_links() {
        let (root, dir) = hostile_directory();
        assert_eq!(dir.files().unwrap(), ["file", "sparse"]);
        assert!(dir.has("magic").unwrap() && dir.has("fifo").unwrap() && !dir.has("none").unwrap());
        dir.remove_sockets().unwrap();
        for name in ["link", "magic", "fifo", "none", "file"] {
            dir.remove(name).unwrap();
            assert!(!dir.has(name).unwrap());
        }
        assert!(dir.remove("directory").is_err() && dir.remove("../secret").is_err());
        assert_eq!(std::fs::read(root.path().join("secret")).unwrap(), b"secret");
        assert!(!dir.has("socket").unwrap());
        JailedDir::new("/nowhere/at/all").remove_sockets().unwrap();
    }

    #[test]
    fn a_socket_is_connected_by_its_inode() {
        let (root, dir) = hostile_directory();
        let other = UnixListener::bind(root.path().join("other")).unwrap();
        symlink("../other", root.path().join("jail/led-away")).unwrap();
        let listener = UnixListener::bind(root.path().join("jail/served")).unwrap();
        let found = dir.socket("served").unwrap().unwrap();
        drop(std::os::unix::net::UnixStream::connect(found.path()).unwrap());
        drop(listener.accept().unwrap());
        assert!(dir.socket("none").unwrap().is_none());
        assert!(error_text(dir.socket("led-away")).contains("symbolic link"));
        assert!(error_text(dir.socket("file")).contains("it is a regular file, not a socket"));
        other.set_nonblocking(true).unwrap();
        assert!(other.accept().is_err());
    }

    #[test]
    fn too_many_entries_are_an_error() {
        let root = tempfile::tempdir().unwrap();
        for n in 0..=MAX_ENTRIES {
            File::create(root.path().join(n.to_string())).unwrap();
        }
        assert!(error_text(JailedDir::new(root.path()).files()).contains("more than"));
    }
}
