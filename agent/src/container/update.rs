//! Changes the resource limits of a container that has not ended.

use nacelle_proto::common::UpdateContainerRequest;
use std::path::Path;
use std::sync::Arc;

use super::error::AgentError;
use super::limits;
use super::pod::{AgentPod, check_id};
use crate::huge_pages;

impl AgentPod {
    /// Changes the limits of a container: all of them, or on an error none.
    pub async fn update_container(self: Arc<Self>, request: UpdateContainerRequest) -> Result<(), AgentError> {
        // CPU pinning to the node's CPUs is done by the keeper; it does not apply to containers in a guest.
        let UpdateContainerRequest { id, limits, oom_score_adj, processors: _ } = request;
        check_id(&id)?;
        self.with_container_lock(&id, async {
            let container = self.find_container(&id)?;
            if container.init.exit().is_some() {
                return Err(AgentError::NotRunning { id: id.clone() });
            }
            let (cgroup, pod, id) = (container.cgroup.clone(), Arc::clone(&self), id.clone());
            let limits: Vec<_> = limits.into_iter().map(|limit| (limit.file, limit.value)).collect();
            let change = move || {
                let pages =
                    huge_pages::limits_from_files(limits.iter().map(|(file, value)| (file.as_str(), value.as_str())));
                let before = pod.reserve_huge_pages(&id, &pages)?;
                let changed = limits::change_limits(&cgroup, Path::new("/proc"), &limits, oom_score_adj);
                if changed.is_err() {
                    // The first error is the one to report. Going back to fewer or as many pages is not expected to fail.
                    let _ = pod.huge_pages.set_limits(&id, &before);
                }
                changed.map_err(|source| AgentError::Limits { id, source })
            };
            tokio::task::spawn_blocking(change).await?
        })
        .await
    }
}
