//! Holds a process that was just made, on the child's side and on the agent's.

use std::os::fd::OwnedFd;

use crate::sys;

/// A process that a child has made and not yet handed over.
#[derive(Debug)]
pub(super) struct CreatedProcess {
    /// The PID in the agent's PID namespace.
    pub pid: i32,
    /// `None` if the process has ended already.
    pub pidfd: Option<OwnedFd>,
    /// The master of the process's terminal.
    pub terminal: Option<OwnedFd>,
}

/// A process that the agent has received and not yet registered.
///
/// Dropping it kills the process, so that no failure before its registration leaves a program running that no host knows.
#[derive(Debug)]
pub struct NewProcess {
    /// The PID in the agent's PID namespace.
    pub pid: i32,
    /// `None` if the process has ended already.
    pub(super) pidfd: Option<OwnedFd>,
    /// The master of the process's terminal.
    pub terminal: Option<OwnedFd>,
}

impl NewProcess {
    /// Takes the process over: returns its PID, and its pidfd unless it has ended already. It is no longer killed.
    pub fn release(mut self) -> (i32, Option<OwnedFd>) {
        (self.pid, self.pidfd.take())
    }
}

impl Drop for NewProcess {
    fn drop(&mut self) {
        if let Some(pidfd) = self.pidfd.take() {
            kill_unclaimed(self.pid, &pidfd);
        }
    }
}

/// Kills a process whose request has failed. Its parent reaps it.
pub(super) fn kill_unclaimed(pid: i32, pidfd: &OwnedFd) {
    match sys::pidfd_signal(pidfd, libc::SIGKILL) {
        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
            tracing::error!(%error, pid, "cannot kill a process whose request has failed");
        }
        _ => {}
    }
}
