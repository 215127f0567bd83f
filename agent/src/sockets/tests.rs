//! Tests socket volumes in a directory. What connects is refused here, because there is no host.

use super::*;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;

const TOKEN: [u8; 16] = [7; 16];

fn entry(path: &str, mode: u32) -> TreeEntry {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    TreeEntry { path: path.into(), mode, uid, gid, ..TreeEntry::default() }
}

fn socket(path: &str, mode: u32) -> TreeEntry {
    entry(path, libc::S_IFSOCK | mode)
}

fn volumes() -> (tempfile::TempDir, tokio::runtime::Runtime, GuestSockets) {
    let directory = tempfile::tempdir().unwrap();
    let volumes = GuestSockets::in_directory(directory.path().to_owned(), true);
    (directory, tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(), volumes)
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|found| found.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_volume_has_the_sockets_of_the_node() {
    let (directory, runtime, volumes) = volumes();
    let _inside = runtime.enter();
    let root = || entry("", libc::S_IFDIR | 0o750);
    let volume = directory.path().join("c.0");
    volumes.set("c.0", &TOKEN, &[root(), socket("a.sock", 0o600), socket("b.sock", 0o666)]).unwrap();
    assert_eq!(names(&volume), ["a.sock", "b.sock"]);
    assert_eq!(fs::metadata(&volume).unwrap().mode() & 0o7777, 0o750);
    let found = fs::metadata(volume.join("b.sock")).unwrap();
    assert!(found.file_type().is_socket() && found.mode() & 0o7777 == 0o666);
    drop(UnixStream::connect(volume.join("a.sock")).unwrap());
    let before = fs::metadata(volume.join("a.sock")).unwrap().ino();
    // One server has gone, one has changed its mode, one has come.
    volumes.set("c.0", &TOKEN, &[root(), socket("a.sock", 0o600), socket("c.sock", 0o660)]).unwrap();
    assert_eq!(names(&volume), ["a.sock", "c.sock"]);
    assert_eq!(fs::metadata(volume.join("a.sock")).unwrap().ino(), before);
    volumes.set("c.0", &TOKEN, &[root(), socket("a.sock", 0o640)]).unwrap();
    assert_eq!(fs::metadata(volume.join("a.sock")).unwrap().mode() & 0o7777, 0o640);
    drop(UnixStream::connect(volume.join("a.sock")).unwrap());
    assert_eq!(names(&directory.path().join(DRAFTS)), [""; 0]);
    // A new volume of the same name is not removed by a late request for the old one. Removing is idempotent.
    volumes.set("c.0", &[8; 16], &[root(), socket("new.sock", 0o600)]).unwrap();
    volumes.set("c.0", &TOKEN, &[]).unwrap();
    assert_eq!(names(&volume), ["new.sock"]);
    volumes.set("c.0", &[8; 16], &[]).unwrap();
    volumes.set("c.0", &[8; 16], &[]).unwrap();
    assert!(!volume.exists());
}

#[test]
fn a_volume_may_be_a_socket_itself() {
    let (directory, runtime, volumes) = volumes();
    let _inside = runtime.enter();
    volumes.set("c.0", &TOKEN, &[socket("", 0o620)]).unwrap();
    let path = directory.path().join("c.0").join(SINGLE);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o620);
    drop(UnixStream::connect(path).unwrap());
}

#[test]
fn a_container_that_changes_its_volume_redirects_nothing() {
    let (directory, runtime, volumes) = volumes();
    let _inside = runtime.enter();
    let outside = directory.path().join("outside");
    fs::write(&outside, "").unwrap();
    fs::set_permissions(&outside, Permissions::from_mode(0o600)).unwrap();
    let root = || entry("", libc::S_IFDIR | 0o755);
    volumes.set("c.0", &TOKEN, &[root(), socket("a.sock", 0o600)]).unwrap();
    let volume = directory.path().join("c.0");
    fs::remove_file(volume.join("a.sock")).unwrap();
    symlink(&outside, volume.join("a.sock")).unwrap();
    symlink(&outside, volume.join("b.sock")).unwrap();
    volumes.set("c.0", &TOKEN, &[root(), socket("a.sock", 0o777), socket("b.sock", 0o777)]).unwrap();
    assert_eq!(fs::metadata(&outside).unwrap().mode() & 0o7777, 0o600);
    for name in ["a.sock", "b.sock"] {
        assert!(fs::symlink_metadata(volume.join(name)).unwrap().file_type().is_socket(), "{name}");
    }
    volumes.set("c.0", &TOKEN, &[root()]).unwrap();
    assert!(outside.exists() && names(&volume).is_empty());
}

#[test]
fn other_content_is_refused() {
    let (directory, runtime, volumes) = volumes();
    let _inside = runtime.enter();
    let root = || entry("", libc::S_IFDIR | 0o755);
    let many = (0..=MAX_SOCKETS).map(|number| socket(&number.to_string(), 0o600));
    let many: Vec<_> = [root()].into_iter().chain(many).collect();
    for entries in [
        vec![entry("a", libc::S_IFDIR)],
        vec![entry("", libc::S_IFREG)],
        vec![root(), entry("a", libc::S_IFREG)],
        vec![root(), socket("../a", 0)],
        vec![root(), socket("", 0)],
        vec![socket("", 0), socket("a", 0)],
        many,
    ] {
        assert!(matches!(volumes.set("c.0", &TOKEN, &entries), Err(SocketVolumeError::Content)), "{entries:?}");
    }
    assert!(matches!(volumes.set("c.0", &[1; 15], &[root()]), Err(SocketVolumeError::Content)));
    for name in ["", ".new", "a/b", ".."] {
        assert!(matches!(volumes.set(name, &TOKEN, &[root()]), Err(SocketVolumeError::Name { .. })), "{name}");
    }
    assert_eq!(names(directory.path()), [""; 0]);
}
