//! Stops a container in the guest.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::request::{ask, is_unknown};
use nacelle_base::ContainerId;
use nacelle_pod::client::PodClient;
use nacelle_proto::pod as proto;
use std::sync::Arc;
use std::time::Duration;

/// Stops the container and returns how it ended; `None` if the pod process does not know it any more.
pub(crate) async fn stop(
    services: Arc<NodeServices>,
    client: PodClient,
    id: ContainerId,
    grace: Duration,
) -> Result<Option<proto::PodState>, LifecycleError> {
    let limit = grace.saturating_add(services.request_timeout());
    match ask("stop the container", limit, client.stop_container(id.as_str(), grace)).await {
        Ok(()) => ask("ask the pod for its state", services.request_timeout(), client.state()).await.map(Some),
        Err(error) if is_unknown(&error) => Ok(None),
        Err(error) => Err(error),
    }
}
