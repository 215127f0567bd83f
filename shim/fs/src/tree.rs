//! Reads a volume of the node to copy it into the guest: in a fixed order, within limits, and nothing outside of the
//! volume. The tree is not trusted: it may contain links that lead out of it, FIFOs, devices and endless files, and may
//! change at any time. The module only reads, below the descriptor of the volume's root.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use nacelle_base::push::{CopyInFailure, DATA, MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH, PART_BYTES};
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
const ENTRY: usize = 48;

/// A volume cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeError {
    #[error("it changed while it was read")]
    Changed,
    #[error("it has more than {MAX_ENTRIES} files, directories and links")]
    Many,
    #[error("its files have more than {MAX_BYTES} bytes")]
    Large,
    #[error("{path} is more than {MAX_DEPTH} directories deep, or longer than {MAX_PATH} bytes")]
    Deep { path: String },
    #[error("{path} is {what}")]
    Odd { path: String, what: &'static str },
    #[error("cannot {what} {path}")]
    Read { what: &'static str, path: String, source: io::Error },
}

impl TreeError {
    /// Returns the reason that is sent to the pod process.
    pub(crate) fn why(&self) -> CopyInFailure {
        match self {
            TreeError::Changed => CopyInFailure::Changed,
            TreeError::Many | TreeError::Large => CopyInFailure::LimitExceeded,
            TreeError::Deep { .. } | TreeError::Odd { .. } => CopyInFailure::UnsupportedEntry,
            TreeError::Read { .. } => CopyInFailure::Failed,
        }
    }
}

/// A directory with entries that are still to be read.
struct Level {
    directory: OwnedFd,
    path: Vec<u8>,
    names: VecDeque<Vec<u8>>,
}

/// A file with bytes that are still to be read.
struct Open {
    file: File,
    entry: TreeEntry,
    at: u64,
}

/// A volume that is being read.
pub(crate) struct Walk {
    root: OwnedFd,
    /// The target of [`DATA`], if it is followed.
    data: Option<Vec<u8>>,
    ready: VecDeque<TreeEntry>,
    levels: Vec<Level>,
    file: Option<Open>,
    entries: usize,
    bytes: u64,
}

fn shown(path: &[u8]) -> String {
    if path.is_empty() { "the volume itself".to_owned() } else { String::from_utf8_lossy(path).into_owned() }
}

fn failed(what: &'static str, path: &[u8]) -> impl FnOnce(Errno) -> TreeError {
    let path = shown(path);
    move |error| TreeError::Read { what, path, source: error.into() }
}

fn below(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}

/// Opens an entry of a directory for reading; follows no symbolic link and crosses no mount point.
fn open(directory: impl AsFd, name: &[u8], more: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | more;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    retry_transient(|| openat2(&directory, OsStr::from_bytes(name), flags, Mode::empty(), resolve))
}

fn link(directory: impl AsFd, name: &[u8]) -> Result<Vec<u8>, Errno> {
    readlinkat(directory, OsStr::from_bytes(name), Vec::new()).map(std::ffi::CString::into_bytes)
}

/// Returns the sorted names in a directory; fails with `None` if there are more than `most`.
fn list(directory: BorrowedFd, most: usize) -> Result<VecDeque<Vec<u8>>, Option<Errno>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(Some)? {
        let entry = entry.map_err(Some)?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if names.len() >= most {
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

impl Walk {
    /// Begins to read the volume. If it is `live`, its [`DATA`] link is followed, and the directory `known` is not read again.
    pub fn begin(volume: BorrowedFd, live: bool, known: Option<&[u8]>) -> Result<Walk, TreeError> {
        let root = volume.try_clone_to_owned();
        let root = root.map_err(|source| TreeError::Read { what: "keep", path: shown(&[]), source })?;
        let (ready, levels) = (VecDeque::new(), Vec::new());
        let mut walk = Walk { root, data: None, ready, levels, file: None, entries: 0, bytes: 0 };
        let stat = fstat(&walk.root).map_err(failed("look at", &[]))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if live => walk.begin_live(&stat, known)?,
            FileType::Directory => {
                let root = walk.reopen()?;
                walk.enter(root, Vec::new(), &stat)?;
            }
            FileType::RegularFile if !live => {
                let file = walk.reopen()?;
                walk.begin_file(file, Vec::new(), &stat)?;
            }
            _ => return Err(TreeError::Odd { path: shown(&[]), what: "no directory" }),
        }
        Ok(walk)
    }

    /// Returns the name of the directory that contains the volume's files.
    pub fn data(&self) -> Option<&[u8]> {
        self.data.as_deref()
    }

    fn reopen(&self) -> Result<OwnedFd, TreeError> {
        self.root.try_clone().map_err(|source| TreeError::Read { what: "keep", path: shown(&[]), source })
    }

    /// Reads the volume's root, its links, and opens the directory that they refer to.
    fn begin_live(&mut self, stat: &Stat, known: Option<&[u8]>) -> Result<(), TreeError> {
        let data = match link(&self.root, DATA.as_bytes()) {
            Ok(data) if is_data_directory(&data) => data,
            Ok(_) => return Err(TreeError::Odd { path: DATA.into(), what: "no link to a directory beside it" }),
            Err(Errno::INVAL) => return Err(TreeError::Odd { path: DATA.into(), what: "no link" }),
            Err(error) => return Err(failed("follow", DATA.as_bytes())(error)),
        };
        self.push(entry(Vec::new(), stat))?;
        let names = self.names(self.root.as_fd(), &[])?;
        for name in names {
            if name.starts_with(b"..") && name != DATA.as_bytes() {
                continue;
            }
            match self.look(self.root.as_fd(), &name, &name) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
                    let to = link(&self.root, &name).map_err(gone_or("follow", &name))?;
                    self.push(TreeEntry { data: to, ..entry(name, &stat) })?;
                }
                Ok(_) => {
                    let what = "no link, as all is beside ..data that kubelet writes";
                    return Err(TreeError::Odd { path: shown(&name), what });
                }
                Err(error) => return Err(error),
            }
        }
        self.data = Some(data.clone());
        if known != Some(&data) {
            let directory = open(&self.root, &data, OFlags::DIRECTORY).map_err(gone_or("open", &data))?;
            let stat = fstat(&directory).map_err(failed("look at", &data))?;
            self.enter(directory, data, &stat)?;
        }
        Ok(())
    }

    fn look(&self, directory: BorrowedFd, name: &[u8], path: &[u8]) -> Result<Stat, TreeError> {
        statat(directory, OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW).map_err(gone_or("look at", path))
    }

    fn names(&self, directory: BorrowedFd, path: &[u8]) -> Result<VecDeque<Vec<u8>>, TreeError> {
        list(directory, MAX_ENTRIES.saturating_sub(self.entries)).map_err(|error| match error {
            Some(error) => failed("list", path)(error),
            None => TreeError::Many,
        })
    }

    fn push(&mut self, entry: TreeEntry) -> Result<(), TreeError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(TreeError::Many);
        }
        if entry.path.len() > MAX_PATH {
            return Err(TreeError::Deep { path: shown(&entry.path) });
        }
        self.ready.push_back(entry);
        Ok(())
    }

    fn enter(&mut self, directory: OwnedFd, path: Vec<u8>, stat: &Stat) -> Result<(), TreeError> {
        if self.levels.len() >= MAX_DEPTH {
            return Err(TreeError::Deep { path: shown(&path) });
        }
        let names = self.names(directory.as_fd(), &path)?;
        self.push(entry(path.clone(), stat))?;
        self.levels.push(Level { directory, path, names });
        Ok(())
    }

    fn begin_file(&mut self, file: OwnedFd, path: Vec<u8>, stat: &Stat) -> Result<(), TreeError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(TreeError::Many);
        }
        if path.len() > MAX_PATH {
            return Err(TreeError::Deep { path: shown(&path) });
        }
        // The size in the metadata; the bytes that are read are counted later.
        if u64::try_from(stat.st_size).unwrap_or(0).saturating_add(self.bytes) > MAX_BYTES {
            return Err(TreeError::Large);
        }
        self.file = Some(Open { file: file.into(), entry: entry(path, stat), at: 0 });
        Ok(())
    }

    /// Returns the next part, and whether it is the last.
    pub fn part(&mut self) -> Result<(Vec<TreeEntry>, bool), TreeError> {
        let (mut part, mut size) = (Vec::new(), 0);
        while size < PART_BYTES {
            let Some(entry) = self.next()? else {
                self.settled()?;
                return Ok((part, true));
            };
            size += entry.path.len() + entry.data.len() + ENTRY;
            part.push(entry);
        }
        Ok((part, false))
    }

    /// Checks that the [`DATA`] link still refers to the directory that was read: kubelet removes a directory only after it
    /// has changed the link.
    fn settled(&self) -> Result<(), TreeError> {
        match &self.data {
            Some(data) if link(&self.root, DATA.as_bytes()).ok().as_ref() != Some(data) => Err(TreeError::Changed),
            _ => Ok(()),
        }
    }

    fn next(&mut self) -> Result<Option<TreeEntry>, TreeError> {
        loop {
            if let Some(entry) = self.ready.pop_front() {
                return Ok(Some(entry));
            }
            if self.file.is_some() {
                return self.read().map(Some);
            }
            let Some(level) = self.levels.last_mut() else { return Ok(None) };
            let Some(name) = level.names.pop_front() else {
                self.levels.pop();
                continue;
            };
            self.visit(&name)?;
        }
    }

    /// Reads one entry of the innermost directory.
    fn visit(&mut self, name: &[u8]) -> Result<(), TreeError> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        let path = below(&level.path, name);
        let stat = self.look(level.directory.as_fd(), name, &path)?;
        let opened = |more| open(&level.directory, name, more).map_err(gone_or("open", &path));
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let directory = opened(OFlags::DIRECTORY)?;
                self.enter(directory, path, &stat)
            }
            FileType::Symlink => {
                let to = link(&level.directory, name).map_err(gone_or("follow", &path))?;
                self.push(TreeEntry { data: to, ..entry(path, &stat) })
            }
            FileType::RegularFile => {
                let file = opened(OFlags::empty())?;
                // The opened file may be another one than the entry that was checked.
                let stat = fstat(&file).map_err(failed("look at", &path))?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(TreeError::Changed);
                }
                self.begin_file(file, path, &stat)
            }
            _ => Err(TreeError::Odd { path: shown(&path), what: "neither file, directory nor link" }),
        }
    }

    /// Reads the next bytes of the open file.
    fn read(&mut self) -> Result<TreeEntry, TreeError> {
        let Some(open) = &mut self.file else { return Err(TreeError::Changed) };
        let mut data = vec![0; PART_BYTES];
        let mut length = 0;
        while let Some(room) = data.get_mut(length..).filter(|room| !room.is_empty()) {
            match open.file.read_at(room, open.at) {
                Ok(0) => break,
                Ok(count) => {
                    length += count;
                    open.at += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(TreeError::Read { what: "read", path: shown(&open.entry.path), source });
                }
            }
        }
        let more = length == PART_BYTES;
        data.truncate(length);
        data.shrink_to_fit();
        self.bytes += length as u64;
        if self.bytes > MAX_BYTES {
            return Err(TreeError::Large);
        }
        let read = TreeEntry { data, more, ..open.entry.clone() };
        if !more {
            self.file = None;
        }
        Ok(read)
    }
}

/// Returns `Changed` for errors that mean that the entry was removed or replaced while the volume was read.
fn gone_or(what: &'static str, path: &[u8]) -> impl FnOnce(Errno) -> TreeError {
    let path = path.to_vec();
    move |error| match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::INVAL => TreeError::Changed,
        error => failed(what, &path)(error),
    }
}

fn entry(path: Vec<u8>, stat: &Stat) -> TreeEntry {
    let mode: RawMode = stat.st_mode;
    TreeEntry { path, mode, uid: stat.st_uid, gid: stat.st_gid, data: Vec::new(), more: false }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
