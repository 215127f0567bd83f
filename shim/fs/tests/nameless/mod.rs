//! Tests files without a name (O_TMPFILE).

use super::guest::{CREATE, FORGET, GETATTR, Guest, INIT, READ, RELEASE, ROOT, SETATTR, TMPFILE, WRITE};
use super::{directory, volume};
use nacelle_fs::{VolumeAccess, VolumeToMount};
use nix::mount::{MntFlags, umount2};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

const LINK: u32 = 13;
const FSYNC: u32 = 20;
const SETXATTR: u32 = 21;
const GETXATTR: u32 = 22;
const LISTXATTR: u32 = 23;
const REMOVEXATTR: u32 = 24;
const FLUSH: u32 = 25;
const STATFS: u32 = 17;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;
const COPY_FILE_RANGE: u32 = 47;

/// A file without a name that a guest has open.
struct Nameless {
    node: u64,
    handle: u64,
}

fn create(guest: &mut Guest, directory: u64, flags: i32, mode: u32) -> Result<Nameless, i32> {
    let mut body = [(libc::O_TMPFILE | flags) as u32, libc::S_IFREG | mode, 0o022, 0].map(u32::to_le_bytes).concat();
    body.extend(b"/\0"); // as Linux does
    let answer = guest.send_request(TMPFILE, directory, &body)?;
    let number = |at: usize| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap());
    assert_eq!(answer.len(), 144);
    assert_eq!(u32::from_le_bytes(answer[40 + 64..40 + 68].try_into().unwrap()), 0, "it has no link");
    Ok(Nameless { node: number(0), handle: number(128) })
}

fn write(guest: &mut Guest, file: &Nameless, at: u64, data: &[u8]) -> Result<Vec<u8>, i32> {
    let mut body = [file.handle, at].map(u64::to_le_bytes).concat();
    body.extend([u32::try_from(data.len()).unwrap(), 0].map(u32::to_le_bytes).concat());
    body.extend([0; 16]);
    body.extend(data);
    guest.send_request(WRITE, file.node, &body)
}

fn read(guest: &mut Guest, file: &Nameless) -> Result<Vec<u8>, i32> {
    let mut body = [file.handle, 0].map(u64::to_le_bytes).concat();
    body.extend([60_000u32, 0].map(u32::to_le_bytes).concat());
    body.extend([0; 16]);
    guest.send_request(READ, file.node, &body)
}

fn link(guest: &mut Guest, node: u64, directory: u64, name: &str) -> Result<u64, i32> {
    let body = [node.to_le_bytes().as_slice(), name.as_bytes(), b"\0"].concat();
    let entry = guest.send_request(LINK, directory, &body)?;
    Ok(u64::from_le_bytes(entry[..8].try_into().unwrap()))
}

fn attributes(guest: &mut Guest, node: u64) -> Result<(u64, u32), i32> {
    let answer = guest.send_request(GETATTR, node, &[0; 16])?;
    let size = u64::from_le_bytes(answer[24..32].try_into().unwrap());
    let links = u32::from_le_bytes(answer[16 + 64..16 + 68].try_into().unwrap());
    Ok((size, links))
}

fn release(guest: &mut Guest, file: &Nameless) -> Result<Vec<u8>, i32> {
    guest.send_request(RELEASE, file.node, &[file.handle.to_le_bytes().as_slice(), &[0; 16]].concat())
}

pub fn a_file_without_a_name_is_written_read_and_linked() {
    for guest in [Guest::new, Guest::with_shared_virtqueues] {
        written_read_and_linked(guest());
    }
}

