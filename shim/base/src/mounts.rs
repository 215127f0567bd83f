//! Manipulates mounts by descriptor (Linux 5.12 and newer): copies mount trees, changes their attributes, and attaches them to a path.
#![allow(unsafe_code)] // reason: mount_setattr has no safe wrapper in rustix, nix or std.

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// The files of a container's /proc that may be mount targets: those that programs such as lxcfs replace.
const PLACES_IN_PROC: [&str; 10] = [
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/slabinfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/crypto/fips_enabled",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/uptime",
];

/// Returns whether a path of a container is one of the few mount targets in its /proc. All others must be rejected: a mount
/// over them could remove the masks and protections of the rest.
pub fn is_place_in_proc(path: &Path) -> bool {
    PLACES_IN_PROC.iter().any(|place| path == Path::new(place))
}

/// The changes of a mount (mount_setattr(2)).
#[derive(Clone, Copy, Debug, Default)]
pub struct Change<'a> {
    /// The `MOUNT_ATTR_*` flags to set, without `MOUNT_ATTR_IDMAP`.
    pub attributes: u64,
    /// The `MOUNT_ATTR_*` flags to clear.
    pub without: u64,
    /// The propagation: `MS_PRIVATE`, `MS_SLAVE` or `MS_SHARED`; 0 leaves it unchanged.
    pub propagation: u64,
    /// The user namespace of an idmapped mount; only for mounts that are not attached yet.
    pub users: Option<BorrowedFd<'a>>,
}

/// Copies the mount at a path, or with `deep` the tree of mounts; the copy is not attached yet.
pub fn copy(path: &Path, deep: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, deep);
    Ok(open_tree(CWD, path, flags)?)
}

/// Changes a mount, or with `deep` a tree of mounts.
pub fn change(mount: impl AsFd, deep: bool, change: &Change) -> io::Result<()> {
    let (mapped, users) = match change.users {
        Some(users) => (libc::MOUNT_ATTR_IDMAP, users.as_raw_fd().unsigned_abs().into()),
        None => (0, 0),
    };
    let attributes = libc::mount_attr {
        attr_set: change.attributes | mapped,
        attr_clr: change.without,
        propagation: change.propagation,
        userns_fd: users,
    };
    let flags = libc::AT_EMPTY_PATH | if deep { libc::AT_RECURSIVE } else { 0 };
    let (number, empty, size) = (mount.as_fd().as_raw_fd(), c"".as_ptr(), size_of::<libc::mount_attr>());
    // SAFETY: both descriptors are open; the kernel reads the empty string and `attributes`, whose true size is passed, and
    // both live until the call returns.
    let done = unsafe { libc::syscall(libc::SYS_mount_setattr, number, empty, flags, &raw const attributes, size) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a mount to a path.
pub fn place(mount: impl AsFd, at: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Attaches a mount to an open directory or file, which no path needs to lead to.
pub fn place_on(mount: impl AsFd, at: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", at, "", flags)?)
}
