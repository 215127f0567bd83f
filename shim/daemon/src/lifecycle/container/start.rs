//! Starts a container in the guest.

use super::log::LogPath;
use super::stop::stop;
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::request::ask;
use nacelle_base::{Chain, ContainerId};
use nacelle_pod::client::PodClient;
use std::sync::Arc;
use std::time::Duration;

/// Opens the container's log, if it has one, and starts the container in the guest.
pub(crate) async fn start(
    services: Arc<NodeServices>,
    client: PodClient,
    id: ContainerId,
    log: Option<LogPath>,
) -> Result<(), LifecycleError> {
    if let Some(log) = log {
        log.open_and_send(&services, &client, &id).await?;
    }
    let started = ask("start the container", services.request_timeout(), client.start_container(id.as_str())).await;
    if let Err(LifecycleError::TooSlow { .. }) = &started {
        // After a failed request the container may start all the same, and would then run although it counts as ended.
        if let Err(error) = stop(services, client, id.clone(), Duration::ZERO).await {
            tracing::warn!(container = %id, "its late start could not be stopped: {}", Chain(&error));
        }
    }
    started
}
