//! Keeps a process that the host asked for: the first process of a container, or an exec.
//!
//! A `Process` outlives the kernel's process: its exit status and its streams stay until the container is removed. Signals go
//! through a pidfd, so that they never reach another process that has got the same PID.

use nacelle_proto::agent::Exit;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

use crate::stdio::Stdio;
use crate::{cgroup, sys};

/// The first process of a container, or an exec.
#[derive(Debug)]
pub struct ContainerProcess {
    /// The PID in the agent's PID namespace.
    pub pid: i32,
    /// `None` if the process had ended before its pidfd could be opened.
    pub(super) pidfd: Option<OwnedFd>,
    exit: watch::Sender<Option<Exit>>,
    /// The agent's ends of the process's streams.
    pub stdio: Stdio,
    /// The cgroup of the process's container.
    cgroup: PathBuf,
    kills_cgroup_on_exit: bool,
}

impl ContainerProcess {
    /// A process that runs. `kills_cgroup_on_exit`: the exit of this process ends its container, and no PID namespace kills the
    /// container's other processes then.
    pub(super) fn new(
        pid: i32,
        pidfd: Option<OwnedFd>,
        stdio: Stdio,
        cgroup: PathBuf,
        kills_cgroup_on_exit: bool,
    ) -> ContainerProcess {
        ContainerProcess { pid, pidfd, exit: watch::Sender::new(None), stdio, cgroup, kills_cgroup_on_exit }
    }

    /// Returns how the process ended, or `None` while it runs.
    pub fn exit(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Waits until the process has ended; returns `None` after `limit`.
    pub async fn wait(&self, limit: Duration) -> Option<Exit> {
        let mut receiver = self.exit.subscribe();
        match tokio::time::timeout(limit, receiver.wait_for(Option::is_some)).await {
            Ok(Ok(exit)) => *exit,
            _ => None,
        }
    }

    /// Sends a signal. Succeeds without effect if the process has ended.
    pub(super) fn send_signal(&self, signal: i32) -> io::Result<()> {
        match self.pidfd.as_ref().filter(|_| self.exit().is_none()).map(|pidfd| sys::pidfd_signal(pidfd, signal)) {
            None => Ok(()),
            Some(Err(error)) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            Some(result) => result,
        }
    }

    /// Records the end of the process. `status` is the wait status of waitpid(2).
    pub(super) fn record_exit(&self, status: i32) {
        let signaled = libc::WIFSIGNALED(status);
        let code = if signaled { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) };
        // Either the process was killed, or it is a shell that reports that its child was.
        let killed = code == 128 + libc::SIGKILL;
        let out_of_memory = if killed { cgroup::oom_kill_cause(&self.cgroup) } else { None };
        let exit = Exit {
            code: code.unsigned_abs(),
            oom_killed: out_of_memory.is_some(),
            finished_at_unix_nanos: unix_nanos_now(),
            guest_out_of_memory: out_of_memory == Some(cgroup::OutOfMemory::Guest),
        };
        if self.kills_cgroup_on_exit
            && let Err(error) = cgroup::kill_processes(&self.cgroup)
        {
            tracing::warn!(%error, "cannot kill the remaining processes of a container");
        }
        self.exit.send_replace(Some(exit));
    }
}

fn unix_nanos_now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
