//! Creates the sockets of socket volumes: for each UNIX socket that a volume has on the node, one that listens in the guest. What connects
//! is relayed to the node (`relay`).
//!
//! Containers see the directory of a volume read-only, but one with many capabilities can change it all the same, so nothing in it is
//! opened by name: a socket is created beside it and renamed.

mod error;
mod relay;

pub use error::SocketVolumeError;

use nacelle_base::retry::retry_interrupted;
use nacelle_base::sockets::{DIRECTORY, MAX_CONNECTIONS, MAX_SOCKETS, SINGLE, SocketToken, is_name};
use nacelle_proto::agent::TreeEntry;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, open, renameat};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{Gid, Uid, UnlinkatFlags, chown, fchown, unlinkat};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

/// Options of the tmpfs of all volumes. Sockets take inodes and no space.
const TMPFS_OPTIONS: &str = "mode=755,size=1m,nr_inodes=16384";
/// The directory, beside the volumes, in which sockets are created. No volume can have this name.
const DRAFTS: &str = ".new";
/// The bits of a mode that a socket or directory gets.
const PERMISSIONS: u32 = 0o7777;

/// Mode and owner of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketAccess {
    mode: u32,
    uid: u32,
    gid: u32,
}

impl SocketAccess {
    fn of(entry: &TreeEntry) -> SocketAccess {
        SocketAccess { mode: entry.mode & PERMISSIONS, uid: entry.uid, gid: entry.gid }
    }
}

/// A socket that listens. Dropping it ends that; connections continue.
#[derive(Debug)]
struct ListeningSocket {
    access: SocketAccess,
    accepting: AbortHandle,
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

#[derive(Debug)]
struct GuestSocketVolume {
    token: SocketToken,
    directory: OwnedFd,
    sockets: BTreeMap<Vec<u8>, ListeningSocket>,
}

/// The volumes by their names, behind one lock: requests are few and short.
#[derive(Debug, Default)]
struct VolumeTable {
    is_mounted: bool,
    drafts: u64,
    volumes: BTreeMap<String, GuestSocketVolume>,
}

/// The socket volumes of the pod.
#[derive(Debug)]
pub struct GuestSockets {
    directory: PathBuf,
    table: Mutex<VolumeTable>,
    connections: Arc<Semaphore>,
}

impl Default for GuestSockets {
    fn default() -> GuestSockets {
        GuestSockets::in_directory(DIRECTORY.into(), false)
    }
}

/// The checked content of a volume.
struct VolumeContent<'a> {
    /// Mode and owner of the directory.
    access: SocketAccess,
    sockets: BTreeMap<&'a [u8], SocketAccess>,
    /// The volume is a socket itself.
    is_single: bool,
}

fn check_content(entries: &[TreeEntry]) -> Result<VolumeContent<'_>, SocketVolumeError> {
    let kind = |entry: &TreeEntry| entry.mode & libc::S_IFMT;
    let (root, sockets) =
        entries.split_first().filter(|(root, _)| root.path.is_empty()).ok_or(SocketVolumeError::Content)?;
    if kind(root) == libc::S_IFSOCK && sockets.is_empty() {
        let access = SocketAccess { mode: 0o755, uid: 0, gid: 0 };
        let sockets = [(SINGLE.as_bytes(), SocketAccess::of(root))].into();
        return Ok(VolumeContent { access, sockets, is_single: true });
    }
    let is_valid = |entry: &TreeEntry| kind(entry) == libc::S_IFSOCK && is_name(&entry.path);
    if kind(root) != libc::S_IFDIR || sockets.len() > MAX_SOCKETS || !sockets.iter().all(is_valid) {
        return Err(SocketVolumeError::Content);
    }
    let sockets = sockets.iter().map(|entry| (entry.path.as_slice(), SocketAccess::of(entry))).collect();
    Ok(VolumeContent { access: SocketAccess::of(root), sockets, is_single: false })
}

fn failed<E: Into<io::Error>>(what: &'static str, name: &str) -> impl FnOnce(E) -> SocketVolumeError + use<E> {
    let name = name.to_owned();
    move |error| SocketVolumeError::Io { what, name, source: error.into() }
}

