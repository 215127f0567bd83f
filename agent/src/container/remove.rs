//! Removes a container: kills its processes, then removes its cgroup, its root and its huge pages.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::AgentError;
use super::pod::{AgentPod, check_id};
use super::process::ContainerProcess;
use super::root;
use crate::cgroup;

/// The time that killed processes have to end.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(30);

impl AgentPod {
    /// Kills the processes of a container and removes it. Succeeds if there is no such container.
    ///
    /// A container that could not be removed completely stays in the table, so that the next attempt continues.
    pub async fn remove_container(self: Arc<Self>, id: String) -> Result<(), AgentError> {
        check_id(&id)?;
        self.with_container_lock(&id, async {
            let Ok(container) = self.find_container(&id) else { return Ok(()) };
            // They use the container's image.
            let shells = cgroup::container_shells_path(&id);
            let ended = tokio::task::spawn_blocking(move || cgroup::kill_and_remove(&shells, KILL_TIMEOUT)).await?;
            ended.map_err(AgentError::io("end the commands in the guest that use the image", &id))?;
            kill_and_wait(&id, &container.cgroup, &container.init).await?;
            let path = container.cgroup.clone();
            let (name, pod) = (id.clone(), Arc::clone(&self));
            let remove = move || (cgroup::remove(&path), root::remove_root(&name), pod.huge_pages.release(&name));
            let removed = tokio::task::spawn_blocking(remove).await?;
            removed.0.map_err(AgentError::file("remove the cgroup", &container.cgroup, &id))?;
            removed.1.map_err(|source| AgentError::Root { id: id.clone(), source })?;
            removed.2.map_err(|source| AgentError::HugePages { id: id.clone(), source })?;
            self.lock_state().containers.remove(&id);
            Ok(())
        })
        .await
    }
}

/// Kills all processes of a container and waits until they have ended.
async fn kill_and_wait(id: &str, path: &Path, init: &ContainerProcess) -> Result<(), AgentError> {
    let failed = AgentError::file("kill the processes in the cgroup", path, id);
    cgroup::kill_processes(path).map_err(&failed)?;
    let alive = || AgentError::StillAlive { id: id.to_owned(), seconds: KILL_TIMEOUT.as_secs() };
    let deadline = Instant::now() + KILL_TIMEOUT;
    init.wait(KILL_TIMEOUT).await.ok_or_else(alive)?;
    while cgroup::is_populated(path) {
        if Instant::now() >= deadline {
            return Err(alive());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        // An exec that was being made may have entered the cgroup since.
        cgroup::kill_processes(path).map_err(&failed)?;
    }
    Ok(())
}
