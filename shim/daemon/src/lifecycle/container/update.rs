//! Changes a container's limits in the guest.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::request::ask;
use nacelle_base::ContainerId;
use nacelle_pod::client::PodClient;
use nacelle_proto::common;
use std::sync::Arc;

/// Changes the container's limits in the guest.
pub(crate) async fn update(
    services: Arc<NodeServices>,
    client: PodClient,
    id: ContainerId,
    limits: Vec<(String, String)>,
    oom_score_adj: Option<i32>,
    processors: Vec<u32>,
) -> Result<(), LifecycleError> {
    let limits = limits.into_iter().map(|(file, value)| common::Limit { file, value }).collect();
    let request = common::UpdateContainerRequest { id: id.to_string(), limits, oom_score_adj, processors };
    ask("change the limits of the container", services.request_timeout(), client.update_container(request)).await
}
