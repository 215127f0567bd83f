//! Manipulates mounts by descriptor (Linux 5.12 and newer): copies mount trees, changes their attributes, and attaches them to a path.
#![allow(unsafe_code)] // reason: mount_setattr has no safe wrapper in rustix, nix or std.

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// The files of a container's /proc that may be mount targets: those that programs such as lxcfs replace.
const ALLOWED_PROC_TARGETS: [&str; 10] = [
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
pub fn is_allowed_proc_target(path: &Path) -> bool {
    ALLOWED_PROC_TARGETS.iter().any(|target| path == Path::new(target))
}

/// The changes of a mount (mount_setattr(2)).
#[derive(Clone, Copy, Debug, Default)]
pub struct MountChange<'a> {
    /// The `MOUNT_ATTR_*` flags to set, without `MOUNT_ATTR_IDMAP`.
    pub attributes: u64,
    /// The `MOUNT_ATTR_*` flags to clear.
    pub clear: u64,
    /// The propagation: `MS_PRIVATE`, `MS_SLAVE` or `MS_SHARED`; 0 leaves it unchanged.
    pub propagation: u64,
    /// The user namespace of an idmapped mount; only for mounts that are not attached yet.
    pub user_namespace: Option<BorrowedFd<'a>>,
}

/// Copies the mount at a path, or with `recursive` the tree of mounts; the copy is not attached yet.
pub fn clone_tree(path: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, recursive);
    Ok(open_tree(CWD, path, flags)?)
}

/// Changes a mount, or with `recursive` a tree of mounts.
pub fn change_attributes(mount: impl AsFd, recursive: bool, change: &MountChange) -> io::Result<()> {
    let (idmap, userns_fd) = match change.user_namespace {
        Some(namespace) => (libc::MOUNT_ATTR_IDMAP, namespace.as_raw_fd().unsigned_abs().into()),
        None => (0, 0),
    };
    let attributes = libc::mount_attr {
        attr_set: change.attributes | idmap,
        attr_clr: change.clear,
        propagation: change.propagation,
        userns_fd,
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    let (number, empty, size) = (mount.as_fd().as_raw_fd(), c"".as_ptr(), size_of::<libc::mount_attr>());
    // SAFETY: both descriptors are open; the kernel reads the empty string and `attributes`, whose true size is passed, and
    // both live until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_mount_setattr, number, empty, flags, &raw const attributes, size) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a mount to a path.
pub fn attach(mount: impl AsFd, at: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Attaches a mount to an open directory or file, which no path needs to lead to.
pub fn attach_to_fd(mount: impl AsFd, at: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", at, "", flags)?)
}
