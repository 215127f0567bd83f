//! Writes one copied-in volume beside the one that containers see, then swaps it in as kubelet does: first the directory with the new
//! files, then the link `..data` by one rename, then the links to the files, and last it removes the old files. A volume without that
//! layout is a file or directory that containers have mounted: its content is replaced.
//!
//! A file that has not changed is the same file, which takes no memory twice. Paths are opened below the volume's directory, and no
//! link is followed.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use super::claim::VolumeClaim;
use super::error::CopiedInVolumeError;
use nacelle_base::copied_in::{DATA, MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH, MAX_RETURNED};
use nacelle_base::retry::{retry_interrupted, retry_transient};
use nacelle_proto::agent::TreeEntry;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat, renameat};
use nix::sys::stat::{Mode, fchmod, mkdirat};
use nix::unistd::{Gid, Uid, fchown, fchownat, linkat, symlinkat};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The link that is renamed over [`DATA`].
const NEW_DATA: &str = "..data_tmp";

/// A volume that is being written. Dropping it removes what was not swapped in.
#[derive(Debug)]
pub struct VolumeDraft {
    claim: VolumeClaim,
    /// The path of the volume that containers see.
    published: PathBuf,
    /// The path at which the new state is written.
    path: PathBuf,
    root: Option<DraftRoot>,
    /// The path and the descriptor of the last entry's directory.
    last_directory: Option<(Vec<u8>, OwnedFd)>,
    /// The path and the file of which more bytes follow.
    file: Option<(Vec<u8>, File)>,
    /// The name and the descriptor of the directory with the files that containers see now.
    current: Option<(Vec<u8>, OwnedFd)>,
    entries: usize,
    bytes: u64,
}

/// The kind of the volume's own entry.
#[derive(Debug)]
enum DraftRoot {
    Directory(OwnedFd),
    File,
}

fn path_text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &[u8]) -> impl FnOnce(E) -> CopiedInVolumeError + use<E> {
    let path = path_text(path);
    move |error| {
        let source = error.into();
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => CopiedInVolumeError::Full { path },
            Some(libc::EEXIST | libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EXDEV) => {
                CopiedInVolumeError::Order { path }
            }
            _ => CopiedInVolumeError::Write { what, path, source },
        }
    }
}

/// Opens a path below a directory. Links and mounts are not followed.
fn open_beneath(directory: &OwnedFd, path: &[u8], flags: OFlag, mode: u32) -> nix::Result<OwnedFd> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW).resolve(resolve);
    let how = if flags.contains(OFlag::O_CREAT) { how.mode(Mode::from_bits_truncate(mode)) } else { how };
    retry_transient(|| openat2(directory, OsStr::from_bytes(path), how))
}

fn open_directory(path: &Path) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    retry_interrupted(|| open(path, flags, Mode::empty()))
}

/// Opens a regular file. Does not follow a link in its place.
fn open_file(path: &Path, flags: OFlag) -> io::Result<File> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let file = File::from(retry_interrupted(|| open(path, flags, Mode::empty()))?);
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// Returns the last [`MAX_RETURNED`] bytes of a file.
pub(super) fn read_end(path: &Path, name: &str) -> Result<Vec<u8>, CopiedInVolumeError> {
    let mut file = open_file(path, OFlag::O_RDONLY)
        .map_err(|source| CopiedInVolumeError::NoFile { name: name.to_owned(), source })?;
    let length = file.metadata().map_err(failed("inspect", name.as_bytes()))?.len();
    let mut end = Vec::new();
    file.seek(SeekFrom::Start(length.saturating_sub(MAX_RETURNED as u64)))
        .and_then(|_| file.take(MAX_RETURNED as u64).read_to_end(&mut end))
        .map_err(failed("read", name.as_bytes()))?;
    Ok(end)
}

/// Removes a file, a link or a directory with its content. Succeeds if there is none.
pub(super) fn remove_tree(path: &Path) -> Result<(), CopiedInVolumeError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let path = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Err(CopiedInVolumeError::Write { what: "remove", path, source: error })
        }
        _ => Ok(()),
    }
}

/// Whether this is the name of a directory to which [`DATA`] may link.
fn is_data_directory(name: &[u8]) -> bool {
    let other = name != DATA.as_bytes() && name != NEW_DATA.as_bytes();
    name.starts_with(b"..") && name.len() > 2 && other && !name.contains(&b'/')
}

