//! Owns: the one moment in which a machine ends, and waiting for it.
//! Threads: any; the lock is held for a look only.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::MachineExit;

/// Set once; the first one to set it decides.
#[derive(Default)]
pub(crate) struct Ended {
    exit: Mutex<Option<MachineExit>>,
    changed: Condvar,
}

impl Ended {
    /// How the machine has ended, if it has.
    pub fn get(&self) -> Option<MachineExit> {
        self.exit.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes the end, unless it is noted already.
    pub fn set(&self, exit: MachineExit) {
        self.exit.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(exit);
        self.changed.notify_all();
    }

    /// Waits for the end; `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        // A time beyond what the clock can hold means a day at a time: nobody waits for longer.
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExitKind;

    #[test]
    fn the_first_end_counts_and_wakes_who_waits() {
        let ended = Ended::default();
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
