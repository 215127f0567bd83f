//! Lowers the priority of a thread, so that it uses a disk and a CPU only while no other thread does.

#![allow(unsafe_code, reason = "ioprio_set has no safe interface")]

use std::io;

/// `IOPRIO_WHO_PROCESS` of linux/ioprio.h: one thread, by its id.
const IOPRIO_WHO_PROCESS: libc::c_int = 1;
/// `IOPRIO_CLASS_IDLE`, shifted by `IOPRIO_CLASS_SHIFT`.
const IOPRIO_IDLE: libc::c_int = 3 << 13;
/// The lowest CPU priority.
const LOWEST_PRIORITY: i32 = 19;

/// Gives the calling thread the lowest CPU priority and the I/O class "idle". A thread cannot raise its priority again without
/// CAP_SYS_NICE, so a thread of a pool must not call this.
pub fn lower_thread_priority() -> io::Result<()> {
    // Linux takes the id 0 for the calling thread, in both calls.
    rustix::process::setpriority_process(None, LOWEST_PRIORITY)?;
    // SAFETY: ioprio_set takes three integers and accesses no memory of this process.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_gets_the_priority() {
        let priorities = || {
            // SAFETY: ioprio_get takes two integers and accesses no memory of this process.
            let io = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0) };
            (rustix::process::getpriority_process(None).unwrap(), io)
        };
        let before = priorities();
        let lowered = std::thread::spawn(move || {
            lower_thread_priority().unwrap();
            priorities()
        });
        assert_eq!(lowered.join().unwrap(), (LOWEST_PRIORITY, IOPRIO_IDLE.into()));
        assert_eq!(priorities(), before);
        assert_ne!(before.1, i64::from(IOPRIO_IDLE));
    }
}
