//! Takes over descriptors that this process was started with, locks files, and reads the CPU time of other processes.
#![allow(unsafe_code)] // reason: a descriptor is only a number where it comes from.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::libc;
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use tokio::io::unix::AsyncFd;

/// The first byte of the lock range of a disk: beyond the data of any disk, and beyond the bytes that QEMU locks.
const LOCK_OFFSET: libc::off_t = 1 << 62;

/// Takes ownership of descriptors by their numbers, which must be distinct and above 2, and sets close-on-exec. Must be called
/// once, at the start of the process, before it opens anything.
pub fn adopt_descriptors(numbers: Vec<RawFd>) -> io::Result<Vec<OwnedFd>> {
    // SAFETY: the caller guarantees that the numbers are distinct, and at its start a process holds no other descriptors than
    // those that it was started with: nothing in it owns these. For a number that is not open, fcntl fails below.
    let adopted: Vec<OwnedFd> = numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect();
    for fd in &adopted {
        if let Err(error) = fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
            // A number that is not open must not be closed.
            adopted.into_iter().for_each(std::mem::forget);
            return Err(error.into());
        }
    }
    Ok(adopted)
}

/// Registers a descriptor with the runtime.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` closes the number that it owns when it is dropped, not before, and gives out no other.
    Ok(unsafe { AsyncFd::register(fd)? })
}

/// Returns whether the file was opened for writing.
pub fn is_writable(file: &File) -> io::Result<bool> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    Ok(flags & OFlag::O_ACCMODE == OFlag::O_RDWR)
}

/// The compatibility of a lock with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Exclusive.
    Exclusive,
    /// Compatible with other readers.
    SharedReaders,
    /// Compatible with other VMs that share the disk.
    SharedWriters,
}

/// Locks a file for as long as it, or a copy of its descriptor, is open. Returns false if another process holds an incompatible
/// lock. One byte is for readers, and one for sharers: each takes its own byte first, then checks the other one, so that of a
/// reader and a sharer at the same time at most one succeeds.
pub fn lock_file(file: &File, lock: Lock) -> io::Result<bool> {
    let (kind, byte, length, other) = match lock {
        Lock::Exclusive => (libc::F_WRLCK, LOCK_OFFSET, 2, None),
        Lock::SharedReaders => (libc::F_RDLCK, LOCK_OFFSET, 1, Some(LOCK_OFFSET + 1)),
        Lock::SharedWriters => (libc::F_RDLCK, LOCK_OFFSET + 1, 1, Some(LOCK_OFFSET)),
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&lock_range(kind, byte, length))) {
        Ok(_) => {}
        Err(Errno::EAGAIN | Errno::EACCES) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    }
    let Some(other) = other else { return Ok(true) };
    let mut conflicting = lock_range(libc::F_WRLCK, other, 1);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut conflicting))?;
    let is_free = i32::from(conflicting.l_type) == libc::F_UNLCK;
    if !is_free {
        fcntl(file, FcntlArg::F_OFD_SETLK(&lock_range(libc::F_UNLCK, byte, length)))?;
    }
    Ok(is_free)
}

fn lock_range(kind: libc::c_int, start: libc::off_t, length: libc::off_t) -> libc::flock {
    let short = |number: libc::c_int| libc::c_short::try_from(number).unwrap_or_default();
    libc::flock { l_type: short(kind), l_whence: short(libc::SEEK_SET), l_start: start, l_len: length, l_pid: 0 }
}

/// Returns the CPU time of a child process in nanoseconds.
pub fn cpu_time_nanos(pid: u32) -> Option<u64> {
    let clock = nix::time::clock_getcpuclockid(nix::unistd::Pid::from_raw(pid.cast_signed())).ok()?;
    let used = clock.now().ok()?;
    let seconds = u64::try_from(used.tv_sec()).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(u64::try_from(used.tv_nsec()).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_lock_lasts_as_long_as_the_file_is_open() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, "").unwrap();
        let write = || File::options().read(true).write(true).open(&path).unwrap();
        let read = || File::open(&path).unwrap();
        assert!(is_writable(&write()).unwrap() && !is_writable(&read()).unwrap());
        let readers = [read(), read()];
        assert!(readers.iter().all(|reader| lock_file(reader, Lock::SharedReaders).unwrap()));
        let writer = write();
        assert!(!lock_file(&writer, Lock::Exclusive).unwrap() && !lock_file(&writer, Lock::SharedWriters).unwrap());
        drop(readers);
        assert!(lock_file(&writer, Lock::Exclusive).unwrap());
        let copy = writer.try_clone().unwrap();
        drop(writer);
        assert!(
            [Lock::Exclusive, Lock::SharedReaders, Lock::SharedWriters]
                .iter()
                .all(|lock| !lock_file(&write(), *lock).unwrap())
        );
        drop(copy);
        assert!(lock_file(&write(), Lock::Exclusive).unwrap());
        let sharers = [write(), write()];
        assert!(sharers.iter().all(|sharer| lock_file(sharer, Lock::SharedWriters).unwrap()));
        // A failed lock holds nothing.
        let refused = [(read(), Lock::SharedReaders), (write(), Lock::Exclusive)];
        assert!(refused.iter().all(|(file, lock)| !lock_file(file, *lock).unwrap()));
        drop(sharers);
        assert!(lock_file(&write(), Lock::Exclusive).unwrap());
    }

    #[test]
    fn a_running_process_has_cpu_time() {
        assert!(cpu_time_nanos(std::process::id()).unwrap() > 0);
        // Beyond the kernel's largest PID.
        assert_eq!(cpu_time_nanos(1 << 23), None);
    }
}