impl GuestSockets {
    fn in_directory(directory: PathBuf, is_mounted: bool) -> GuestSockets {
        let table = Mutex::new(VolumeTable { is_mounted, ..VolumeTable::default() });
        GuestSockets { directory, table, connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)) }
    }

    fn lock(&self) -> MutexGuard<'_, VolumeTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the volume, or changes it so that it has these sockets: those that stay the same keep listening. Without entries, removes
    /// it. A volume with another token is an older one of that name: it is replaced, and not removed by a late request for an older one.
    /// Must be called inside a runtime, on a thread where it may block.
    pub fn set(&self, name: &str, token: &[u8], entries: &[TreeEntry]) -> Result<(), SocketVolumeError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !(1..=128).contains(&name.len()) || name.starts_with('.') || !name.chars().all(is_plain) {
            return Err(SocketVolumeError::Name { name: name.chars().take(140).collect() });
        }
        let token = SocketToken::from_slice(token).ok_or(SocketVolumeError::Content)?;
        let content = if entries.is_empty() { None } else { Some(check_content(entries)?) };
        let mut table = self.lock();
        let is_same = table.volumes.get(name).map(|volume| volume.token == token);
        let Some(content) = content else {
            return if is_same == Some(true) { self.remove(&mut table, name) } else { Ok(()) };
        };
        if is_same == Some(false) {
            self.remove(&mut table, name)?;
        }
        self.mount_once(&mut table, name)?;
        let VolumeTable { drafts, volumes, .. } = &mut *table;
        let volume = match volumes.entry(name.to_owned()) {
            Entry::Occupied(volume) => volume.into_mut(),
            Entry::Vacant(place) => {
                let directory = self.create_directory(name)?;
                place.insert(GuestSocketVolume { token, directory, sockets: BTreeMap::new() })
            }
        };
        self.set_sockets(volume, name, &content, drafts)
    }

    fn mount_once(&self, table: &mut VolumeTable, name: &str) -> Result<(), SocketVolumeError> {
        if !table.is_mounted {
            fs::create_dir_all(&self.directory).map_err(failed("create the directory of", name))?;
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            mount(Some("sockets"), &self.directory, Some("tmpfs"), flags, Some(TMPFS_OPTIONS))
                .map_err(failed("mount a tmpfs for", name))?;
            table.is_mounted = true;
        }
        match DirBuilder::new().mode(0o700).create(self.directory.join(DRAFTS)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(failed("create the directory of", name)(error))
            }
            _ => Ok(()),
        }
    }

    fn create_directory(&self, name: &str) -> Result<OwnedFd, SocketVolumeError> {
        let path = self.directory.join(name);
        DirBuilder::new().mode(0o700).create(&path).map_err(failed("create", name))?;
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
        retry_interrupted(|| open(&path, flags, Mode::empty())).map_err(failed("open", name))
    }

    fn set_sockets(
        &self,
        volume: &mut GuestSocketVolume,
        name: &str,
        content: &VolumeContent<'_>,
        drafts: &mut u64,
    ) -> Result<(), SocketVolumeError> {
        let gone = |socket: &[u8]| !content.sockets.contains_key(socket);
        for socket in volume.sockets.keys().filter(|socket| gone(socket)) {
            match unlinkat(&volume.directory, OsStr::from_bytes(socket), UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(error) => return Err(failed("remove a socket of", name)(error)),
            }
        }
        volume.sockets.retain(|socket, _| !gone(socket));
        for (socket, access) in &content.sockets {
            if volume.sockets.get(*socket).is_some_and(|listening| listening.access == *access) {
                continue;
            }
            *drafts += 1;
            let draft = self.directory.join(DRAFTS).join(drafts.to_string());
            let target = if content.is_single { Vec::new() } else { socket.to_vec() };
            let created = self.listen(&draft, *access).and_then(|listener| {
                renameat(AT_FDCWD, &draft, &volume.directory, OsStr::from_bytes(socket))?;
                relay::start(listener, volume.token, target, Arc::clone(&self.connections))
            });
            let accepting = created.map_err(|error| {
                // The caller needs the first error.
                let _ = fs::remove_file(&draft);
                failed("create a socket of", name)(error)
            })?;
            volume.sockets.insert(socket.to_vec(), ListeningSocket { access: *access, accepting });
        }
        let SocketAccess { mode, uid, gid } = content.access;
        fchown(&volume.directory, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
            .and_then(|()| fchmod(&volume.directory, Mode::from_bits_truncate(mode)))
            .map_err(failed("set the owner of", name))
    }

    /// Listens on a new socket with this mode and owner.
    fn listen(&self, path: &PathBuf, access: SocketAccess) -> io::Result<UnixListener> {
        let listener = UnixListener::bind(path)?;
        chown(path, Some(Uid::from_raw(access.uid)), Some(Gid::from_raw(access.gid)))?;
        fs::set_permissions(path, Permissions::from_mode(access.mode))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    fn remove(&self, table: &mut VolumeTable, name: &str) -> Result<(), SocketVolumeError> {
        table.volumes.remove(name);
        fs::remove_dir_all(self.directory.join(name)).map_err(failed("remove", name))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
