//! Owns: taking over descriptors that this process was started with, and the time that another process has used.
#![allow(unsafe_code)] // reason: a descriptor is only a number where it comes from.

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Takes descriptors over by their numbers, which must be distinct and above 2; later children do not inherit them. To be called
/// once, at the start of the process, before it opens anything.
pub fn adopt(numbers: Vec<RawFd>) -> io::Result<Vec<OwnedFd>> {
    // SAFETY: the caller says that the numbers are distinct, and at its start a process holds no other descriptors than those that it
    // was started with: nothing in it owns these. A number that is not open is found out by fcntl, which fails.
    let adopted: Vec<OwnedFd> = numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect();
    for fd in &adopted {
        if let Err(error) = fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
            // One that is not open must not be closed.
            adopted.into_iter().for_each(std::mem::forget);
            return Err(error.into());
        }
    }
    Ok(adopted)
}

/// The processor time that a process, one of our children, has used, in nanoseconds.
pub fn processor_nanos(pid: u32) -> Option<u64> {
    let clock = nix::time::clock_getcpuclockid(nix::unistd::Pid::from_raw(pid.cast_signed())).ok()?;
    let used = clock.now().ok()?;
    let seconds = u64::try_from(used.tv_sec()).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(u64::try_from(used.tv_nsec()).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_lives_has_used_some_time() {
        assert!(processor_nanos(std::process::id()).unwrap() > 0);
        // Beyond the kernel's largest number of a process.
        assert_eq!(processor_nanos(1 << 23), None);
    }
}
