//! Tests the sockets of a volume on real directories.

use super::*;
use rustix::fs::open;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The tests run in one process, which has one working directory.
static WORKING_DIRECTORY: Mutex<()> = Mutex::new(());

fn open_path(path: &Path) -> OwnedFd {
    open(path, PATH_ONLY, Mode::empty()).unwrap()
}

fn names(root: &OwnedFd) -> Vec<String> {
    let entries = list_sockets(root.as_fd()).unwrap();
    assert_eq!(entries[0].path, b"");
    entries[1..].iter().map(|entry| String::from_utf8(entry.path.clone()).unwrap()).collect()
}

fn try_connect(root: &OwnedFd, name: &[u8]) -> io::Result<UnixStream> {
    connect_as(root, name, SocketClient::new(0, 0).unwrap())
}

fn connect_as(root: &OwnedFd, name: &[u8], client: SocketClient) -> io::Result<UnixStream> {
    let own_fds = open_path(Path::new("/proc/self/fd"));
    // Blocking, as a hostile pod process may send it.
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    {
        let _guard = WORKING_DIRECTORY.lock().unwrap_or_else(PoisonError::into_inner);
        connect_to(root.as_fd(), name, client, &socket, own_fds.as_fd())?;
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[test]
fn only_sockets_of_the_directory_itself_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("volume");
    fs::create_dir_all(volume.join("below")).unwrap();
    let _listeners = ["b.sock", "a.sock", "below/deep.sock"].map(|name| UnixListener::bind(volume.join(name)).unwrap());
    let _outside = UnixListener::bind(dir.path().join("outside.sock")).unwrap();
    fs::write(volume.join("file"), "").unwrap();
    symlink("../outside.sock", volume.join("link.sock")).unwrap();
    symlink("a.sock", volume.join("near.sock")).unwrap();
    fs::set_permissions(volume.join("a.sock"), Permissions::from_mode(0o640)).unwrap();
    let root = open_path(&volume);
    assert_eq!(names(&root), ["a.sock", "b.sock"]);
    let listed = list_sockets(root.as_fd()).unwrap();
    assert_eq!(listed[1].mode, libc::S_IFSOCK | 0o640);
    assert_eq!((listed[1].uid, listed[1].gid), (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw()));
    let file = open_path(&volume.join("file"));
    assert!(matches!(list_sockets(file.as_fd()), Err(VolumeReadError::UnsupportedEntry { .. })));
}

#[test]
fn the_first_sockets_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<String> = (0..MAX_SOCKETS + 2).map(|number| format!("{number:03}")).collect();
    let _listeners: Vec<_> = all.iter().map(|name| UnixListener::bind(dir.path().join(name)).unwrap()).collect();
    assert_eq!(names(&open_path(dir.path())), all[..MAX_SOCKETS]);
}

#[test]
fn bytes_reach_the_server_and_nothing_outside_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    // Longer than the path of an address may be.
    let volume = dir.path().join("v".repeat(200));
    fs::create_dir(&volume).unwrap();
    let listener = {
        let _guard = WORKING_DIRECTORY.lock().unwrap_or_else(PoisonError::into_inner);
        std::env::set_current_dir(&volume).unwrap();
        let listener = UnixListener::bind("server.sock").unwrap();
        std::env::set_current_dir("/").unwrap();
        listener
    };
    symlink("server.sock", volume.join("link.sock")).unwrap();
    fs::write(volume.join("file"), "").unwrap();
    let _outside = UnixListener::bind(dir.path().join("outside.sock")).unwrap();
    let root = open_path(&volume);
    let mut near = try_connect(&root, b"server.sock").unwrap();
    let (mut far, _) = listener.accept().unwrap();
    near.write_all(b"ping").unwrap();
    near.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    far.read_to_string(&mut text).unwrap();
    assert_eq!(text, "ping");
    for name in [&b"../outside.sock"[..], b"..", b".", b"/", b"link.sock", b"file", b"none", b"", b"a\0b", &[b'n'; 300]]
    {
        assert!(try_connect(&root, name).is_err(), "{name:?}");
    }
    // The volume may be a socket itself. When the server is gone, its socket stays and refuses.
    let single = open_path(&volume.join("server.sock"));
    assert_eq!(names(&single), [""; 0]);
    drop(try_connect(&single, b"").unwrap());
    assert!(try_connect(&single, b"server.sock").is_err());
    drop(listener);
    assert_eq!(try_connect(&single, b"").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_full_queue_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("server.sock")).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let root = open_path(dir.path());
    let mut connected = Vec::new();
    let refused = loop {
        match try_connect(&root, b"server.sock") {
            Ok(stream) => connected.push(stream),
            Err(error) => break error,
        }
        assert!(connected.len() < 10, "the queue has a limit");
    };
    assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_server_sees_the_user_that_connects() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can act as another user");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("a.sock")).unwrap();
    let root = open_path(dir.path());
    for (uid, gid) in [(0, 0), (1234, 77), (1234, 0), (0, 77)] {
        let _client = connect_as(&root, b"a.sock", SocketClient::new(uid, gid).unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let seen = nix::sys::socket::getsockopt(&server, nix::sys::socket::sockopt::PeerCredentials).unwrap();
        assert_eq!((seen.uid(), seen.gid()), (uid, gid));
        assert_eq!((nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw()), (0, 0));
    }
}
