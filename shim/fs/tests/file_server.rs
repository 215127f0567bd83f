//! Tests the file-server process from the guest's side: sends requests as bytes, in a pod process of one thread. Needs
//! root. The file is its own test harness, because the standard library's starts threads.

#![allow(missing_docs, reason = "a program of tests")]

use nacelle_base::copied_in::{CopyInFailure, CopyInKind, CopyInMessage, CopyInRequest};
use nacelle_base::sockets::SocketClient;
use nacelle_base::test_program::run_tests;
use nacelle_fs::{
    Owners, Propagation, ShareError, ShareLayout, VolumeAccess, VolumeTarget, VolumeToMount, mount_volumes,
    unmount_volumes,
};
use nacelle_jail::SocketUse;
use nacelle_proto::agent::Tree;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::seteuid;
use prost::Message;
use rustix::fs::inotify::CreateFlags;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime};

mod guest;
mod nameless;
mod queues;

use guest::{FORGET, GETATTR, Guest, INIT, RENAME, ROOT, UNLINK, start_for};

/// With this argument and a directory the program acts as an agent without a guest, for its volumes.
const AS_AGENT: &str = "--as-agent";

fn volume(path: &Path) -> VolumeToMount {
    let (path, propagation) = (path.to_owned(), Propagation::Private);
    VolumeToMount { path, access: VolumeAccess::ReadWrite, propagation, no_access_times: false, owners: None }
}

/// Creates a directory of the node with a file, on a separate file system with shared mounts.
fn directory() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let none = None::<&str>;
    mount(Some("test"), dir.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
    mount(none, dir.path(), none, MsFlags::MS_SHARED, none).unwrap();
    let directory = dir.path().join("volume");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("file"), "of the node").unwrap();
    fs::write(dir.path().join("secret"), "not for the guest").unwrap();
    (dir, directory)
}

fn directories_and_files_are_shared_with_the_requested_access() {
    for guest in [Guest::new, Guest::with_shared_virtqueues] {
        directories_and_files(guest());
    }
}