/// Splits the path of an entry into its directory and its name. Rejects paths that are too long or deep or have `.` or `..`.
fn split_path(path: &[u8]) -> Result<(&[u8], &[u8]), CopiedInVolumeError> {
    let invalid = || CopiedInVolumeError::Path { path: path_text(path) };
    let names = || path.split(|byte| *byte == b'/');
    let is_valid = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && !name.contains(&0);
    if path.len() > MAX_PATH || names().count() > MAX_DEPTH || !names().all(is_valid) {
        return Err(invalid());
    }
    match path.iter().rposition(|byte| *byte == b'/') {
        None => Ok((&[], path)),
        Some(at) => Ok((path.get(..at).unwrap_or_default(), path.get(at + 1..).ok_or_else(invalid)?)),
    }
}

impl VolumeDraft {
    /// Begins to write a volume, and removes what a failed attempt has left.
    pub(super) fn begin(volumes: &Path, claim: VolumeClaim) -> Result<VolumeDraft, CopiedInVolumeError> {
        let (published, path) = (volumes.join(&claim.name), volumes.join(format!(".{}", claim.name)));
        remove_tree(&path)?;
        let current = match read_data_link(&published) {
            Some(data) if is_data_directory(&data) => {
                open_directory(&published.join(OsStr::from_bytes(&data))).ok().map(|current| (data, current))
            }
            _ => None,
        };
        let (root, last_directory, file) = (None, None, None);
        Ok(VolumeDraft { claim, published, path, root, last_directory, file, current, entries: 0, bytes: 0 })
    }

    /// Writes the next entries. A directory comes before its entries, and the parts of a file follow each other.
    pub fn add(&mut self, entries: Vec<TreeEntry>) -> Result<(), CopiedInVolumeError> {
        entries.into_iter().try_for_each(|entry| self.add_entry(entry))
    }

