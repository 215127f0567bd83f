//! Records the end of a machine once, wakes the threads that wait for it, and kills a machine that does not end in time.
//! Any thread may call it; the lock is held only to read or record the end.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nacelle_base::Chain;

use crate::EngineError;
use crate::machine::{MachineExit, MachineStatus, StopMode};

/// The limit for a killed machine to end; it, or its devices, may be in a write to a slow disk.
const KILL_LIMIT: Duration = Duration::from_secs(60);

/// The end of a machine. The first call that sets it counts.
#[derive(Default)]
pub(crate) struct ExitLatch {
    exit: Mutex<Option<MachineExit>>,
    changed: Condvar,
}

impl ExitLatch {
    /// Returns how the machine has ended, or `None` while it runs.
    pub fn get(&self) -> Option<MachineExit> {
        self.exit.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records the end, unless one is recorded already.
    pub fn set(&self, exit: MachineExit) {
        self.exit.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(exit);
        self.changed.notify_all();
    }

    /// Waits for the end; returns `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        // The timeout is cut to a day, because the deadline might overflow.
        let until = Instant::now() + timeout.min(Duration::from_secs(86_400));
        let mut exit = self.exit.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if exit.is_some() {
                return exit.clone();
            }
            let left = until.checked_duration_since(Instant::now())?;
            exit = self.changed.wait_timeout(exit, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the status of the machine; `paused` counts while it has not ended.
    pub fn status(&self, paused: bool) -> MachineStatus {
        match self.get() {
            Some(exit) => MachineStatus::Exited(exit),
            None if paused => MachineStatus::Paused,
            None => MachineStatus::Running,
        }
    }

    /// Waits for a graceful end if `how` allows one, then kills the machine, which is process `pid`, and waits for its end.
    pub fn stop(
        &self,
        how: StopMode,
        pid: u32,
        kill: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<MachineExit, EngineError> {
        if let StopMode::Shutdown { grace } = how
            && let Some(exit) = self.wait(grace)
        {
            return Ok(exit);
        }
        kill()?;
        self.wait(KILL_LIMIT).ok_or(EngineError::NotEnding { pid, limit: KILL_LIMIT })
    }
}

/// Completes the drop of a machine: logs a failed kill, and joins the warden, which has released the resources.
pub(crate) fn finish_drop(killed: Result<MachineExit, EngineError>, warden: Option<JoinHandle<()>>) {
    if let Err(error) = killed {
        tracing::error!("a VM is leaked: {}", Chain(&error));
    } else if warden.is_some_and(|warden| warden.join().is_err()) {
        tracing::error!("BUG: the thread that watches a VM panicked");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExitKind;

    #[test]
    fn the_first_exit_counts_and_wakes_the_waiting_threads() {
        let ended = ExitLatch::default();
        assert_eq!(ended.wait(Duration::ZERO), None);
        let exit = |how| MachineExit { how, console_tail: String::new() };
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ended.wait(Duration::MAX));
            ended.set(exit(ExitKind::Killed));
            ended.set(exit(ExitKind::Shutdown));
            assert_eq!(waiter.join().unwrap(), Some(exit(ExitKind::Killed)));
        });
        assert_eq!(ended.get(), Some(exit(ExitKind::Killed)));
    }
}
