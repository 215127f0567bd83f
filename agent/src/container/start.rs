//! Starts a created container: its first process, which waits on a socket of libcontainer, executes the program. A container whose VM was
//! restored has executed it before the VM was saved: its processes continue.

use nacelle_base::retry::retry_interrupted;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::error::AgentError;
use super::pod::AgentPod;
use crate::paths;

impl AgentPod {
    /// Starts a created or suspended container. Succeeds without effect if it was started before.
    pub async fn start_container(self: Arc<Self>, id: String) -> Result<(), AgentError> {
        self.with_container_lock(&id, async {
            let container = self.find_container(&id)?;
            if container.started.load(Ordering::Acquire) && !container.is_suspended() {
                return Ok(());
            }
            if container.init.exit().is_some() {
                return Err(AgentError::NotRunning { id: id.clone() });
            }
            let failed = AgentError::io("start the first process", &id);
            // A container that may trace must not begin to run while another is created: it would not be frozen.
            let _no_creation = if container.has_trace_rights() { Some(self.trace_lock.write().await) } else { None };
            if container.is_suspended() {
                container.resume();
                return Ok(());
            }
            // The container's first process listens on this socket: connecting does not wait.
            let path = Path::new(paths::CONTAINERS).join(&id).join("notify.sock");
            let mut socket = retry_interrupted(|| UnixStream::connect(&path)).map_err(&failed)?;
            socket.write_all(b"start container").map_err(&failed)?;
            container.started.store(true, Ordering::Release);
            Ok(())
        })
        .await
    }
}
