//! Opens pidfds, sends signals through them, and finds their processes in /proc. Unlike a pid, a pidfd never refers to another process later.
#![allow(unsafe_code)] // reason: pidfd_send_signal has no safe wrapper that takes real-time signals.

use rustix::process::{Pid, PidfdFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Opens a pidfd of the process that has this pid now. Fails with ESRCH if there is none, or if the number is that of a
/// thread that leads no process, because then the process that had it is gone.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    let pid = Some(pid)
        .filter(|pid| *pid > 0)
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| match errno.raw_os_error() {
        // pidfd_open(2) fails with EINVAL (since Linux 6.15 ENOENT) for a thread that leads no thread group; this includes
        // a process that is being reaped.
        libc::EINVAL | libc::ENOENT => io::Error::from_raw_os_error(libc::ESRCH),
        number => io::Error::from_raw_os_error(number),
    })
}

/// Sends a signal to the process of a pidfd. Fails with ESRCH if the process has ended and was reaped.
pub fn pidfd_signal(pidfd: impl AsFd, signal: i32) -> io::Result<()> {
    let (pidfd, info) = (pidfd.as_fd(), std::ptr::null::<libc::siginfo_t>());
    // SAFETY: `pidfd` is open until the call returns; a null siginfo is allowed and means "as kill(2)".
    match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, info, 0u32) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the number of the process of a pidfd in /proc, which differs from its pid if /proc is that of a PID namespace above this
/// process's. Fails with ESRCH if the process has ended and was reaped.
pub fn pid_in_proc(pidfd: impl AsFd) -> io::Result<i32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd()))?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    pid.filter(|pid| *pid > 0).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_pidfd_outlives_its_process() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let pidfd = pidfd_open(pid).unwrap();
        assert_eq!(pid_in_proc(&pidfd).unwrap(), pid);
        // A real-time signal, which ends a process that does not handle it.
        let signal = libc::SIGRTMIN() + 1;
        pidfd_signal(&pidfd, signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal));
        assert_eq!(pidfd_signal(&pidfd, libc::SIGKILL).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(pid_in_proc(&pidfd).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        for none in [0, -1, pid] {
            assert_eq!(pidfd_open(none).unwrap_err().raw_os_error(), Some(libc::ESRCH), "{none}");
        }
    }
}
