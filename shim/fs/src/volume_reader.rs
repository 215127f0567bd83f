//! Reads a volume of the node to copy it into the guest: in a fixed order, within limits, and nothing outside of the
//! volume. The tree is not trusted: it may contain links that lead out of it, FIFOs, devices and endless files, and may
//! change at any time. The module only reads, below the descriptor of the volume's root.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use nacelle_base::copied_in::{CopyInFailure, DATA, MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH, PART_BYTES};
use nacelle_base::retry::retry_transient;
use nacelle_proto::agent::TreeEntry;
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RawMode, ResolveFlags, Stat, fstat, openat2, readlinkat, statat,
};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

/// The size of an encoded entry besides path and data, in bytes; an upper bound.
const ENTRY_BYTES: usize = 48;

/// A volume cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeReadError {
    #[error("the volume changed while it was read")]
    Changed,
    #[error("the volume has more than {MAX_ENTRIES} files, directories and links")]
    TooManyEntries,
    #[error("the files of the volume have more than {MAX_BYTES} bytes")]
    TooLarge,
    #[error("{path} is more than {MAX_DEPTH} directories deep, or longer than {MAX_PATH} bytes")]
    TooDeep { path: String },
    #[error("{path} is {what}")]
    UnsupportedEntry { path: String, what: &'static str },
    #[error("cannot {what} {path}")]
    Read { what: &'static str, path: String, source: io::Error },
}

impl VolumeReadError {
    /// Returns the reason that is sent to the pod process.
    pub(crate) fn reason(&self) -> CopyInFailure {
        match self {
            VolumeReadError::Changed => CopyInFailure::Changed,
            VolumeReadError::TooManyEntries | VolumeReadError::TooLarge => CopyInFailure::LimitExceeded,
            VolumeReadError::TooDeep { .. } | VolumeReadError::UnsupportedEntry { .. } => {
                CopyInFailure::UnsupportedEntry
            }
            VolumeReadError::Read { .. } => CopyInFailure::Failed,
        }
    }
}

/// A directory with entries that are still to be read.
struct OpenDirectory {
    directory: OwnedFd,
    path: Vec<u8>,
    names: VecDeque<Vec<u8>>,
}

/// A file with bytes that are still to be read.
struct OpenFile {
    file: File,
    entry: TreeEntry,
    offset: u64,
}

/// A volume that is being read.
pub(crate) struct VolumeReader {
    root: OwnedFd,
    /// The target of [`DATA`], if it is followed.
    data: Option<Vec<u8>>,
    ready: VecDeque<TreeEntry>,
    directories: Vec<OpenDirectory>,
    file: Option<OpenFile>,
    entries: usize,
    bytes: u64,
}

fn display_path(path: &[u8]) -> String {
    if path.is_empty() { "the volume itself".to_owned() } else { String::from_utf8_lossy(path).into_owned() }
}

fn read_error(what: &'static str, path: &[u8]) -> impl FnOnce(Errno) -> VolumeReadError {
    let path = display_path(path);
    move |error| VolumeReadError::Read { what, path, source: error.into() }
}

fn join_path(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}

/// Opens an entry of a directory for reading; follows no symbolic link and crosses no mount point.
fn open_entry(directory: impl AsFd, name: &[u8], more: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | more;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    retry_transient(|| openat2(&directory, OsStr::from_bytes(name), flags, Mode::empty(), resolve))
}

fn read_link(directory: impl AsFd, name: &[u8]) -> Result<Vec<u8>, Errno> {
    readlinkat(directory, OsStr::from_bytes(name), Vec::new()).map(std::ffi::CString::into_bytes)
}

/// Returns the sorted names in a directory; fails with `None` if there are more than `max`.
fn list_names(directory: BorrowedFd, max: usize) -> Result<VecDeque<Vec<u8>>, Option<Errno>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(Some)? {
        let entry = entry.map_err(Some)?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if names.len() >= max {
            return Err(None);
        }
        names.push(name.to_vec());
    }
    names.sort_unstable();
    Ok(names.into())
}

/// Returns whether this is a name of a directory beside the link [`DATA`] that the link may refer to.
pub(crate) fn is_data_directory(name: &[u8]) -> bool {
    name.starts_with(b"..") && name.len() > 2 && name != DATA.as_bytes() && !name.contains(&b'/')
}

