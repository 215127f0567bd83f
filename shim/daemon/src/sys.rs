//! Owns: the calls that neither nix nor std has a safe wrapper for.
#![allow(unsafe_code)] // reason: mallopt, variables of the environment and descriptors of whoever started the program.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Bytes: what is at least as large has memory of its own, which goes back when it is freed; and so does what is free
/// at the end of a heap.
const LARGE: i32 = 128 << 10;

/// Has the C library give memory back when it is freed. By itself it learns from the buffers of a pull that such sizes
/// are usual, and keeps tens of MiB for the next one.
pub(crate) fn give_memory_back() {
    for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: mallopt only sets a number that later calls of malloc and free read; it cannot fail for these.
        unsafe { libc::mallopt(parameter, LARGE) };
    }
}

/// Removes variables of the environment, for this process and those that it starts. Only for a process of one thread.
pub(crate) fn forget_variables(names: &[&str]) {
    for name in names {
        // SAFETY: the caller says that there is no other thread, so nobody reads the environment meanwhile.
        unsafe { std::env::remove_var(name) };
    }
}

/// A descriptor that whoever started this process left open for it. Programs that this one starts do not get it. To be
/// called before anything is opened, and once for each number.
pub(crate) fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: fcntl with F_SETFD takes integers and touches no memory; of a number that is not open it says so.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and nobody else here has it: the caller says that nothing was opened yet.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
