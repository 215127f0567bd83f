//! Owns: the writing of one volume: beside what containers see, entry by entry; then shown as a whole, in the way in which
//! kubelet changes it: the folder with the new files first, then the link to it by one rename, then the links to its files.
//! The old files go last. A file that is as it was is the same file, and takes no memory twice.
//! May use: descriptors below the volumes' folder; no link is followed.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use super::busy::VolumeClaim;
use super::error::PushError;
use nacelle_base::push::{DATA, MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH};
use nacelle_base::retry::{retry_interrupted, retry_transient};
use nacelle_proto::agent::TreeEntry;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat, renameat};
use nix::sys::stat::{Mode, fchmod, mkdirat};
use nix::unistd::{Gid, Uid, fchown, fchownat, linkat, symlinkat};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The link that is renamed over [`DATA`].
const NEW_DATA: &str = "..data_tmp";

/// A volume that is being written. What is not shown is removed when it is dropped.
#[derive(Debug)]
pub struct Draft {
    claim: VolumeClaim,
    /// Where containers see it.
    shown: PathBuf,
    /// Where it is written.
    path: PathBuf,
    root: Option<Root>,
    /// The folder to which the last entry belonged.
    last: Option<(Vec<u8>, OwnedFd)>,
    /// The file of which more bytes come.
    file: Option<(Vec<u8>, File)>,
    /// The files that containers see now.
    old: Option<(Vec<u8>, OwnedFd)>,
    entries: usize,
    bytes: u64,
}

/// What the volume itself is.
#[derive(Debug)]
enum Root {
    Folder(OwnedFd),
    File,
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &[u8]) -> impl FnOnce(E) -> PushError + use<E> {
    let path = shown(path);
    move |error| {
        let source = error.into();
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => PushError::Full { path },
            Some(libc::EEXIST | libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EXDEV) => PushError::Order { path },
            _ => PushError::Write { what, path, source },
        }
    }
}

fn beneath(folder: &OwnedFd, path: &[u8], flags: OFlag, mode: u32) -> nix::Result<OwnedFd> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW).resolve(resolve);
    let how = if flags.contains(OFlag::O_CREAT) { how.mode(Mode::from_bits_truncate(mode)) } else { how };
    retry_transient(|| openat2(folder, OsStr::from_bytes(path), how))
}

fn folder(path: &Path) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    retry_interrupted(|| open(path, flags, Mode::empty()))
}

/// Removes what is there, whatever it is; nothing is no failure.
pub(super) fn remove(path: &Path) -> Result<(), PushError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let path = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Err(PushError::Write { what: "remove", path, source: error })
        }
        _ => Ok(()),
    }
}

/// Whether this is the name of a folder that [`DATA`] may lead to.
fn is_data_folder(name: &[u8]) -> bool {
    let other = name != DATA.as_bytes() && name != NEW_DATA.as_bytes();
    name.starts_with(b"..") && name.len() > 2 && other && !name.contains(&b'/')
}

/// The folder of an entry and its name in it.
fn split(path: &[u8]) -> Result<(&[u8], &[u8]), PushError> {
    let bad = || PushError::Path { path: shown(path) };
    let names = || path.split(|byte| *byte == b'/');
    let good = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && !name.contains(&0);
    if path.len() > MAX_PATH || names().count() > MAX_DEPTH || !names().all(good) {
        return Err(bad());
    }
    match path.iter().rposition(|byte| *byte == b'/') {
        None => Ok((&[], path)),
        Some(at) => Ok((path.get(..at).unwrap_or_default(), path.get(at + 1..).ok_or_else(bad)?)),
    }
}

impl Draft {
    pub(super) fn begin(volumes: &Path, claim: VolumeClaim) -> Result<Draft, PushError> {
        let (shown, path) = (volumes.join(&claim.name), volumes.join(format!(".{}", claim.name)));
        remove(&path)?;
        let old = match readlink_of(&shown) {
            Some(data) if is_data_folder(&data) => {
                folder(&shown.join(OsStr::from_bytes(&data))).ok().map(|old| (data, old))
            }
            _ => None,
        };
        let (root, last, file) = (None, None, None);
        Ok(Draft { claim, shown, path, root, last, file, old, entries: 0, bytes: 0 })
    }

    /// Writes what comes next.
    pub fn add(&mut self, entries: Vec<TreeEntry>) -> Result<(), PushError> {
        entries.into_iter().try_for_each(|entry| self.add_one(entry))
    }

