//! Lets an exec run on when its client has gone, as other runtimes do: nothing is killed because a connection broke. The exec ends by
//! itself or with its container.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::error::AgentError;
use super::pod::{AgentPod, check_id};
use super::record::{ExecEntry, GuestContainer};

/// The most execs of a container that run without a client. A further one is killed when its client goes.
const MAX_ABANDONED_EXECS: usize = 1024;

impl AgentPod {
    /// Ends the input of an exec, and drops its output from now on. An exec whose streams were not all connected before is killed:
    /// its client left before the session began. One that does not exist yet is not started. Must be called inside a runtime.
    pub fn abandon_exec(&self, id: &str, exec_id: &str) -> Result<(), AgentError> {
        check_id(exec_id)?;
        // Everything of a container that was removed has ended.
        let Ok(container) = self.find_container(id) else { return Ok(()) };
        let entry = self.exec_entry(&container, exec_id);
        match entry.process.get() {
            Some(_) if entry.abandoned.load(Ordering::SeqCst) => Ok(()),
            Some(process) if process.stdio.was_connected() && mark_abandoned(&container, &entry) => {
                tracing::debug!(id, exec_id, "an exec runs on without its client");
                process.discard_streams();
                Ok(())
            }
            _ => self.send_signal(id, exec_id, libc::SIGKILL.unsigned_abs(), false),
        }
    }
}

/// Returns false if too many execs of the container run without a client.
fn mark_abandoned(container: &GuestContainer, entry: &ExecEntry) -> bool {
    // The lock makes counting and marking one step.
    let execs = container.lock_execs();
    let runs = |entry: &&Arc<ExecEntry>| entry.abandoned.load(Ordering::SeqCst) && !entry.has_ended();
    let has_room = execs.values().filter(runs).count() < MAX_ABANDONED_EXECS;
    entry.abandoned.fetch_or(has_room, Ordering::SeqCst) || has_room
}