fn written_read_and_linked(mut guest: Guest) {
    let (dir, directory) = directory();
    fs::set_permissions(&directory, PermissionsExt::from_mode(0o777)).unwrap();
    guest.mount_volumes("c", &[volume(&directory), volume(dir.path())]).unwrap();
    let parent = guest.find("c/0").unwrap();
    (guest.user, guest.group) = (1234, 1234);
    let file = create(&mut guest, parent, libc::O_RDWR, 0o640).unwrap();
    (guest.user, guest.group) = (0, 0);
    write(&mut guest, &file, 0, b"hello world").unwrap();
    assert_eq!(read(&mut guest, &file).unwrap(), b"hello world");
    assert_eq!(attributes(&mut guest, file.node), Ok((11, 0)));
    let names = |path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(names(&directory), ["file"], "no name appears");
    // The guest opens it once more through /proc/self/fd.
    let again = Nameless { node: file.node, handle: guest.open(file.node, libc::O_RDONLY).unwrap() };
    assert_eq!(read(&mut guest, &again).unwrap(), b"hello world");
    assert_eq!(write(&mut guest, &again, 0, b"x"), Err(libc::EBADF));
    release(&mut guest, &again).unwrap();
    assert_eq!(read(&mut guest, &again), Err(libc::EBADF));
    // It gets a name, and stays the same inode: found by its name, and through the other volume.
    assert_eq!(link(&mut guest, file.node, parent, "named"), Ok(file.node));
    assert_eq!(guest.find("c/0/named"), Ok(file.node));
    assert_eq!(guest.find("c/1/volume/named"), Ok(file.node));
    assert_eq!(attributes(&mut guest, file.node), Ok((11, 1)));
    let status = fs::metadata(directory.join("named")).unwrap();
    assert_eq!((status.uid(), status.gid(), status.mode()), (1234, 1234, 0o100640));
    // The open file continues.
    write(&mut guest, &file, 11, b"!").unwrap();
    assert_eq!(fs::read(directory.join("named")).unwrap(), b"hello world!");
    assert_eq!(guest.read("c/1/volume/named").unwrap(), "hello world!");
    guest.chmod(file.node, 0o600).unwrap();
    assert_eq!(fs::metadata(directory.join("named")).unwrap().mode(), 0o100600);
    assert_eq!(link(&mut guest, file.node, parent, "second"), Ok(file.node));
    release(&mut guest, &file).unwrap();
    assert_eq!(fs::metadata(directory.join("second")).unwrap().nlink(), 2);
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn a_file_without_a_name_has_all_operations_of_a_file() {
    let (dir, directory) = directory();
    let mut guest = Guest::new();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let parent = guest.find("c/0").unwrap();
    let file = create(&mut guest, parent, libc::O_WRONLY, 0o666).unwrap();
    let handle = file.handle.to_le_bytes();
    assert_eq!(read(&mut guest, &file), Err(libc::EBADF), "it is open for writing");
    write(&mut guest, &file, 1 << 20, b"end").unwrap();
    // SETATTR: mode, owner, size, times.
    let mut body = vec![0; 88];
    let valid: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 5;
    body[..4].copy_from_slice(&valid.to_le_bytes());
    body[16..24].copy_from_slice(&(2u64 << 20).to_le_bytes());
    body[40..48].copy_from_slice(&1_000_000_000u64.to_le_bytes());
    for (at, number) in [(68, 0o4751u32), (76, 7), (80, 8)] {
        body[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    let answer = guest.send_request(SETATTR, file.node, &body).unwrap();
    assert_eq!(u64::from_le_bytes(answer[48..56].try_into().unwrap()), 1_000_000_000);
    assert_eq!(attributes(&mut guest, file.node), Ok((2 << 20, 0)));
    // The id that means none.
    body[..4].copy_from_slice(&(1u32 << 1 | 1 << 2).to_le_bytes());
    body[76..84].fill(0xff);
    guest.send_request(SETATTR, file.node, &body).unwrap();
    // FALLOCATE, LSEEK (data, hole), FSYNC, FLUSH, STATFS.
    let lseek = |guest: &mut Guest, offset: u64, whence: u32| {
        let body = [&handle, offset.to_le_bytes().as_slice(), &whence.to_le_bytes(), &[0; 4]].concat();
        let answer = guest.send_request(LSEEK, file.node, &body)?;
        Ok(u64::from_le_bytes(answer[..8].try_into().unwrap()))
    };
    assert_eq!(lseek(&mut guest, 0, libc::SEEK_DATA as u32), Ok(1 << 20));
    assert_eq!(lseek(&mut guest, 0, libc::SEEK_HOLE as u32), Ok(0));
    assert_eq!(lseek(&mut guest, 0, libc::SEEK_END as u32), Err(libc::EINVAL));
    let allocation = [&handle, 0u64.to_le_bytes().as_slice(), &(3u64 << 20).to_le_bytes(), &[0; 8]].concat();
    guest.send_request(FALLOCATE, file.node, &allocation).unwrap();
    assert_eq!(attributes(&mut guest, file.node), Ok((3 << 20, 0)));
    for flags in [0u32, 1] {
        guest.send_request(FSYNC, file.node, &[&handle, flags.to_le_bytes().as_slice(), &[0; 4]].concat()).unwrap();
    }
    guest.send_request(FLUSH, file.node, &[handle.as_slice(), &[0; 16]].concat()).unwrap();
    assert_eq!(guest.send_request(STATFS, file.node, &[]).unwrap().len(), 80);
    // Extended attributes: as those of a file with a name, also where the node's file system has none.
    let other = guest.find("c/0/file").unwrap();
    let set = [4u32, 0, 0, 0].map(u32::to_le_bytes).concat();
    let sized = |size: u32| [size, 0].map(u32::to_le_bytes).concat();
    let none: &[u8] = b"";
    let requests: [(u32, &[u8], &[u8]); 9] = [
        (SETXATTR, &set, b"user.color\0blue"),
        (SETXATTR, &set, b"security.capability\0blue"),
        (GETXATTR, &sized(0), b"user.color\0"),
        (GETXATTR, &sized(100), b"user.color\0"),
        (GETXATTR, &sized(2), b"user.color\0"),
        (LISTXATTR, &sized(0), none),
        (LISTXATTR, &sized(100), none),
        (REMOVEXATTR, none, b"user.color\0"),
        (GETXATTR, &sized(100), b"user.color\0"),
    ];
    for (opcode, head, rest) in requests {
        let body = [head, rest].concat();
        let [ours, named] = [file.node, other].map(|node| guest.send_request(opcode, node, &body));
        assert_eq!(ours, named, "{opcode} {:?}", String::from_utf8_lossy(rest));
    }
    // A copy to a file that virtiofsd has open is the guest's own business.
    let opened = guest.open(other, libc::O_RDWR).unwrap();
    let numbers = [file.handle, 0, other, opened, 0, 4, 0].map(u64::to_le_bytes).concat();
    assert_eq!(guest.send_request(COPY_FILE_RANGE, file.node, &numbers), Err(libc::EXDEV));
    assert_eq!(link(&mut guest, file.node, parent, "named"), Ok(file.node));
    let status = fs::metadata(directory.join("named")).unwrap();
    assert_eq!((status.mode(), status.uid(), status.gid()), (0o100751, 7, 8), "chown ends setuid");
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn files_without_a_name_are_refused_where_files_are() {
    let (dir, directory) = directory();
    let mut guest = Guest::new();
    let read_only = VolumeToMount { access: VolumeAccess::ReadOnly, ..volume(&directory.join("file")) };
    let other = VolumeToMount { access: VolumeAccess::ReadOnly, ..volume(dir.path()) };
    guest.mount_volumes("c", &[volume(&directory), read_only, other]).unwrap();
    let [writable, file, read_only] = ["c/0", "c/1", "c/2"].map(|path| guest.find(path).unwrap());
    assert_eq!(create(&mut guest, read_only, libc::O_RDWR, 0o600).err(), Some(libc::EROFS));
    assert_eq!(create(&mut guest, ROOT, libc::O_RDWR, 0o600).err(), Some(libc::EROFS));
    assert_eq!(create(&mut guest, file, libc::O_RDWR, 0o600).err(), Some(libc::ENOTDIR));
    assert_eq!(create(&mut guest, 999, libc::O_RDWR, 0o600).err(), Some(libc::EBADF));
    assert_eq!(create(&mut guest, writable, libc::O_RDONLY, 0o600).err(), Some(libc::EINVAL));
    // O_EXCL: it never gets a name. A name that exists is not replaced.
    let exclusive = create(&mut guest, writable, libc::O_RDWR | libc::O_EXCL, 0o600).unwrap();
    assert_eq!(link(&mut guest, exclusive.node, writable, "named"), Err(libc::ENOENT));
    let plain = create(&mut guest, writable, libc::O_RDWR, 0o600).unwrap();
    assert_eq!(link(&mut guest, plain.node, writable, "file"), Err(libc::EEXIST));
    assert_eq!(link(&mut guest, plain.node, read_only, "named"), Err(libc::EXDEV));
    for name in ["..", "../x", "a/b"] {
        assert_eq!(link(&mut guest, plain.node, writable, name), Err(libc::EACCES));
    }
    // A request without O_TMPFILE is one too, as an overlay of the guest's kernel sends it; and its name has no meaning.
    let body = [libc::O_RDWR as u32, 0o100_600, 0, 0].map(u32::to_le_bytes).concat();
    guest.send_request(TMPFILE, writable, &[body.as_slice(), b"../x\0"].concat()).unwrap();
    assert!(!dir.path().join("x").exists() && !directory.join("x").exists());
    assert_eq!(guest.send_request(TMPFILE, writable, &[0; 3]), Err(libc::EIO));
    let body = [(libc::O_RDWR | libc::O_TMPFILE) as u32, 0o100_600, 0, 0].map(u32::to_le_bytes).concat();
    let smuggled = guest.send_request(CREATE, writable, &[body.as_slice(), b"../x\0"].concat());
    assert_eq!(smuggled, Err(libc::EACCES));
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

/// A guest whose kernel sends the groups of a process: it may create a file where one of them may.
pub fn a_file_without_a_name_is_created_with_the_callers_groups() {
    const WITH_GROUPS: [u32; 2] = [1 << 30, 1 << 2]; // FUSE_INIT_EXT, FUSE_CREATE_SUPP_GROUP
    const GROUP: u32 = 4321;
    let (dir, directory) = directory();
    let mut guest = Guest::new();
    let init = [7u32, 38, 1 << 20, 0x3fff_ffff | WITH_GROUPS[0], WITH_GROUPS[1]].map(u32::to_le_bytes).concat();
    guest.send_request(INIT, 0, &[init.as_slice(), &[0; 44]].concat()).unwrap();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    std::os::unix::fs::chown(&directory, Some(0), Some(GROUP)).unwrap();
    fs::set_permissions(&directory, PermissionsExt::from_mode(0o770)).unwrap();
    let parent = guest.find("c/0").unwrap();
    (guest.user, guest.group) = (1234, 1234);
    let mut request = |group: Option<u32>| {
        let mut body = [(libc::O_TMPFILE | libc::O_RDWR) as u32, 0o100_600, 0, 0].map(u32::to_le_bytes).concat();
        body.extend(b"/\0");
        // `struct fuse_ext_header` (size, FUSE_EXT_GROUPS), `struct fuse_supp_groups`, padded to eight bytes.
        body.extend(group.into_iter().flat_map(|group| [16u32, 32, 1, group].map(u32::to_le_bytes).concat()));
        guest.send_request(TMPFILE, parent, &body).map(|_| ())
    };
    assert_eq!(request(None), Err(libc::EACCES));
    assert_eq!(request(Some(GROUP + 1)), Err(libc::EACCES));
    assert_eq!(request(Some(GROUP)), Ok(()));
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn files_without_a_name_end_with_the_guests_interest_and_are_limited() {
    const MAX_FILES: u64 = 1024;
    let (dir, directory) = directory();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, MAX_FILES, hard).unwrap();
    let mut guest = Guest::new();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let parent = guest.find("c/0").unwrap();
    let deleted = |guest: &Guest| {
        let open = fs::read_dir(format!("/proc/{}/fd", guest.pid)).unwrap();
        let targets = open.map(|entry| fs::read_link(entry.unwrap().path()).unwrap_or_default());
        // This test may have been started with a device whose node was replaced.
        let own = targets.filter(|target| !target.starts_with("/dev"));
        own.filter(|target| target.to_string_lossy().ends_with("(deleted)")).count()
    };
    let file = create(&mut guest, parent, libc::O_RDWR, 0o600).unwrap();
    release(&mut guest, &file).unwrap();
    assert_eq!(attributes(&mut guest, file.node), Ok((0, 0)), "the guest has not forgotten it");
    guest.request_without_reply(FORGET, file.node, &1u64.to_le_bytes());
    assert_eq!(attributes(&mut guest, file.node), Err(libc::EBADF));
    // In the other order: the open file outlives its node.
    let file = create(&mut guest, parent, libc::O_RDWR, 0o600).unwrap();
    guest.request_without_reply(FORGET, file.node, &1u64.to_le_bytes());
    write(&mut guest, &file, 0, b"still open").unwrap();
    release(&mut guest, &file).unwrap();
    assert_eq!(deleted(&guest), 0);
    // A guest cannot use up the descriptors of its other files.
    let limit = MAX_FILES / 8;
    let mut files = Vec::new();
    let error = loop {
        match create(&mut guest, parent, libc::O_RDWR, 0o600) {
            Ok(file) => files.push(file),
            Err(error) => break error,
        }
        assert!(files.len() as u64 <= limit, "no limit after {} files", files.len());
    };
    assert_eq!((error, files.len() as u64), (libc::ENFILE, limit));
    assert_eq!(guest.read("c/0/file").unwrap(), "of the node");
    for file in files {
        release(&mut guest, &file).unwrap();
        guest.request_without_reply(FORGET, file.node, &1u64.to_le_bytes());
    }
    create(&mut guest, parent, libc::O_RDWR, 0o600).unwrap();
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}
