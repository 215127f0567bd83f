//! Opens the log file of a container again after a rotation.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::request::ask;
use nacelle_base::ContainerId;
use nacelle_pod::client::PodClient;

/// Closes the container's log file and opens it again by its name.
pub(crate) async fn reopen(services: &NodeServices, client: PodClient, id: &ContainerId) -> Result<(), LifecycleError> {
    ask("open the log again", services.request_timeout(), client.reopen_log(id.as_str())).await
}
