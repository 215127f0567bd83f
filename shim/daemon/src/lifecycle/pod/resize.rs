//! Resizes the pod's VM: its vCPUs and its memory.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::request::ask;
use nacelle_base::Chain;
use nacelle_model::resources::VmResources;
use nacelle_pod::client::PodClient;
use std::sync::Arc;

/// A resize of the VM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resize {
    /// The present resources, and the target.
    pub from: VmResources,
    pub to: VmResources,
    /// Whether the number of vCPUs changes too.
    pub processors: bool,
}

/// Resizes the pod's VM, completely or not at all, and returns its new resources.
pub(crate) async fn resize(
    services: Arc<NodeServices>,
    client: PodClient,
    sizes: Resize,
) -> Result<VmResources, LifecycleError> {
    let Resize { from, mut to, processors } = sizes;
    let set_vcpus = async |count| {
        ask("change the vCPUs of the pod's VM", services.request_timeout(), client.set_processors(count)).await
    };
    if processors {
        set_vcpus(to.vcpus).await?;
    }
    if let Some(bytes) = to.hotplug_memory_used() {
        let resized =
            ask("change the memory of the pod's VM", services.request_timeout(), client.set_memory(bytes)).await;
        match resized {
            Ok(used) => to.memory = to.least_memory.saturating_add(used),
            Err(error) => {
                if processors && let Err(error) = set_vcpus(from.vcpus).await {
                    tracing::warn!("cannot restore the number of vCPUs after a failed resize: {}", Chain(&error));
                }
                return Err(error);
            }
        }
    }
    Ok(to)
}