    fn add_entry(&mut self, entry: TreeEntry) -> Result<(), CopiedInVolumeError> {
        if entry.mode & libc::S_IFMT == libc::S_IFREG {
            self.bytes += entry.data.len() as u64;
        }
        if self.bytes > MAX_BYTES {
            return Err(CopiedInVolumeError::TooMuch);
        }
        if let Some((path, mut file)) = self.file.take() {
            if path != entry.path {
                return Err(CopiedInVolumeError::Order { path: path_text(&entry.path) });
            }
            file.write_all(&entry.data).map_err(failed("write", &path))?;
            self.file = entry.more.then_some((path, file));
            return Ok(());
        }
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(CopiedInVolumeError::TooMuch);
        }
        if self.root.is_none() {
            return self.add_root(entry);
        }
        let order = || CopiedInVolumeError::Order { path: path_text(&entry.path) };
        let (parent, name) = split_path(&entry.path)?;
        if self.last_directory.as_ref().is_none_or(|(path, _)| path != parent) {
            let Some(DraftRoot::Directory(root)) = &self.root else { return Err(order()) };
            let flags = OFlag::O_DIRECTORY | OFlag::O_PATH;
            let opened = open_beneath(root, if parent.is_empty() { b"." } else { parent }, flags, 0);
            self.last_directory = Some((parent.to_vec(), opened.map_err(failed("find", parent))?));
        }
        let Some((_, at)) = &self.last_directory else { return Err(order()) };
        match entry.mode & libc::S_IFMT {
            libc::S_IFDIR => {
                mkdirat(at, name, Mode::S_IRWXU).map_err(failed("create", &entry.path))?;
                let made = open_beneath(at, name, OFlag::O_DIRECTORY | OFlag::O_RDONLY, 0);
                set_owner_and_mode(&made.map_err(failed("open", &entry.path))?, &entry)
            }
            libc::S_IFLNK => {
                let (uid, gid) = entry_owner(&entry);
                symlinkat(OsStr::from_bytes(&entry.data), at, name)
                    .and_then(|()| fchownat(at, name, uid, gid, AtFlags::AT_SYMLINK_NOFOLLOW))
                    .map_err(failed("link", &entry.path))
            }
            libc::S_IFREG => {
                if self.find_same(&entry).is_some_and(|same| link_file(&same, at, name).is_ok()) {
                    return Ok(());
                }
                let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY;
                let file = open_beneath(at, name, flags, 0o600).map_err(failed("create", &entry.path))?;
                self.write_first(file, entry)
            }
            _ => Err(order()),
        }
    }

    fn add_root(&mut self, entry: TreeEntry) -> Result<(), CopiedInVolumeError> {
        if !entry.path.is_empty() {
            return Err(CopiedInVolumeError::Order { path: path_text(&entry.path) });
        }
        match entry.mode & libc::S_IFMT {
            libc::S_IFDIR => {
                fs::create_dir(&self.path).map_err(failed("create", b"the root"))?;
                let root = open_directory(&self.path).map_err(failed("open", b"the root"))?;
                set_owner_and_mode(&root, &entry)?;
                self.root = Some(DraftRoot::Directory(root));
                Ok(())
            }
            libc::S_IFREG => {
                let file = File::create_new(&self.path).map_err(failed("create", b"the root"))?;
                self.root = Some(DraftRoot::File);
                self.write_first(file.into(), entry)
            }
            _ => Err(CopiedInVolumeError::Order { path: String::new() }),
        }
    }

    /// Writes the first bytes of a file, or all.
    fn write_first(&mut self, file: OwnedFd, entry: TreeEntry) -> Result<(), CopiedInVolumeError> {
        set_owner_and_mode(&file, &entry)?;
        let mut file = File::from(file);
        file.write_all(&entry.data).map_err(failed("write", &entry.path))?;
        self.file = entry.more.then_some((entry.path, file));
        Ok(())
    }

    /// Returns the file that containers see at this path, if it has the same content, mode and owner.
    fn find_same(&self, entry: &TreeEntry) -> Option<OwnedFd> {
        let (_, current) = self.current.as_ref()?;
        let at = entry.path.iter().position(|byte| *byte == b'/')?;
        let first = entry.path.get(..at)?;
        let path = entry.path.get(at + 1..)?;
        if entry.more || !is_data_directory(first) {
            return None;
        }
        let file = File::from(open_beneath(current, path, OFlag::O_RDONLY | OFlag::O_NONBLOCK, 0).ok()?);
        let metadata = file.metadata().ok()?;
        let numbers = (metadata.mode(), metadata.uid(), metadata.gid(), metadata.len());
        if numbers != (entry.mode, entry.uid, entry.gid, entry.data.len() as u64) {
            return None;
        }
        let mut bytes = Vec::with_capacity(entry.data.len());
        (&file).take(entry.data.len() as u64).read_to_end(&mut bytes).ok()?;
        (bytes == entry.data).then(|| file.into())
    }

    /// Swaps the volume in, so that containers see it.
    pub fn publish(mut self) -> Result<(), CopiedInVolumeError> {
        if self.root.is_none() || self.file.is_some() {
            return Err(CopiedInVolumeError::Short { name: self.claim.name.clone() });
        }
        self.last_directory = None;
        match fs::symlink_metadata(&self.published) {
            Err(_nothing_there) => {
                if let Some(data) = read_data_link(&self.path)
                    && !self.path.join(OsStr::from_bytes(&data)).is_dir()
                {
                    return Err(CopiedInVolumeError::NoData { name: self.claim.name.clone() });
                }
                fs::rename(&self.path, &self.published).map_err(failed("publish", self.claim.name.as_bytes()))
            }
            Ok(_) => match (read_data_link(&self.path), read_data_link(&self.published)) {
                (Some(data), Some(_)) if is_data_directory(&data) => self.replace_published(&data),
                (None, None) => self.replace_content(),
                _ => Err(self.exists()),
            },
        }
    }

    /// Replaces the content of a file or directory without kubelet's layout, which containers may have mounted.
    fn replace_content(&self) -> Result<(), CopiedInVolumeError> {
        let name = self.claim.name.as_bytes();
        let written = match &self.root {
            Some(DraftRoot::Directory(written)) => written.try_clone(),
            _ => open_file(&self.path, OFlag::O_RDONLY).map(OwnedFd::from),
        };
        let written = File::from(written.map_err(failed("open", name))?);
        let metadata = written.metadata().map_err(failed("inspect", name))?;
        let kind = fs::symlink_metadata(&self.published).map_err(failed("inspect", name))?.file_type();
        if kind != metadata.file_type() {
            return Err(self.exists());
        }
        let published = if metadata.is_dir() {
            let published = open_directory(&self.published).map_err(failed("open", name))?;
            for old in list_names(&self.published)? {
                remove_tree(&self.published.join(old))?;
            }
            for new in list_names(&self.path)? {
                let (from, to) = (self.path.join(&new), self.published.join(&new));
                fs::rename(from, to).map_err(failed("publish", new.as_bytes()))?;
            }
            published
        } else {
            let mut published = open_file(&self.published, OFlag::O_WRONLY).map_err(failed("open", name))?;
            published.set_len(0).map_err(failed("write", name))?;
            io::copy(&mut &written, &mut published).map_err(failed("write", name))?;
            published.into()
        };
        let entry = TreeEntry { mode: metadata.mode(), uid: metadata.uid(), gid: metadata.gid(), ..Default::default() };
        set_owner_and_mode(&published, &entry)
    }

    fn exists(&self) -> CopiedInVolumeError {
        CopiedInVolumeError::Exists { name: self.claim.name.clone() }
    }

    /// Replaces what containers see by what was written.
    fn replace_published(&self, data: &[u8]) -> Result<(), CopiedInVolumeError> {
        let (new, published) = (&self.path, &self.published);
        let at = |what, name: &OsStr| failed::<io::Error>(what, name.as_bytes());
        let name = OsStr::from_bytes(data);
        let unchanged = self.current.as_ref().is_some_and(|(current, _)| current == data);
        if !unchanged {
            if !new.join(name).is_dir() {
                return Err(CopiedInVolumeError::NoData { name: self.claim.name.clone() });
            }
            remove_tree(&published.join(name))?;
            fs::rename(new.join(name), published.join(name)).map_err(at("publish", name))?;
            remove_tree(&published.join(NEW_DATA))?;
            std::os::unix::fs::symlink(name, published.join(NEW_DATA)).map_err(at("link", name))?;
            fs::rename(published.join(NEW_DATA), published.join(DATA)).map_err(at("link", name))?;
        }
        let mut kept = BTreeSet::from([OsString::from(DATA), name.to_owned()]);
        for link in list_names(new)? {
            if kept.contains(&link) {
                continue;
            }
            let [old_target, new_target] = [published, new].map(|directory| fs::read_link(directory.join(&link)).ok());
            if new_target.is_some() && new_target != old_target {
                renameat(AT_FDCWD, &new.join(&link), AT_FDCWD, &published.join(&link))
                    .map_err(|error| at("publish", &link)(error.into()))?;
            }
            kept.insert(link);
        }
        for obsolete in list_names(published)?.difference(&kept) {
            remove_tree(&published.join(obsolete))?;
        }
        if let Some(DraftRoot::Directory(written)) = &self.root {
            let written = File::from(written.try_clone().map_err(at("open", name))?);
            let metadata = written.metadata().map_err(at("inspect", name))?;
            let root = open_directory(published).map_err(failed("open", b"the root"))?;
            let entry =
                TreeEntry { mode: metadata.mode(), uid: metadata.uid(), gid: metadata.gid(), ..Default::default() };
            set_owner_and_mode(&root, &entry)?;
        }
        Ok(())
    }
}

