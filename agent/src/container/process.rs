//! Keeps a process that the host asked for: the first process of a container, or an exec.
//!
//! A `Process` outlives the kernel's process: its exit status and its streams stay until the container is removed. Signals go
//! through a pidfd, so that they never reach another process that has got the same PID.

use nacelle_proto::agent::Exit;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, watch};

use crate::stdio::Stdio;
use crate::{cgroup, sys};

/// What a process is to its container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessRole {
    /// The container's first process, whose exit is the container's. `kills_cgroup_on_exit`: no PID namespace kills the container's
    /// other processes then.
    First { kills_cgroup_on_exit: bool },
    /// A command that was started in the running container.
    Exec,
    /// A command in the guest, alone with its children in its cgroup, which end with it.
    GuestShell,
}

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
    /// The cgroup of the process's container, or of the process in the guest.
    cgroup: PathBuf,
    role: ProcessRole,
}

impl ContainerProcess {
    /// A process that runs.
    pub(super) fn new(
        pid: i32,
        pidfd: Option<OwnedFd>,
        stdio: Stdio,
        cgroup: PathBuf,
        role: ProcessRole,
    ) -> ContainerProcess {
        ContainerProcess { pid, pidfd, exit: watch::Sender::new(None), stdio, cgroup, role }
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

    /// Waits until the process has ended.
    pub(super) async fn wait_for_exit(&self) {
        // The sender is in this value.
        let _ = self.exit.subscribe().wait_for(Option::is_some).await;
    }

    /// Sends a signal. Succeeds without effect if the process has ended.
    pub(super) fn send_signal(&self, signal: i32) -> io::Result<()> {
        match self.pidfd.as_ref().filter(|_| self.exit().is_none()).map(|pidfd| sys::pidfd_signal(pidfd, signal)) {
            None => Ok(()),
            Some(Err(error)) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            Some(result) => result,
        }
    }

    /// Ends the input and drops the output, in the background, until the process and its children have closed the streams. Holds the
    /// permit for as long.
    pub(super) fn discard_streams(self: &Arc<Self>, permit: OwnedSemaphorePermit) {
        let process = Arc::clone(self);
        tokio::spawn(async move {
            process.stdio.discard().await;
            drop(permit);
        });
    }

    /// Records the end of the process. `status` is the wait status of waitpid(2).
    pub(super) fn record_exit(&self, status: i32) {
        let signaled = libc::WIFSIGNALED(status);
        let code = if signaled { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) };
        // A container counts as OOM-killed once any of its processes was, whatever its exit code, as with containerd. An exec does
        // only if it was killed itself, or is a shell that reports that its child was.
        let counts = matches!(self.role, ProcessRole::First { .. }) || code == 128 + libc::SIGKILL;
        let out_of_memory = if counts { cgroup::oom_kill_cause(&self.cgroup) } else { None };
        let exit = Exit {
            code: code.unsigned_abs(),
            oom_killed: out_of_memory.is_some(),
            finished_at_unix_nanos: unix_nanos_now(),
            guest_out_of_memory: out_of_memory == Some(cgroup::OutOfMemory::Guest),
        };
        self.kill_remaining();
        self.exit.send_replace(Some(exit));
        // Again for a command that has entered the cgroup meanwhile. A later one finds that the container has ended.
        self.kill_remaining();
    }

    /// Kills what is left in the cgroup when this process ends, if it is that of a process in the guest, or of the first process of a
    /// container that has no PID namespace of its own, which would do that.
    fn kill_remaining(&self) {
        let kills = match self.role {
            ProcessRole::First { kills_cgroup_on_exit } => kills_cgroup_on_exit,
            ProcessRole::Exec => false,
            ProcessRole::GuestShell => true,
        };
        if kills && let Err(error) = cgroup::kill_processes(&self.cgroup) {
            tracing::warn!(%error, "cannot kill the remaining processes of a container");
        }
    }
}

fn unix_nanos_now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cgroup's processes have had an OOM kill: any exit of a container is one, but only a killed exec.
    #[test]
    fn an_oom_kill_of_a_child_is_reported_of_the_container() {
        let cgroup = tempfile::tempdir().unwrap();
        let first = ProcessRole::First { kills_cgroup_on_exit: false };
        let (exit_1, sigkill) = (1 << 8, libc::SIGKILL);
        for (events, role, status, oom_killed) in [
            ("oom 1\noom_kill 1\n", first, exit_1, true),
            ("oom 1\noom_kill 1\n", first, 0, true),
            ("oom 1\noom_kill 1\n", first, sigkill, true),
            ("oom 1\noom_kill 0\n", first, exit_1, false),
            ("oom 1\noom_kill 1\n", ProcessRole::Exec, exit_1, false),
            ("oom 1\noom_kill 1\n", ProcessRole::Exec, 137 << 8, true),
        ] {
            std::fs::write(cgroup.path().join("memory.events"), events).unwrap();
            let process = ContainerProcess::new(1, None, Stdio::default(), cgroup.path().to_owned(), role);
            process.record_exit(status);
            assert_eq!(process.exit().unwrap().oom_killed, oom_killed, "{events:?} {role:?} {status}");
        }
    }
}
