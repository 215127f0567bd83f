//! Owns: the system calls of this crate that have no safe wrapper: fork, and the mounts of Linux 5.12.
#![allow(unsafe_code)] // reason: fork, open_tree, mount_setattr and move_mount have no safe wrapper in nix or std.

use nix::unistd::{ForkResult, Pid};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const OPEN_TREE_CLONE: libc::c_uint = 1;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
const AT_RECURSIVE: libc::c_int = 0x8000;
const READ_ONLY: u64 = 1;
const NO_DEVICES: u64 = 4;

/// `struct mount_attr`.
#[repr(C)]
#[derive(Default)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Whether mounts hear of those that the node makes below the place that they were taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hears {
    Nothing,
    Node,
}

/// Makes a second process of this one; none: this is it. There must be one thread only.
pub(crate) fn fork() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("there is a second thread"));
    }
    // SAFETY: there is no other thread, as was just seen, so nobody holds a lock that the child would wait for: it may do
    // whatever this process may.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Ends a process that [`fork`] has made.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: ends the process; nothing of the parent's, of which this is a copy, is run or flushed.
    unsafe { libc::_exit(code) }
}

/// A copy of the mounts from `path` on, which lies nowhere yet.
pub(crate) fn copy_tree(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | AT_RECURSIVE as libc::c_uint;
    // SAFETY: the path is a C string that lives until the call returns; the rest are integers.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Gives a copied tree its ways: no devices, and what is asked for.
pub(crate) fn set(tree: BorrowedFd, read_only: bool, all_read_only: bool, hears: Hears) -> io::Result<()> {
    let propagation = match hears {
        Hears::Nothing => libc::MS_PRIVATE,
        Hears::Node => libc::MS_SLAVE,
    };
    let whole = if all_read_only { NO_DEVICES | READ_ONLY } else { NO_DEVICES };
    set_attributes(tree, AT_RECURSIVE, &MountAttr { set: whole, propagation, ..MountAttr::default() })?;
    if read_only {
        set_attributes(tree, 0, &MountAttr { set: READ_ONLY, ..MountAttr::default() })?;
    }
    Ok(())
}

fn set_attributes(tree: BorrowedFd, flags: libc::c_int, attributes: &MountAttr) -> io::Result<()> {
    let flags = flags | libc::AT_EMPTY_PATH;
    let (number, empty, size) = (tree.as_raw_fd(), c"".as_ptr(), size_of::<MountAttr>());
    // SAFETY: the descriptor is open; path and attributes live until the call returns, and the kernel only reads them.
    let done = unsafe { libc::syscall(libc::SYS_mount_setattr, number, empty, flags, attributes, size) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Mounts a copied tree.
pub(crate) fn mount_tree(tree: BorrowedFd, at: &Path) -> io::Result<()> {
    let at = CString::new(at.as_os_str().as_bytes())?;
    let (number, empty, here) = (tree.as_raw_fd(), c"".as_ptr(), libc::AT_FDCWD);
    // SAFETY: the descriptor is open; both paths are C strings that live until the call returns.
    let done =
        unsafe { libc::syscall(libc::SYS_move_mount, number, empty, here, at.as_ptr(), MOVE_MOUNT_F_EMPTY_PATH) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
