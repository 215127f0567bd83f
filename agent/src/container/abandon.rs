//! Lets an exec run on when its client has disconnected, as other runtimes do. The exec ends by itself or with its container.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::error::AgentError;
use super::pod::{AgentPod, check_id};

/// The most execs of a container whose streams are read without a client, as long as a process holds them. A further one is killed
/// when its client goes.
pub(super) const MAX_ABANDONED_EXECS: usize = 1024;

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
            Some(process) if process.stdio.was_connected() => {
                match Arc::clone(&container.abandoned_execs).try_acquire_owned() {
                    // Another request was first.
                    _ if entry.abandoned.swap(true, Ordering::SeqCst) => Ok(()),
                    Ok(permit) => {
                        tracing::debug!(id, exec_id, "an exec runs on without its client");
                        process.discard_streams(permit);
                        Ok(())
                    }
                    Err(_none_left) => self.send_signal(id, exec_id, libc::SIGKILL.unsigned_abs(), false),
                }
            }
            _ => self.send_signal(id, exec_id, libc::SIGKILL.unsigned_abs(), false),
        }
    }
}
