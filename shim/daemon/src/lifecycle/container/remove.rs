//! Removes a container from the guest.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::request::{ask, is_unknown};
use crate::lifecycle::volume::shared::mounting_processes;
use nacelle_base::{Classify, ContainerId, FailureKind};
use nacelle_model::container::ContainerConfig;
use nacelle_model::record::PodRecord;
use nacelle_pod::client::PodClient;
use std::sync::Arc;
use std::time::Duration;

/// Pause between attempts to remove a container that is still being created.
const PAUSE: Duration = Duration::from_millis(50);

/// The failure of a removal.
#[derive(Debug)]
pub(crate) struct RemoveFailure {
    /// What has failed.
    pub(crate) error: LifecycleError,
    /// Whether the guest may still have the container.
    pub(crate) is_in_guest: bool,
}

/// Removes the container. It is no error if the guest does not know it.
pub(crate) async fn remove(
    services: Arc<NodeServices>,
    client: Option<PodClient>,
    pod: PodRecord,
    record: Arc<ContainerConfig>,
    id: ContainerId,
) -> Result<(), RemoveFailure> {
    // Without a VM there is nothing in a guest to remove.
    let Some(client) = client else { return Ok(()) };
    let removed = remove_from_guest(&services, client, &id).await;
    removed.map_err(|error| RemoveFailure { error, is_in_guest: true })?;
    // Copied-in volumes are left over only if a daemon died while it created the container.
    for process in mounting_processes(&pod, &record) {
        let detached = services.pods.detach(&services.pod_dir(&pod.id), *process, id.as_str()).await;
        let detached = detached.map_err(at("detach the volumes of the container"));
        detached.map_err(|error| RemoveFailure { error, is_in_guest: false })?;
    }
    Ok(())
}

async fn remove_from_guest(services: &NodeServices, client: PodClient, id: &ContainerId) -> Result<(), LifecycleError> {
    let deadline = tokio::time::Instant::now() + services.request_timeout();
    loop {
        match ask("remove the container", services.request_timeout(), client.remove_container(id.as_str())).await {
            Err(error) if is_unknown(&error) => return Ok(()),
            // The guest still executes the creation for an earlier daemon; the removal succeeds once that is complete.
            Err(error)
                if error.kind() == FailureKind::Conflict
                    && client.peer().is_compatible()
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(PAUSE).await;
            }
            other => return other,
        }
    }
}
