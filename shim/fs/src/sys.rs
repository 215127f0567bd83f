//! Wraps the system calls of this crate that have no safe wrapper: fork and _exit.
#![allow(unsafe_code)] // reason: fork and _exit have no safe wrapper in nix or std.

use nix::unistd::{ForkResult, Pid};
use std::io;

/// Forks this process; returns `None` in the child. Fails if the process has more than one thread.
pub(crate) fn fork() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("the process has more than one thread"));
    }
    // SAFETY: there is no other thread, as was just checked, so no thread holds a lock that the child would wait for: the
    // child may do whatever this process may.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Ends a process that [`fork`] has created.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: ends the process; no exit handler or buffer of the parent, of which this is a copy, is run or flushed.
    unsafe { libc::_exit(code) }
}
