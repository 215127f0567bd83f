//! Reaps the processes that have ended and records their exits.
//!
//! All processes of containers are children or orphans of the agent. The zygote makes them, so one can end before the agent has
//! registered it: while a `SpawnGuard` exists, exits of unknown processes are kept for `register_process`.

use nacelle_base::retry;
use nix::poll::{PollFd, PollFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::pod::AgentPod;
use super::process::{ContainerProcess, ProcessRole};
use crate::stdio::Stdio;
use crate::sys;
use crate::zygote::NewProcess;

/// While one exists, exits of processes that are not registered are kept.
pub(super) struct SpawnGuard(Arc<AgentPod>);

impl Drop for SpawnGuard {
    fn drop(&mut self) {
        let mut state = self.0.lock_state();
        state.spawning = state.spawning.saturating_sub(1);
        if state.spawning == 0 {
            state.unclaimed_exits.clear();
        }
    }
}

impl AgentPod {
    /// Reaps every process that has ended. Called after each SIGCHLD.
    pub fn reap_processes(&self) {
        let mut state = self.lock_state();
        loop {
            // Under the lock, so that a process is never reaped between being made and being registered.
            let (pid, status) = match sys::reap_one() {
                Some(ended) => ended,
                None => return,
            };
            match state.processes.remove(&pid) {
                Some(process) => process.record_exit(status),
                None if state.spawning > 0 => drop(state.unclaimed_exits.insert(pid, status)),
                None => {}
            }
        }
    }

    /// Call this before the zygote makes a process, and drop the guard after `register_process`.
    pub(super) fn begin_spawn(self: &Arc<Self>) -> SpawnGuard {
        self.lock_state().spawning += 1;
        SpawnGuard(Arc::clone(self))
    }

    /// Enters a new process into the table. The caller has held a `SpawnGuard` since before the process was made.
    pub(super) fn register_process(
        &self,
        new_process: NewProcess,
        stdio: Stdio,
        cgroup: PathBuf,
        role: ProcessRole,
    ) -> Arc<ContainerProcess> {
        let mut state = self.lock_state();
        let (pid, pidfd) = new_process.release();
        // The exit may be that of an earlier process with this PID.
        let unclaimed = state.unclaimed_exits.remove(&pid).filter(|_| pidfd.as_ref().is_none_or(has_exited));
        let process = Arc::new(ContainerProcess::new(pid, pidfd, stdio, cgroup, role));
        match unclaimed {
            Some(status) => process.record_exit(status),
            None => drop(state.processes.insert(pid, Arc::clone(&process))),
        }
        process
    }
}

/// Whether a process has ended, reaped or not: its pidfd is readable (pidfd_open(2)).
fn has_exited(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    // If poll fails, the PID alone decides.
    retry::poll(&mut fds, Some(Instant::now())).map_or(true, |ready| ready > 0)
}
