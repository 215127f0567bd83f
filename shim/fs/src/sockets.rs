//! Lists the UNIX sockets of a socket volume, and connects to them. The directory is not trusted: it may contain links that lead
//! out of it, and may change at any time. Nothing is created, and no call waits for a server.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use crate::volume_reader::VolumeReadError;
use nacelle_base::copied_in::MAX_ENTRIES;
use nacelle_base::guest_warn;
use nacelle_base::retry::{retry_interrupted, retry_transient};
use nacelle_base::sockets::{MAX_SOCKETS, SocketClient, is_name};
use nacelle_proto::agent::TreeEntry;
use nix::unistd::{chdir, fchdir};
use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{SocketAddrUnix, connect};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use virtiofsd::passthrough::credentials::UnixCredentials;
use virtiofsd::soft_idmap::{HostGid, HostUid};

/// How sockets are opened: a descriptor of this kind gives no access to the server.
const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn read_error(what: &'static str, path: &str) -> impl FnOnce(Errno) -> VolumeReadError {
    let path = path.to_owned();
    move |error| VolumeReadError::Read { what, path, source: error.into() }
}

fn is_socket(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Socket
}

fn entry(path: &[u8], stat: &Stat) -> TreeEntry {
    TreeEntry { path: path.to_vec(), mode: stat.st_mode, uid: stat.st_uid, gid: stat.st_gid, ..TreeEntry::default() }
}

/// Opens a socket of the directory; follows no link and crosses no mount. Returns `None` for anything else.
fn open_socket(directory: BorrowedFd, name: &[u8]) -> Result<Option<(OwnedFd, Stat)>, Errno> {
    let resolve =
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    match retry_transient(|| openat2(directory, OsStr::from_bytes(name), PATH_ONLY, Mode::empty(), resolve)) {
        // The entry is gone, or it is a link or a mount point.
        Err(Errno::NOENT | Errno::LOOP | Errno::XDEV) => Ok(None),
        Err(error) => Err(error),
        Ok(socket) => {
            let stat = fstat(&socket)?;
            Ok(is_socket(&stat).then_some((socket, stat)))
        }
    }
}

/// Returns the volume itself and its sockets, sorted by name: at most [`MAX_SOCKETS`], the first ones.
pub(crate) fn list_sockets(root: BorrowedFd) -> Result<Vec<TreeEntry>, VolumeReadError> {
    const ROOT: &str = "the volume itself";
    let stat = fstat(root).map_err(read_error("inspect", ROOT))?;
    let mut entries = vec![entry(&[], &stat)];
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Socket => return Ok(entries),
        FileType::Directory => {}
        _ => {
            let what = "neither a directory nor a socket";
            return Err(VolumeReadError::UnsupportedEntry { path: ROOT.to_owned(), what });
        }
    }
    // The volume's own descriptor is for its path only.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = retry_interrupted(|| openat(root, ".", flags, Mode::empty())).map_err(read_error("open", ROOT))?;
    let mut names = Vec::new();
    for (number, found) in Dir::new(directory).map_err(read_error("list", ROOT))?.enumerate() {
        if number >= MAX_ENTRIES {
            return Err(VolumeReadError::TooManyEntries);
        }
        let found = found.map_err(read_error("list", ROOT))?;
        let name = found.file_name().to_bytes();
        if matches!(found.file_type(), FileType::Socket | FileType::Unknown) && is_name(name) {
            names.push(name.to_vec());
        }
    }
    names.sort_unstable();
    for name in names {
        if entries.len() > MAX_SOCKETS {
            guest_warn!("a socket volume has more than {MAX_SOCKETS} sockets; the guest has the first ones by name");
            break;
        }
        match open_socket(root, &name) {
            Ok(Some((_, stat))) => entries.push(entry(&name, &stat)),
            Ok(None) => {}
            Err(error) => {
                guest_warn!("cannot open the socket {:?} of a volume: {error}", String::from_utf8_lossy(&name));
            }
        }
    }
    Ok(entries)
}

/// Connects `socket` to the socket `name` of a volume; with an empty name the volume is a socket itself. `own_fds` is this process's
/// `/proc/self/fd`. The server sees the user and the group of `client`, whose permissions the guest's kernel has checked. Fails with
/// `WouldBlock` if the server's queue is full.
pub(crate) fn connect_to(
    root: BorrowedFd,
    name: &[u8],
    client: SocketClient,
    socket: &OwnedFd,
    own_fds: BorrowedFd,
) -> io::Result<()> {
    let opened;
    let target = if name.is_empty() {
        if !is_socket(&fstat(root)?) {
            return Err(io::ErrorKind::NotFound.into());
        }
        root
    } else {
        if !is_name(name) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        opened = open_socket(root, name)?.ok_or(io::ErrorKind::NotFound)?.0;
        opened.as_fd()
    };
    // A socket that waits would hold up all other requests of the guest.
    ioctl_fionbio(socket, true)?;
    // An address names a socket by a path only. In this directory that is the number of its descriptor, of whatever length its own path
    // is, and no other process can replace it.
    let address = SocketAddrUnix::new(target.as_raw_fd().to_string())?;
    fchdir(own_fds)?;
    let credentials = UnixCredentials::new(HostUid::from(client.uid()), HostGid::from(client.gid()));
    // With the capability for files of others: the supplementary groups of the client are not known here.
    let connected = credentials.supplementary_gid(false, Vec::new()).set().and_then(|guard| {
        let connected = retry_interrupted(|| connect(socket, &address));
        drop(guard);
        Ok(connected?)
    });
    chdir("/")?;
    connected
}

#[cfg(test)]
#[path = "sockets_tests.rs"]
mod tests;
