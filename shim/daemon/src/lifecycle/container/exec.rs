//! Runs a command in a container to its end.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::request::ask;
use nacelle_base::ContainerId;
use nacelle_pod::client::PodClient;
use nacelle_proto::pod as proto;
use std::time::Duration;

/// Runs a command in the container to its end.
pub(crate) async fn exec(
    services: &NodeServices,
    client: PodClient,
    id: &ContainerId,
    args: Vec<String>,
    limit: Option<Duration>,
) -> Result<proto::ExecSyncResponse, LifecycleError> {
    let step = "run the command";
    let call = client.exec_sync(id.as_str(), args, limit);
    match limit {
        // The caller set no limit; dropping the request ends the command.
        None => call.await.map_err(at(step)),
        Some(limit) => ask(step, limit.saturating_add(services.request_timeout()), call).await,
    }
}
