//! Wraps the system and library calls for which neither nix nor std has a safe function.
#![allow(unsafe_code)] // reason: mallopt, variables of the environment, inherited descriptors, the size of a terminal, AsyncFd and leases.

use nacelle_base::retry::retry_interrupted;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Bytes. Allocations of at least this size get mappings of their own, which are released when they are freed; so is free memory
/// of this size at the end of a heap.
const MAPPING_THRESHOLD: i32 = 128 << 10;

/// Makes the C library release memory to the kernel when it is freed. By default it adapts its threshold to the buffers of a
/// pull, and keeps tens of MiB for the next one.
pub(crate) fn set_malloc_thresholds() {
    for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: mallopt only sets a number that later calls of malloc and free read; it cannot fail for these.
        unsafe { libc::mallopt(parameter, MAPPING_THRESHOLD) };
    }
}

/// The command of fcntl(2) for the signal of a descriptor (asm-generic/fcntl.h).
const F_SETSIG: libc::c_int = 10;

/// Removes variables from the environment of this process and its later children. The process must have a single thread.
pub(crate) fn remove_variables(names: &[&str]) {
    for name in names {
        // SAFETY: the caller guarantees that there is no other thread, so no thread reads the environment meanwhile.
        unsafe { std::env::remove_var(name) };
    }
}

/// Takes a descriptor that this process inherited, and marks it close-on-exec. Must be called before anything is opened, and once
/// for each number.
pub(crate) fn take_inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: fcntl with F_SETFD takes integers and touches no memory; for a number that is not open it returns an error.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and nothing else in this process owns it: the caller guarantees that nothing was opened
    // yet.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Returns the columns and rows of a terminal.
pub(crate) fn window_size(terminal: impl AsFd) -> io::Result<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    retry_interrupted(|| {
        // SAFETY: TIOCGWINSZ writes one winsize, which lives longer than the call.
        match unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    })?;
    Ok((size.ws_col, size.ws_row))
}

/// Registers a descriptor with the async runtime for urgent data, and for what the kernel always reports: errors and the end of both
/// directions.
pub(crate) fn watch_priority(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open and returns the same descriptor for as long as it lives.
    unsafe { AsyncFd::register_with_interest(descriptor, Interest::PRIORITY) }.map_err(Into::into)
}

/// Whether a file has writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriterCheck {
    /// No process has the file open for writing, or mapped shared and writable.
    None,
    /// A process has.
    Open,
    /// The file system has no leases, so the kernel does not say.
    Unsupported,
}

/// Returns whether any process can write a file that this process owns and has open for reading only. The kernel grants a read lease on a file
/// without writers only (fcntl(2), F_SETLEASE); the lease is released at once.
pub(crate) fn check_writers(file: &std::fs::File) -> io::Result<WriterCheck> {
    let set = |command: libc::c_int, value: libc::c_int| {
        // SAFETY: fcntl with these commands takes integers and touches no memory, and the descriptor is open.
        match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // A process that opens the file for writing meanwhile has the kernel send this signal. It is ignored by default; SIGIO would be fatal.
    set(F_SETSIG, libc::SIGURG)?;
    match set(libc::F_SETLEASE, libc::F_RDLCK) {
        Ok(()) => set(libc::F_SETLEASE, libc::F_UNLCK).map(|()| WriterCheck::None),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(WriterCheck::Open),
            Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(WriterCheck::Unsupported),
            _ => Err(error),
        },
    }
}