impl Drop for VolumeDraft {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.path) {
            tracing::warn!("cannot remove an incomplete volume: {}", nacelle_base::Chain(&error));
        }
    }
}

fn list_names(path: &Path) -> Result<BTreeSet<OsString>, CopiedInVolumeError> {
    let names = fs::read_dir(path).and_then(|names| names.map(|name| Ok(name?.file_name())).collect());
    names.map_err(failed::<io::Error>("list", b"the root"))
}

/// Returns the target of the link [`DATA`] of a volume, if it has one.
fn read_data_link(volume: &Path) -> Option<Vec<u8>> {
    let volume = open_directory(volume).ok()?;
    readlinkat(&volume, DATA).ok().map(OsStringExt::into_vec)
}

fn entry_owner(entry: &TreeEntry) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)))
}

/// Sets the owner, then the permissions, of which a change of the owner may clear some.
fn set_owner_and_mode(what: &OwnedFd, entry: &TreeEntry) -> Result<(), CopiedInVolumeError> {
    let (uid, gid) = entry_owner(entry);
    let result = fchown(what, uid, gid);
    let result = result.and_then(|()| fchmod(what, Mode::from_bits_truncate(entry.mode & 0o7777)));
    result.map_err(failed("set the owner of", &entry.path))
}

/// Links an open file to a further name.
fn link_file(file: &OwnedFd, directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    linkat(file, "", directory, name, AtFlags::AT_EMPTY_PATH)
}