    fn add_one(&mut self, entry: TreeEntry) -> Result<(), PushError> {
        if entry.mode & libc::S_IFMT == libc::S_IFREG {
            self.bytes += entry.data.len() as u64;
        }
        if self.bytes > MAX_BYTES {
            return Err(PushError::TooMuch);
        }
        if let Some((path, mut file)) = self.file.take() {
            if path != entry.path {
                return Err(PushError::Order { path: shown(&entry.path) });
            }
            file.write_all(&entry.data).map_err(failed("write", &path))?;
            self.file = entry.more.then_some((path, file));
            return Ok(());
        }
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(PushError::TooMuch);
        }
        if self.root.is_none() {
            return self.add_root(entry);
        }
        let order = || PushError::Order { path: shown(&entry.path) };
        let (parent, name) = split(&entry.path)?;
        if self.last.as_ref().is_none_or(|(path, _)| path != parent) {
            let Some(Root::Folder(root)) = &self.root else { return Err(order()) };
            let flags = OFlag::O_DIRECTORY | OFlag::O_PATH;
            let opened = beneath(root, if parent.is_empty() { b"." } else { parent }, flags, 0);
            self.last = Some((parent.to_vec(), opened.map_err(failed("find", parent))?));
        }
        let Some((_, at)) = &self.last else { return Err(order()) };
        match entry.mode & libc::S_IFMT {
            libc::S_IFDIR => {
                mkdirat(at, name, Mode::S_IRWXU).map_err(failed("make", &entry.path))?;
                let made = beneath(at, name, OFlag::O_DIRECTORY | OFlag::O_RDONLY, 0);
                give(&made.map_err(failed("open", &entry.path))?, &entry)
            }
            libc::S_IFLNK => {
                let (uid, gid) = owner(&entry);
                symlinkat(OsStr::from_bytes(&entry.data), at, name)
                    .and_then(|()| fchownat(at, name, uid, gid, AtFlags::AT_SYMLINK_NOFOLLOW))
                    .map_err(failed("link", &entry.path))
            }
            libc::S_IFREG => {
                if self.same(&entry).is_some_and(|same| link(&same, at, name).is_ok()) {
                    return Ok(());
                }
                let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY;
                let file = beneath(at, name, flags, 0o600).map_err(failed("make", &entry.path))?;
                self.write(file, entry)
            }
            _ => Err(order()),
        }
    }

    fn add_root(&mut self, entry: TreeEntry) -> Result<(), PushError> {
        if !entry.path.is_empty() {
            return Err(PushError::Order { path: shown(&entry.path) });
        }
        match entry.mode & libc::S_IFMT {
            libc::S_IFDIR => {
                fs::create_dir(&self.path).map_err(failed("make", b"the root"))?;
                let root = folder(&self.path).map_err(failed("open", b"the root"))?;
                give(&root, &entry)?;
                self.root = Some(Root::Folder(root));
                Ok(())
            }
            libc::S_IFREG => {
                let file = File::create_new(&self.path).map_err(failed("make", b"the root"))?;
                self.root = Some(Root::File);
                self.write(file.into(), entry)
            }
            _ => Err(PushError::Order { path: String::new() }),
        }
    }

    /// Writes the first bytes of a file, or all.
    fn write(&mut self, file: OwnedFd, entry: TreeEntry) -> Result<(), PushError> {
        give(&file, &entry)?;
        let mut file = File::from(file);
        file.write_all(&entry.data).map_err(failed("write", &entry.path))?;
        self.file = entry.more.then_some((entry.path, file));
        Ok(())
    }

    /// The file that containers see at this path, if it is just this one.
    fn same(&self, entry: &TreeEntry) -> Option<OwnedFd> {
        let (_, old) = self.old.as_ref()?;
        let at = entry.path.iter().position(|byte| *byte == b'/')?;
        let first = entry.path.get(..at)?;
        let path = entry.path.get(at + 1..)?;
        if entry.more || !is_data_folder(first) {
            return None;
        }
        let file = File::from(beneath(old, path, OFlag::O_RDONLY | OFlag::O_NONBLOCK, 0).ok()?);
        let there = file.metadata().ok()?;
        let numbers = (there.mode(), there.uid(), there.gid(), there.len());
        if numbers != (entry.mode, entry.uid, entry.gid, entry.data.len() as u64) {
            return None;
        }
        let mut bytes = Vec::with_capacity(entry.data.len());
        (&file).take(entry.data.len() as u64).read_to_end(&mut bytes).ok()?;
        (bytes == entry.data).then(|| file.into())
    }

    /// Shows it to containers.
    pub fn show(mut self) -> Result<(), PushError> {
        if self.root.is_none() || self.file.is_some() {
            return Err(PushError::Short { name: self.claim.name.clone() });
        }
        self.last = None;
        match fs::symlink_metadata(&self.shown) {
            Err(_nothing_there) => {
                if let Some(data) = readlink_of(&self.path)
                    && !self.path.join(OsStr::from_bytes(&data)).is_dir()
                {
                    return Err(PushError::NoData { name: self.claim.name.clone() });
                }
                fs::rename(&self.path, &self.shown).map_err(failed("show", self.claim.name.as_bytes()))
            }
            Ok(_) => match (readlink_of(&self.path), readlink_of(&self.shown)) {
                (Some(data), Some(_)) if is_data_folder(&data) => self.change(&data),
                // A copy that was pushed before, whose answer was lost.
                (None, None) => Ok(()),
                _ => Err(PushError::There { name: self.claim.name.clone() }),
            },
        }
    }

    /// From what containers see to what was written.
    fn change(&self, data: &[u8]) -> Result<(), PushError> {
        let (new, old) = (&self.path, &self.shown);
        let at = |what, name: &OsStr| failed::<io::Error>(what, name.as_bytes());
        let name = OsStr::from_bytes(data);
        let current = self.old.as_ref().is_some_and(|(current, _)| current == data);
        if !current {
            if !new.join(name).is_dir() {
                return Err(PushError::NoData { name: self.claim.name.clone() });
            }
            remove(&old.join(name))?;
            fs::rename(new.join(name), old.join(name)).map_err(at("show", name))?;
            remove(&old.join(NEW_DATA))?;
            std::os::unix::fs::symlink(name, old.join(NEW_DATA)).map_err(at("link", name))?;
            fs::rename(old.join(NEW_DATA), old.join(DATA)).map_err(at("link", name))?;
        }
        let mut kept = BTreeSet::from([OsString::from(DATA), name.to_owned()]);
        for link in names(new)? {
            if kept.contains(&link) {
                continue;
            }
            let [there, here] = [old, new].map(|folder| fs::read_link(folder.join(&link)).ok());
            if here.is_some() && here != there {
                renameat(AT_FDCWD, &new.join(&link), AT_FDCWD, &old.join(&link))
                    .map_err(|error| at("show", &link)(error.into()))?;
            }
            kept.insert(link);
        }
        for gone in names(old)?.difference(&kept) {
            remove(&old.join(gone))?;
        }
        if let Some(Root::Folder(written)) = &self.root {
            let written = File::from(written.try_clone().map_err(at("open", name))?);
            let metadata = written.metadata().map_err(at("look at", name))?;
            let shown = folder(old).map_err(failed("open", b"the root"))?;
            let entry =
                TreeEntry { mode: metadata.mode(), uid: metadata.uid(), gid: metadata.gid(), ..Default::default() };
            give(&shown, &entry)?;
        }
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            tracing::warn!("half of a volume stays: {}", nacelle_base::Chain(&error));
        }
    }
}

fn names(path: &Path) -> Result<BTreeSet<OsString>, PushError> {
    let names = fs::read_dir(path).and_then(|names| names.map(|name| Ok(name?.file_name())).collect());
    names.map_err(failed::<io::Error>("list", b"the root"))
}

/// Where the [`DATA`] of a folder leads, if it has one.
fn readlink_of(volume: &Path) -> Option<Vec<u8>> {
    let volume = folder(volume).ok()?;
    readlinkat(&volume, DATA).ok().map(OsStringExt::into_vec)
}

fn owner(entry: &TreeEntry) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)))
}

/// Gives what is open its owner, then its permissions, which a change of the owner would take away.
fn give(what: &OwnedFd, entry: &TreeEntry) -> Result<(), PushError> {
    let (uid, gid) = owner(entry);
    let given = fchown(what, uid, gid);
    let given = given.and_then(|()| fchmod(what, Mode::from_bits_truncate(entry.mode & 0o7777)));
    given.map_err(failed("give away", &entry.path))
}

/// Gives a file a further name.
fn link(file: &OwnedFd, folder: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    linkat(file, "", folder, name, AtFlags::AT_EMPTY_PATH)
}