impl VolumeReader {
    /// Begins to read the volume. If it is `live`, its [`DATA`] link is followed, and the directory `known` is not read again.
    pub fn begin(volume: BorrowedFd, live: bool, known: Option<&[u8]>) -> Result<VolumeReader, VolumeReadError> {
        let root = volume.try_clone_to_owned();
        let root = root.map_err(|source| VolumeReadError::Read {
            what: "duplicate the descriptor of",
            path: display_path(&[]),
            source,
        })?;
        let (ready, directories) = (VecDeque::new(), Vec::new());
        let mut reader = VolumeReader { root, data: None, ready, directories, file: None, entries: 0, bytes: 0 };
        let stat = fstat(&reader.root).map_err(read_error("stat", &[]))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if live => reader.begin_live(&stat, known)?,
            FileType::Directory => {
                let root = reader.clone_root()?;
                reader.enter_directory(root, Vec::new(), &stat)?;
            }
            FileType::RegularFile if !live => {
                let file = reader.clone_root()?;
                reader.begin_file(file, Vec::new(), &stat)?;
            }
            _ => return Err(VolumeReadError::UnsupportedEntry { path: display_path(&[]), what: "not a directory" }),
        }
        Ok(reader)
    }

    /// Returns the name of the directory that contains the volume's files.
    pub fn data_directory(&self) -> Option<&[u8]> {
        self.data.as_deref()
    }

    fn clone_root(&self) -> Result<OwnedFd, VolumeReadError> {
        self.root.try_clone().map_err(|source| VolumeReadError::Read {
            what: "duplicate the descriptor of",
            path: display_path(&[]),
            source,
        })
    }

    /// Reads the volume's root, its links, and opens the directory that they refer to.
    fn begin_live(&mut self, stat: &Stat, known: Option<&[u8]>) -> Result<(), VolumeReadError> {
        let data = match read_link(&self.root, DATA.as_bytes()) {
            Ok(data) if is_data_directory(&data) => data,
            Ok(_) => {
                return Err(VolumeReadError::UnsupportedEntry {
                    path: DATA.into(),
                    what: "not a link to a directory beside it",
                });
            }
            Err(Errno::INVAL) => {
                return Err(VolumeReadError::UnsupportedEntry { path: DATA.into(), what: "not a link" });
            }
            Err(error) => return Err(read_error("follow", DATA.as_bytes())(error)),
        };
        self.push_entry(new_entry(Vec::new(), stat))?;
        let names = self.read_names(self.root.as_fd(), &[])?;
        for name in names {
            if name.starts_with(b"..") && name != DATA.as_bytes() {
                continue;
            }
            match self.stat_entry(self.root.as_fd(), &name, &name) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
                    let to = read_link(&self.root, &name).map_err(changed_or("follow", &name))?;
                    self.push_entry(TreeEntry { data: to, ..new_entry(name, &stat) })?;
                }
                Ok(_) => {
                    let what = "not a link; beside ..data a volume of kubelet has only links";
                    return Err(VolumeReadError::UnsupportedEntry { path: display_path(&name), what });
                }
                Err(error) => return Err(error),
            }
        }
        self.data = Some(data.clone());
        if known != Some(&data) {
            let directory = open_entry(&self.root, &data, OFlags::DIRECTORY).map_err(changed_or("open", &data))?;
            let stat = fstat(&directory).map_err(read_error("stat", &data))?;
            self.enter_directory(directory, data, &stat)?;
        }
        Ok(())
    }

    fn stat_entry(&self, directory: BorrowedFd, name: &[u8], path: &[u8]) -> Result<Stat, VolumeReadError> {
        statat(directory, OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW).map_err(changed_or("stat", path))
    }

    fn read_names(&self, directory: BorrowedFd, path: &[u8]) -> Result<VecDeque<Vec<u8>>, VolumeReadError> {
        list_names(directory, MAX_ENTRIES.saturating_sub(self.entries)).map_err(|error| match error {
            Some(error) => read_error("list", path)(error),
            None => VolumeReadError::TooManyEntries,
        })
    }

    fn push_entry(&mut self, entry: TreeEntry) -> Result<(), VolumeReadError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(VolumeReadError::TooManyEntries);
        }
        if entry.path.len() > MAX_PATH {
            return Err(VolumeReadError::TooDeep { path: display_path(&entry.path) });
        }
        self.ready.push_back(entry);
        Ok(())
    }

    fn enter_directory(&mut self, directory: OwnedFd, path: Vec<u8>, stat: &Stat) -> Result<(), VolumeReadError> {
        if self.directories.len() >= MAX_DEPTH {
            return Err(VolumeReadError::TooDeep { path: display_path(&path) });
        }
        let names = self.read_names(directory.as_fd(), &path)?;
        self.push_entry(new_entry(path.clone(), stat))?;
        self.directories.push(OpenDirectory { directory, path, names });
        Ok(())
    }

    fn begin_file(&mut self, file: OwnedFd, path: Vec<u8>, stat: &Stat) -> Result<(), VolumeReadError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(VolumeReadError::TooManyEntries);
        }
        if path.len() > MAX_PATH {
            return Err(VolumeReadError::TooDeep { path: display_path(&path) });
        }
        // The size in the metadata; the bytes that are read are counted later.
        if u64::try_from(stat.st_size).unwrap_or(0).saturating_add(self.bytes) > MAX_BYTES {
            return Err(VolumeReadError::TooLarge);
        }
        self.file = Some(OpenFile { file: file.into(), entry: new_entry(path, stat), offset: 0 });
        Ok(())
    }

    /// Returns the next part, and whether it is the last.
    pub fn next_part(&mut self) -> Result<(Vec<TreeEntry>, bool), VolumeReadError> {
        let (mut part, mut size) = (Vec::new(), 0);
        while size < PART_BYTES {
            let Some(entry) = self.next_entry()? else {
                self.check_unchanged()?;
                return Ok((part, true));
            };
            size += entry.path.len() + entry.data.len() + ENTRY_BYTES;
            part.push(entry);
        }
        Ok((part, false))
    }

    /// Checks that the [`DATA`] link still refers to the directory that was read: kubelet removes a directory only after it
    /// has changed the link.
    fn check_unchanged(&self) -> Result<(), VolumeReadError> {
        match &self.data {
            Some(data) if read_link(&self.root, DATA.as_bytes()).ok().as_ref() != Some(data) => {
                Err(VolumeReadError::Changed)
            }
            _ => Ok(()),
        }
    }

    fn next_entry(&mut self) -> Result<Option<TreeEntry>, VolumeReadError> {
        loop {
            if let Some(entry) = self.ready.pop_front() {
                return Ok(Some(entry));
            }
            if self.file.is_some() {
                return self.read_file_part().map(Some);
            }
            let Some(parent) = self.directories.last_mut() else { return Ok(None) };
            let Some(name) = parent.names.pop_front() else {
                self.directories.pop();
                continue;
            };
            self.visit_entry(&name)?;
        }
    }

    /// Reads one entry of the innermost directory.
    fn visit_entry(&mut self, name: &[u8]) -> Result<(), VolumeReadError> {
        let Some(parent) = self.directories.last() else { return Ok(()) };
        let path = join_path(&parent.path, name);
        let stat = self.stat_entry(parent.directory.as_fd(), name, &path)?;
        let open_with = |more| open_entry(&parent.directory, name, more).map_err(changed_or("open", &path));
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let directory = open_with(OFlags::DIRECTORY)?;
                self.enter_directory(directory, path, &stat)
            }
            FileType::Symlink => {
                let to = read_link(&parent.directory, name).map_err(changed_or("follow", &path))?;
                self.push_entry(TreeEntry { data: to, ..new_entry(path, &stat) })
            }
            FileType::RegularFile => {
                let file = open_with(OFlags::empty())?;
                // The opened file may be another one than the entry that was checked.
                let stat = fstat(&file).map_err(read_error("stat", &path))?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(VolumeReadError::Changed);
                }
                self.begin_file(file, path, &stat)
            }
            _ => Err(VolumeReadError::UnsupportedEntry {
                path: display_path(&path),
                what: "neither file, directory nor link",
            }),
        }
    }

    /// Reads the next bytes of the open file.
    fn read_file_part(&mut self) -> Result<TreeEntry, VolumeReadError> {
        let Some(open) = &mut self.file else { return Err(VolumeReadError::Changed) };
        let mut data = vec![0; PART_BYTES];
        let mut length = 0;
        while let Some(space) = data.get_mut(length..).filter(|space| !space.is_empty()) {
            match open.file.read_at(space, open.offset) {
                Ok(0) => break,
                Ok(count) => {
                    length += count;
                    open.offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(VolumeReadError::Read { what: "read", path: display_path(&open.entry.path), source });
                }
            }
        }
        let more = length == PART_BYTES;
        data.truncate(length);
        data.shrink_to_fit();
        self.bytes += length as u64;
        if self.bytes > MAX_BYTES {
            return Err(VolumeReadError::TooLarge);
        }
        let read = TreeEntry { data, more, ..open.entry.clone() };
        if !more {
            self.file = None;
        }
        Ok(read)
    }
}

/// Returns `Changed` for errors that mean that the entry was removed or replaced while the volume was read.
fn changed_or(what: &'static str, path: &[u8]) -> impl FnOnce(Errno) -> VolumeReadError {
    let path = path.to_vec();
    move |error| match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::INVAL => VolumeReadError::Changed,
        error => read_error(what, &path)(error),
    }
}

fn new_entry(path: Vec<u8>, stat: &Stat) -> TreeEntry {
    let mode: RawMode = stat.st_mode;
    TreeEntry { path, mode, uid: stat.st_uid, gid: stat.st_gid, data: Vec::new(), more: false }
}

#[cfg(test)]
#[path = "volume_reader_tests.rs"]
mod tests;