fn directories_and_files(mut guest: Guest) {
    let (dir, directory) = directory();
    let read_only = VolumeToMount { access: VolumeAccess::ReadOnly, ..volume(&dir.path().join("other")) };
    fs::create_dir(&read_only.path).unwrap();
    fs::write(read_only.path.join("file"), "not to be written").unwrap();
    guest.mount_volumes("c", &[volume(&directory), read_only, volume(&directory.join("file"))]).unwrap();
    assert_eq!(guest.read("c/0/file").unwrap(), "of the node");
    assert_eq!(guest.read("c/2").unwrap(), "of the node");
    (guest.user, guest.group) = (1234, 1234);
    fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let node = guest.find("c/0").unwrap();
    guest.create(node, "made").unwrap();
    let made = fs::metadata(directory.join("made")).unwrap();
    assert_eq!((made.uid(), made.gid(), made.mode()), (1234, 1234, 0o100644));
    (guest.user, guest.group) = (0, 0);
    let node = guest.find("c/1").unwrap();
    assert_eq!(guest.create(node, "other"), Err(libc::EROFS));
    let node = guest.find("c/1/file").unwrap();
    assert_eq!(guest.open(node, libc::O_RDWR), Err(libc::EROFS));
    // The share's root is not writable.
    for node in [ROOT, guest.find("c").unwrap()] {
        assert_eq!(guest.create(node, "other"), Err(libc::EROFS));
        assert_eq!(guest.send_request(UNLINK, node, b"0\0"), Err(libc::EROFS));
    }
    guest.unmount_volumes("c");
    guest.unmount_volumes("c");
    assert_eq!(guest.find("c"), Err(libc::ENOENT));
    // A name can be used again.
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    assert_eq!(guest.read("c/0/file").unwrap(), "of the node");
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn a_file_is_one_inode_through_all_volumes_that_contain_it() {
    for guest in [Guest::new, Guest::with_shared_virtqueues] {
        one_inode(guest());
    }
}

fn one_inode(mut guest: Guest) {
    let (dir, directory) = directory();
    let part = directory.join("part");
    fs::create_dir(&part).unwrap();
    fs::write(part.join("inner"), "inner").unwrap();
    // A file that is read-only in all volumes cannot be written, however it is reached.
    guest.mount_volumes("read", &[VolumeToMount { access: VolumeAccess::ReadOnly, ..volume(&directory) }]).unwrap();
    let paths = ["read/0", "read/0/file", "read/0/part", "read/0/part/inner"];
    let [whole, file, of_part, inner] = paths.map(|path| guest.find(path).unwrap());
    for node in [file, inner] {
        assert_eq!(guest.open(node, libc::O_RDWR), Err(libc::EROFS));
    }
    assert_eq!([whole, file, of_part, inner].map(|node| node >> 48), [1; 4], "the device is in the number");
    assert_eq!(guest.find("read").unwrap() >> 48, 0, "the share itself is of no device");
    // A writable part of the directory: files that were found before keep their inodes, and become writable.
    guest.mount_volumes("part", &[volume(&part), volume(&part.join("inner"))]).unwrap();
    assert_eq!(["part/0", "part/0/inner", "part/1"].map(|path| guest.find(path).unwrap()), [of_part, inner, inner]);
    guest.open(inner, libc::O_RDWR).unwrap();
    guest.create(of_part, "made").unwrap();
    assert_eq!(guest.open(file, libc::O_RDWR), Err(libc::EROFS));
    assert_eq!(guest.create(whole, "made"), Err(libc::EROFS));
    // The parent directory, which contains all of it.
    guest.mount_volumes("parent", &[volume(dir.path())]).unwrap();
    assert_eq!(guest.find("parent/0/volume/part/inner").unwrap(), inner);
    assert_eq!(guest.find("parent/0/volume").unwrap(), whole);
    guest.open(file, libc::O_RDWR).unwrap();
    // A rename across directories, which the mounts of the part alone and the read-only mount do not allow.
    let mut body = of_part.to_le_bytes().to_vec();
    body.extend(b"file\0moved\0");
    guest.send_request(RENAME, whole, &body).unwrap();
    assert_eq!(fs::read_to_string(part.join("moved")).unwrap(), "of the node");
    assert_eq!(guest.find("read/0/part/moved").unwrap(), file);
    // After the volumes are unmounted the access is as before.
    guest.unmount_volumes("parent");
    guest.open(file, libc::O_RDWR).unwrap();
    assert_eq!(guest.create(whole, "made"), Err(libc::EROFS));
    guest.unmount_volumes("part");
    for node in [file, inner] {
        assert_eq!(guest.open(node, libc::O_RDWR), Err(libc::EROFS));
        guest.open(node, libc::O_RDONLY).unwrap();
    }
    // Files that no volume contains any more stay readable until the guest has forgotten them, and get another inode after that.
    guest.unmount_volumes("read");
    guest.open(file, libc::O_RDONLY).unwrap();
    let forget = |guest: &mut Guest, node: u64| guest.request_without_reply(FORGET, node, &u64::MAX.to_le_bytes());
    forget(&mut guest, file);
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(libc::EBADF));
    guest.mount_volumes("again", &[volume(&directory)]).unwrap();
    assert_eq!(guest.find("again/0").unwrap(), whole);
    assert!(guest.find("again/0/part/moved").unwrap() > file);
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn flush_is_requested_only_where_it_has_an_effect() {
    for guest in [Guest::new, Guest::with_shared_virtqueues] {
        open_flags(guest());
    }
}

fn open_flags(mut guest: Guest) {
    const NO_FLUSH: u32 = 1 << 5; // FOPEN_NOFLUSH
    let (dir, directory) = directory();
    let below = directory.join("below");
    fs::create_dir(&below).unwrap();
    guest.mount_volumes("c", &[VolumeToMount { propagation: Propagation::FromNode, ..volume(&directory) }]).unwrap();
    let (root, node) = (guest.find("c/0").unwrap(), guest.find("c/0/file").unwrap());
    let mut number = 0;
    let mut check_open_flags = |writer_flags: u32| {
        for (flags, expected) in [
            (libc::O_RDONLY, NO_FLUSH),
            (libc::O_RDONLY | libc::O_TRUNC, NO_FLUSH),
            (libc::O_WRONLY, writer_flags),
            (libc::O_RDWR, writer_flags),
        ] {
            assert_eq!(guest.opened(node, flags).unwrap().1, expected, "{flags:#x}");
        }
        number += 1;
        assert_eq!(guest.created(root, &format!("made {number}")).unwrap().1, writer_flags);
    };
    // A file system in memory, for example, has nothing to do.
    check_open_flags(NO_FLUSH);
    // The next file may lie on any of the mounts, and the type of this one is not known.
    let ramfs = || mount(Some("test"), &below, Some("ramfs"), MsFlags::empty(), None::<&str>).unwrap();
    ramfs();
    check_open_flags(0);
    umount2(&below, MntFlags::empty()).unwrap();
    check_open_flags(NO_FLUSH);
    ramfs();
    check_open_flags(0);
    check_open_flags(0);
    drop(guest);
    umount2(&below, MntFlags::empty()).unwrap();
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn copied_in_volumes_are_read_and_watched_and_inaccessible_to_the_guest() {
    let (dir, directory) = directory();
    let one = |name: &str, text: &str| {
        fs::create_dir(directory.join(name)).unwrap();
        fs::write(directory.join(name).join("key"), text).unwrap();
        symlink(name, directory.join("..data_tmp")).unwrap();
        fs::rename(directory.join("..data_tmp"), directory.join("..data")).unwrap();
    };
    fs::remove_file(directory.join("file")).unwrap();
    one("..1", "one");
    symlink("..data/key", directory.join("key")).unwrap();
    let mut guest = Guest::new();
    guest
        .mount_volumes_for(VolumeTarget::CopiedIn, "c", &[volume(&directory), volume(&directory.join("..1/key"))])
        .unwrap();
    let pair = |path: &str, text: &str| vec![(path.to_owned(), text.to_owned())];
    let open = |id, live, n: u32| {
        let kind = if live { CopyInKind::Live } else { CopyInKind::Once };
        CopyInRequest::Open { id, kind, path: format!("c/{n}") }
    };
    for (id, live) in [(7, true), (8, true), (9, false)] {
        assert_eq!(guest.send_copy_in_request(open(id, live, u32::from(!live))), CopyInMessage::Done { id });
    }
    assert_eq!(guest.files(7), pair("..1/key", "one"));
    assert_eq!(guest.files(9), pair("", "one"));
    for path in ["c", "c/0", "pushed"] {
        assert_eq!(guest.find(path), Err(libc::ENOENT), "{path}");
    }
    for place in ["c/2", "../places", "/c/0", "c/0/../../..", "d"] {
        let reply =
            guest.send_copy_in_request(CopyInRequest::Open { id: 10, kind: CopyInKind::Once, path: place.into() });
        assert!(matches!(reply, CopyInMessage::Failed { id: 10, .. }), "{place}: {reply:?}");
    }
    // Open files stay open when the daemon unmounts the volume; they cannot be opened again.
    let namespace = File::open(format!("/proc/{}/ns/mnt", guest.pid)).unwrap();
    unmount_volumes(namespace.as_fd(), VolumeTarget::CopiedIn, "c").unwrap();
    assert!(matches!(
        guest.send_copy_in_request(open(10, true, 0)),
        CopyInMessage::Failed { reason: CopyInFailure::Missing, .. }
    ));
    one("..2", "two");
    let mut messages = [guest.next_message(), guest.next_message()];
    messages.sort_by_key(|message| format!("{message:?}"));
    assert_eq!(messages, [CopyInMessage::Changed { id: 7 }, CopyInMessage::Changed { id: 8 }]);
    assert_eq!(guest.files(7), pair("..2/key", "two"));
    // The other volume is still watched, and its change is reported once until it is read.
    assert_eq!(guest.send_copy_in_request(CopyInRequest::Close { id: 7 }), CopyInMessage::Done { id: 7 });
    assert_eq!(guest.files(8), pair("..2/key", "two"));
    one("..3", "three");
    assert_eq!(guest.next_message(), CopyInMessage::Changed { id: 8 });
    one("..4", "four");
    let reply = guest.send_copy_in_request(CopyInRequest::Begin { id: 8, full: false });
    assert!(matches!(reply, CopyInMessage::Part { last: true, .. }), "{reply:?}");
    assert_eq!(
        guest.send_copy_in_request(CopyInRequest::Next { id: 8 }),
        CopyInMessage::Failed { id: 8, reason: CopyInFailure::Missing, text: "the volume is not open".into() }
    );
    assert_eq!(guest.files(9), pair("", "one"));
    umount2(dir.path(), MntFlags::MNT_DETACH).unwrap();
}

fn sockets_of_a_volume_are_followed_and_connected() {
    let (dir, directory) = directory();
    let path = directory.join("server.sock");
    let mut guest = Guest::new();
    let single = directory.join("single.sock");
    let single_listener = UnixListener::bind(&single).unwrap();
    let volumes = [volume(&directory), volume(&single), volume(&directory.join("file"))];
    guest.mount_volumes_for(VolumeTarget::CopiedIn, "c", &volumes).unwrap();
    for (id, n) in [(1, 0), (2, 1), (3, 2)] {
        let open = CopyInRequest::Open { id, kind: CopyInKind::Sockets, path: format!("c/{n}") };
        assert_eq!(guest.send_copy_in_request(open), CopyInMessage::Done { id });
    }
    // The daemon unmounts the volumes; the process keeps them open.
    let namespace = File::open(format!("/proc/{}/ns/mnt", guest.pid)).unwrap();
    unmount_volumes(namespace.as_fd(), VolumeTarget::CopiedIn, "c").unwrap();
    let list = |guest: &mut Guest, id| match guest.send_copy_in_request(CopyInRequest::Begin { id, full: true }) {
        CopyInMessage::Part { last: true, tree, .. } => {
            let entries = Tree::decode(tree.as_slice()).unwrap().entries;
            entries.into_iter().map(|entry| (String::from_utf8(entry.path).unwrap(), entry.mode, entry.uid)).collect()
        }
        other => panic!("{other:?}"),
    };
    let mode_of = |path: &Path| fs::metadata(path).unwrap().mode();
    let root = (String::new(), mode_of(&directory), 0);
    let single_entry = ("single.sock".to_owned(), mode_of(&single), 0);
    let before: Vec<(String, u32, u32)> = list(&mut guest, 1);
    assert_eq!(before, [root.clone(), single_entry.clone()]);
    assert_eq!(list(&mut guest, 2), [(String::new(), mode_of(&single), 0)]);
    let reply = guest.send_copy_in_request(CopyInRequest::Begin { id: 3, full: true });
    assert!(matches!(reply, CopyInMessage::Failed { reason: CopyInFailure::UnsupportedEntry, .. }), "{reply:?}");
    // A server starts, restricts its socket, and restarts.
    for content in ["first", "second"] {
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o660)).unwrap();
        assert_eq!(guest.next_message(), CopyInMessage::Changed { id: 1 });
        let after = list(&mut guest, 1);
        assert_eq!(after, [root.clone(), ("server.sock".to_owned(), 0o140660, 0), single_entry.clone()]);
        let socket = UnixStreamSocket::new();
        assert_eq!(guest.connect_socket(1, "server.sock", &socket.0), CopyInMessage::Done { id: 1 });
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(content.as_bytes()).unwrap();
        drop(server);
        assert_eq!(socket.read_to_end(), content);
    }
    fs::remove_file(&path).unwrap();
    assert_eq!(guest.next_message(), CopyInMessage::Changed { id: 1 });
    assert_eq!(list(&mut guest, 1), before);
    let socket = UnixStreamSocket::new();
    assert_eq!(guest.connect_socket(2, "", &socket.0), CopyInMessage::Done { id: 2 });
    drop(single_listener.accept().unwrap());
    for (id, name) in [(1, "server.sock"), (1, ""), (1, "../secret"), (2, "x"), (3, ""), (9, "server.sock")] {
        let reply = guest.connect_socket(id, name, &UnixStreamSocket::new().0);
        assert!(matches!(reply, CopyInMessage::Failed { .. }), "{id} {name}: {reply:?}");
    }
    let without_socket = CopyInRequest::Connect { id: 2, client: SocketClient::new(0, 0).unwrap(), name: Vec::new() };
    let reply = guest.send_copy_in_request(without_socket);
    assert!(matches!(reply, CopyInMessage::Failed { .. }), "{reply:?}");
    umount2(dir.path(), MntFlags::MNT_DETACH).unwrap();
}

/// A stream socket that is not connected yet.
struct UnixStreamSocket(std::os::fd::OwnedFd);

impl UnixStreamSocket {
    fn new() -> UnixStreamSocket {
        let (family, kind) = (nix::sys::socket::AddressFamily::Unix, nix::sys::socket::SockType::Stream);
        let flags = nix::sys::socket::SockFlag::SOCK_CLOEXEC;
        UnixStreamSocket(nix::sys::socket::socket(family, kind, flags, None).unwrap())
    }

    /// Reads until the server closes the connection.
    fn read_to_end(self) -> String {
        let mut stream = std::os::unix::net::UnixStream::from(self.0);
        // The file-server process has made it non-blocking.
        stream.set_nonblocking(false).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
}

fn invalid_messages_end_the_process() {
    for bytes in [&b"\x02\0\0\0xx"[..], b"\xff\xff\xff\xff", b"\0\0\0\0"] {
        let mut guest = Guest::new();
        guest.copied_in.write_all(bytes).unwrap();
        assert_eq!(waitpid(guest.pid, None).unwrap(), WaitStatus::Exited(guest.pid, 1));
    }
}

fn no_name_or_link_leads_out_of_a_volume() {
    for guest in [Guest::new, Guest::with_shared_virtqueues] {
        walk_out(guest());
    }
}

fn walk_out(mut guest: Guest) {
    let (dir, directory) = directory();
    symlink("../secret", directory.join("up")).unwrap();
    symlink(dir.path().join("secret"), directory.join("away")).unwrap();
    symlink("/", directory.join("root")).unwrap();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let node = guest.find("c/0").unwrap();
    for name in ["..", "../secret", ".", "root/etc", "/etc/passwd", "../../../../../etc"] {
        assert_eq!(guest.lookup(node, name), Err(libc::EACCES), "{name}");
        assert_eq!(guest.lookup(ROOT, name), Err(libc::EACCES), "{name}");
        assert_eq!(guest.create(node, name), Err(libc::EACCES), "{name}");
        assert_eq!(guest.send_request(UNLINK, node, format!("{name}\0").as_bytes()), Err(libc::EACCES), "{name}");
    }
    // The guest follows symbolic links, within its own files; here a link is just a link.
    for name in ["up", "away", "root"] {
        let link = guest.lookup(node, name).unwrap();
        assert!(guest.open(link, libc::O_RDONLY).is_err(), "{name}");
        assert_eq!(guest.lookup(link, "secret"), Err(libc::ENOTDIR), "{name}");
    }
    // Inode numbers that the guest has not received.
    for node in [2u64.pow(20), u64::MAX] {
        assert_eq!(guest.send_request(GETATTR, node, &[0; 16]), Err(libc::EBADF));
    }
    for kind in [libc::S_IFCHR, libc::S_IFBLK] {
        assert_eq!(guest.mknod(node, "device", kind | 0o666, 0x0103), Err(libc::EPERM));
    }
    guest.mknod(node, "pipe", libc::S_IFIFO | 0o600, 0).unwrap();
    guest.mknod(node, "socket", libc::S_IFSOCK | 0o600, 0).unwrap();
    let program = guest.lookup(node, "pipe").unwrap();
    for mode in [0o4755, 0o2755, 0o755] {
        guest.chmod(program, mode).unwrap();
    }
    // The files that the process itself could see if it were compromised.
    let root = PathBuf::from(format!("/proc/{}/root", guest.pid));
    // Nor does an open directory lead to the node's processes.
    for open in fs::read_dir(format!("/proc/{}/fd", guest.pid)).unwrap() {
        let open = open.unwrap().path();
        for up in ["../stat", "../../1/stat", "../../sys/kernel/hostname"] {
            assert!(!open.join(up).exists(), "{} is {:?}", open.display(), fs::read_link(&open));
        }
    }
    let names = |path: &Path| fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(names(&root), ["c"]);
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", guest.pid)).unwrap();
    assert_eq!(mounts.lines().count(), 2, "the share and the volume, from its root: {mounts}");
    let status = fs::read_to_string(format!("/proc/{}/status", guest.pid)).unwrap();
    for line in
        ["CapEff:\t00000000800000db", "CapBnd:\t00000000800000db", "NoNewPrivs:\t1", "Seccomp:\t2", "Threads:\t1"]
    {
        assert!(status.lines().any(|found| found == line), "{line}: {status}");
    }
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn mounts_of_the_node_propagate_where_requested() {
    let (dir, directory) = directory();
    let below = directory.join("below");
    fs::create_dir(&below).unwrap();
    let none = None::<&str>;
    let on = |place: &Path, name: &str| {
        mount(Some("test"), place, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        fs::write(place.join(name), name).unwrap();
    };
    on(&below, "early");
    let late = directory.join("late");
    fs::create_dir(&late).unwrap();
    let propagating = || VolumeToMount { propagation: Propagation::FromNode, ..volume(&directory) };
    let read_only = || VolumeToMount { access: VolumeAccess::ReadOnly, ..volume(&directory) };
    let all = || VolumeToMount { access: VolumeAccess::RecursiveReadOnly, ..volume(&directory) };
    let seeing = |volumes: &[VolumeToMount]| {
        let mut guest = Guest::new();
        guest.mount_volumes("c", volumes).unwrap();
        for number in 0..volumes.len() {
            assert_eq!(guest.read(&format!("c/{number}/below/early")).unwrap(), "early");
        }
        guest
    };
    let guests = [
        vec![volume(&directory)],
        vec![propagating()],
        vec![read_only()],
        vec![all()],
        vec![volume(&directory), propagating(), all()],
    ];
    let [mut private, mut propagated, mut of_mount, mut of_all, mut of_several] =
        guests.map(|volumes| seeing(&volumes));
    // The volume is read-only; mounts below it only if that is recursive, and only if no other volume is writable.
    for (guest, written) in [(&mut of_mount, Ok(())), (&mut of_all, Err(libc::EROFS)), (&mut of_several, Ok(()))] {
        let node = guest.find("c/0/below").unwrap();
        assert_eq!(guest.create(node, "written").map(drop), written);
    }
    on(&late, "late");
    assert_eq!(private.find("c/0/late/late"), Err(libc::ENOENT));
    assert_eq!(propagated.read("c/0/late/late").unwrap(), "late");
    // Mounts that one volume of a directory receives are visible through all of them.
    for number in 0..3 {
        assert_eq!(of_several.read(&format!("c/{number}/late/late")).unwrap(), "late");
    }
    drop([private, propagated, of_mount, of_all, of_several]);
    for place in [&late, &below, &dir.path().to_owned()] {
        umount2(place, MntFlags::empty()).unwrap();
    }
}

fn reading_leaves_access_times_unchanged_where_requested() {
    let (_dir, directory) = directory();
    let ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30);
    for name in ["plain", "kept"] {
        fs::write(directory.join(name), name).unwrap();
        let file = fs::File::options().write(true).open(directory.join(name)).unwrap();
        file.set_times(fs::FileTimes::new().set_accessed(ago)).unwrap();
    }
    let kept = VolumeToMount { no_access_times: true, ..volume(&directory) };
    let [mut guest, mut other] = [Guest::new(), Guest::new()];
    guest.mount_volumes("c", std::slice::from_ref(&kept)).unwrap();
    other.mount_volumes("c", &[kept, volume(&directory)]).unwrap();
    let accessed = |name: &str| fs::metadata(directory.join(name)).unwrap().accessed().unwrap();
    assert_eq!(guest.read("c/0/kept").unwrap(), "kept");
    assert_eq!(accessed("kept"), ago);
    // Access times are updated if another volume of the pod contains the file too.
    assert_eq!(other.find("c/0").unwrap(), other.find("c/1").unwrap());
    assert_eq!(other.read("c/0/plain").unwrap(), "plain");
    // Access times are not updated if the node's own file system keeps none.
    fs::read(directory.join("kept")).unwrap();
    assert_eq!(accessed("plain") == ago, accessed("kept") == ago);
}

fn owners_are_mapped_for_reads_and_writes_where_requested() {
    let (dir, directory) = directory();
    fs::write(directory.join("of-unmapped-user"), "").unwrap();
    std::os::unix::fs::chown(directory.join("of-unmapped-user"), Some(70_000), Some(70_000)).unwrap();
    let mut guest = Guest::new();
    let owners = Owners { users: (100_000, 65_536), groups: (200_000, 65_536) };
    let mapped = VolumeToMount { owners: Some(owners), ..volume(&directory) };
    guest.mount_volumes("c", &[mapped, volume(&directory)]).unwrap();
    assert_ne!(guest.find("c/0/file").unwrap(), guest.find("c/1/file").unwrap(), "their owners differ");
    let root = guest.owner("c/0/file").unwrap();
    assert_eq!((root, guest.owner("c/1/file").unwrap()), ((100_000, 200_000), (0, 0)));
    assert_eq!(guest.owner("c/0/of-unmapped-user").unwrap(), (65_534, 65_534));
    // A user without a mapping writes nothing; a mapped user owns the files on the node's disk under its mapped id.
    fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let node = guest.find("c/0").unwrap();
    (guest.user, guest.group) = (100_007, 200_008);
    guest.create(node, "made").unwrap();
    let made = fs::metadata(directory.join("made")).unwrap();
    assert_eq!((made.uid(), made.gid()), (7, 8));
    (guest.user, guest.group) = (7, 8);
    assert_eq!(guest.create(node, "other"), Err(libc::EOVERFLOW));
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn a_private_mount_is_rejected_for_volumes_with_propagation() {
    let (dir, directory) = directory();
    let none = None::<&str>;
    let guest = Guest::new();
    let with_propagation = |propagation| VolumeToMount { propagation, ..volume(&directory) };
    mount(none, dir.path(), none, MsFlags::MS_SLAVE, none).unwrap(); // no peers: private
    for propagation in [Propagation::FromNode, Propagation::BothWays] {
        let error = guest.mount_volumes("c", &[volume(&directory), with_propagation(propagation)]).unwrap_err();
        assert!(matches!(&error, ShareError::NotShared { mount_point, .. } if mount_point == dir.path()), "{error}");
    }
    guest.mount_volumes("c", &[with_propagation(Propagation::Private)]).unwrap();
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn mounts_of_an_agent_propagate_to_the_node_and_are_unmounted() {
    let (dir, directory) = directory();
    let inner = directory.join("inner");
    fs::create_dir(&inner).unwrap();
    let home = tempfile::tempdir().unwrap();
    let mut agent = Command::new(std::env::current_exe().unwrap())
        .args([AS_AGENT.as_ref(), home.path()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = agent.id();
    let (mut go, mut done) = (agent.stdin.take().unwrap(), agent.stdout.take().unwrap());
    let mut word = [0];
    done.read_exact(&mut word).unwrap();
    let namespace = File::open(format!("/proc/{pid}/ns/mnt")).unwrap();
    let both = VolumeToMount { propagation: Propagation::BothWays, ..volume(&directory) };
    mount_volumes(namespace.as_fd(), VolumeTarget::Agent, "c", &[both, volume(&directory.join("file"))]).unwrap();
    let before = mounts();
    go.write_all(b"!").unwrap();
    done.read_exact(&mut word).unwrap();
    assert_eq!(mounts(), before + 1, "the node sees it");
    unmount_volumes(namespace.as_fd(), VolumeTarget::Agent, "c").unwrap();
    assert!(fs::read_dir(format!("/proc/{pid}/root/run/nacelle/volumes")).unwrap().next().is_none());
    assert_eq!(mounts(), before + 1, "it stays the node's");
    umount2(&inner, MntFlags::empty()).unwrap();
    go.write_all(b"!").unwrap();
    assert!(agent.wait().unwrap().success());
    assert_eq!(mounts(), before);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

/// Acts as an agent without a guest, as far as its mounts are concerned; then as a container that mounts something.
fn as_agent(home: &Path) -> std::io::Result<()> {
    let none = None::<&str>;
    let signal_and_wait = || {
        std::io::stdout().write_all(b"!")?;
        std::io::stdout().flush()?;
        std::io::stdin().read_exact(&mut [0])
    };
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
    mount(Some("agent"), home, Some("tmpfs"), MsFlags::empty(), none)?;
    nix::unistd::chdir(home)?;
    fs::create_dir_all("run/nacelle")?;
    nix::unistd::pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    nix::unistd::chdir("/")?;
    signal_and_wait()?;
    mount(Some("container"), "/run/nacelle/volumes/c/0/inner", Some("tmpfs"), MsFlags::empty(), none)?;
    signal_and_wait()
}

/// Returns how many mounts this process sees.
fn mounts() -> usize {
    fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count()
}

fn volumes_are_mounted_all_or_none() {
    let (dir, directory) = directory();
    let mut guest = Guest::new();
    let none = guest.mount_volumes("c", &[volume(&directory), volume(&directory.join("none"))]).unwrap_err();
    assert!(matches!(none, ShareError::Volume { what: "open", .. }), "{none}");
    assert_eq!(guest.find("c"), Err(libc::ENOENT));
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn invalid_requests_have_no_effect() {
    for guest in [Guest::new, Guest::with_shared_virtqueues] {
        random_bytes(guest());
    }
}

fn random_bytes(mut guest: Guest) {
    let (dir, directory) = directory();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    // All opcodes, valid or not, with random bodies.
    for round in 0..2000u32 {
        let length = usize::from(random()) % 120;
        let mut request: Vec<u8> = (0..length).map(|_| random()).collect();
        if let Some(opcode) = request.get_mut(4..8) {
            opcode.copy_from_slice(&(round % 54).to_le_bytes());
        }
        if let Some(node) = request.get_mut(16..24) {
            node.copy_from_slice(&(u64::from(random()) % 5).to_le_bytes());
        }
        let _ = guest.send_raw(&request); // the reply does not matter
    }
    let init = [7u32, 38, 1 << 20, 0x3fff_ffff].map(u32::to_le_bytes).concat();
    guest.send_request(INIT, 0, &init).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("secret")).unwrap(), "not for the guest");
    guest.find("c/0").unwrap();
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

fn a_share_of_one_volume_exposes_nothing_else() {
    for shared in [false, true] {
        let (_dir, directory) = directory();
        symlink("../secret", directory.join("up")).unwrap();
        let read_only = VolumeToMount { access: VolumeAccess::ReadOnly, ..volume(&directory) };
        let volumes = [volume(&directory), read_only, volume(&directory.join("file"))];
        for (part, errno) in [
            ("c/2", libc::ENOTDIR),
            ("c/3", libc::ENOENT),
            ("c", libc::EINVAL),
            ("../0", libc::EINVAL),
            ("c/0/..", libc::EINVAL),
        ] {
            let error = Guest::of_volume(shared, "c", &volumes, part).err().unwrap();
            assert_eq!(error.raw_os_error(), Some(errno), "{part}");
        }
        let mut guest = Guest::of_volume(shared, "c", &volumes, "c/0").unwrap();
        assert_eq!(guest.read("file").unwrap(), "of the node");
        for outside in ["..", "c", "0", "1"] {
            guest.find(outside).unwrap_err();
        }
        let link = guest.find("up").unwrap();
        guest.lookup(link, "x").unwrap_err();
        guest.create(ROOT, "new").unwrap();
        assert!(directory.join("new").exists());
        // The VM is reset: its kernel begins anew, and the process must not remember the old state.
        let before = guest.find("file").unwrap();
        guest.send_init();
        assert_eq!(guest.open(before, libc::O_RDONLY), Err(libc::EBADF));
        assert_eq!(guest.read("file").unwrap(), "of the node");
        // The device has threads.
        drop(guest);
        let mut guest = Guest::of_volume(shared, "c", &volumes, "c/1").unwrap();
        assert_eq!(guest.read("file").unwrap(), "of the node");
        assert_eq!(guest.create(ROOT, "other").unwrap_err(), libc::EROFS);
        // No volume was selected for the other share: a request to it ends the process.
        let mut other = &guest.others[0][1];
        other.write_all(&[0; 8]).unwrap();
        assert_eq!(waitpid(guest.pid, None).unwrap(), WaitStatus::Exited(guest.pid, 1));
    }
}

/// The kernel gives each user of a node 128 inotify instances by default, so they are not root's, whom all pods have in common.
fn inotify_is_charged_to_the_pods_user() {
    const USERS: [u32; 2] = [1_879_000_001, 1_879_000_002];
    seteuid(USERS[0].into()).unwrap();
    let held: Vec<_> = std::iter::from_fn(|| rustix::fs::inotify::init(CreateFlags::CLOEXEC).ok()).collect();
    seteuid(0.into()).unwrap();
    let limit = fs::read_to_string("/proc/sys/fs/inotify/max_user_instances").unwrap();
    if held.len().to_string() != limit.trim() {
        return println!("skipped: a user has more inotify instances ({}) than this process open files", limit.trim());
    }
    let starts = |user| {
        let scaffold = tempfile::tempdir().unwrap();
        let process = start_for(scaffold.path(), ShareLayout::Single, SocketUse::Open, Some(user));
        let pid = process.pid();
        let started = process.wait_until_ready().is_ok();
        waitpid(pid, None).unwrap(); // its streams are closed
        started
    };
    assert_eq!(USERS.map(starts), [false, true]);
    drop(held);
    assert!(starts(USERS[0]));
}

fn it_ends_with_the_pod_process() {
    let guest = Guest::new();
    let pid = guest.pid;
    guest.streams[0].shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 0));
}

fn main() -> ExitCode {
    let tests: [(&str, fn()); 28] = [
        (
            "directories_and_files_are_shared_with_the_requested_access",
            directories_and_files_are_shared_with_the_requested_access,
        ),
        (
            "a_file_is_one_inode_through_all_volumes_that_contain_it",
            a_file_is_one_inode_through_all_volumes_that_contain_it,
        ),
        ("flush_is_requested_only_where_it_has_an_effect", flush_is_requested_only_where_it_has_an_effect),
        (
            "copied_in_volumes_are_read_and_watched_and_inaccessible_to_the_guest",
            copied_in_volumes_are_read_and_watched_and_inaccessible_to_the_guest,
        ),
        ("sockets_of_a_volume_are_followed_and_connected", sockets_of_a_volume_are_followed_and_connected),
        ("invalid_messages_end_the_process", invalid_messages_end_the_process),
        ("no_name_or_link_leads_out_of_a_volume", no_name_or_link_leads_out_of_a_volume),
        ("mounts_of_the_node_propagate_where_requested", mounts_of_the_node_propagate_where_requested),
        (
            "reading_leaves_access_times_unchanged_where_requested",
            reading_leaves_access_times_unchanged_where_requested,
        ),
        (
            "owners_are_mapped_for_reads_and_writes_where_requested",
            owners_are_mapped_for_reads_and_writes_where_requested,
        ),
        (
            "a_private_mount_is_rejected_for_volumes_with_propagation",
            a_private_mount_is_rejected_for_volumes_with_propagation,
        ),
        (
            "mounts_of_an_agent_propagate_to_the_node_and_are_unmounted",
            mounts_of_an_agent_propagate_to_the_node_and_are_unmounted,
        ),
        ("volumes_are_mounted_all_or_none", volumes_are_mounted_all_or_none),
        ("invalid_requests_have_no_effect", invalid_requests_have_no_effect),
        (
            "data_of_a_shared_virtqueue_is_transferred_correctly",
            queues::data_of_a_shared_virtqueue_is_transferred_correctly,
        ),
        ("a_large_request_arrives_whole_over_a_stream", queues::a_large_request_arrives_whole_over_a_stream),
        ("a_virtqueue_is_shared_returned_and_shared_again", queues::a_virtqueue_is_shared_returned_and_shared_again),
        (
            "requests_without_a_waiter_are_completed_and_notified",
            queues::requests_without_a_waiter_are_completed_and_notified,
        ),
        (
            "invalid_chains_of_a_shared_virtqueue_have_no_effect",
            queues::invalid_chains_of_a_shared_virtqueue_have_no_effect,
        ),
        (
            "without_the_process_a_shared_virtqueue_is_answered_with_errors",
            queues::without_the_process_a_shared_virtqueue_is_answered_with_errors,
        ),
        (
            "a_file_without_a_name_is_written_read_and_linked",
            nameless::a_file_without_a_name_is_written_read_and_linked,
        ),
        (
            "a_file_without_a_name_has_all_operations_of_a_file",
            nameless::a_file_without_a_name_has_all_operations_of_a_file,
        ),
        (
            "files_without_a_name_are_refused_where_files_are",
            nameless::files_without_a_name_are_refused_where_files_are,
        ),
        (
            "a_file_without_a_name_is_created_with_the_callers_groups",
            nameless::a_file_without_a_name_is_created_with_the_callers_groups,
        ),
        (
            "files_without_a_name_end_with_the_guests_interest_and_are_limited",
            nameless::files_without_a_name_end_with_the_guests_interest_and_are_limited,
        ),
        ("a_share_of_one_volume_exposes_nothing_else", a_share_of_one_volume_exposes_nothing_else),
        ("inotify_is_charged_to_the_pods_user", inotify_is_charged_to_the_pods_user),
        ("it_ends_with_the_pod_process", it_ends_with_the_pod_process),
    ];
    if let [_, word, home] = std::env::args().collect::<Vec<_>>().as_slice()
        && word == AS_AGENT
    {
        return if as_agent(Path::new(home)).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let none = None::<&str>;
    let own = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none));
    if own.is_err() {
        println!("skipped: needs root, for mounts");
        println!("\ntest result: ok. 0 passed; 0 failed; {} ignored; 0 measured; 0 filtered out\n", tests.len());
        return ExitCode::SUCCESS;
    }
    run_tests(&tests, |test| std::panic::catch_unwind(test).is_ok())
}
