//! Removes a pod's VM and network: the effect behind the state `Stopping`. Every step can be repeated.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::timeline::Timeline;
use nacelle_base::{Chain, PodId};
use nacelle_model::process::PodProcess;
use nacelle_model::record::CleanupFailure;
use nacelle_pod::client::PodClient;
use nacelle_pod::record::SavedPodState;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Time for removing a namespace and recording an owed CNI DEL, in addition to the time of the plugins.
const NO_PLUGIN: Duration = Duration::from_secs(30);

/// The result of a cleanup.
pub(crate) struct TornDown {
    /// The last record of the pod process.
    pub last: Option<SavedPodState>,
    /// Resources that could not be released.
    pub left: Vec<CleanupFailure>,
    /// The steps of the cleanup, with their durations.
    pub timeline: Timeline,
}

/// Ends the VM, whose process the store knows as `process`, and releases the network. Every step is tried, whatever the result of
/// those before it, and all of them can be repeated.
pub(crate) async fn tear_down(
    services: Arc<NodeServices>,
    id: PodId,
    client: Option<PodClient>,
    process: Option<PodProcess>,
) -> TornDown {
    let limit = services.teardown_timeout();
    let timeline = Timeline::default();
    // The processes of the pod are killed in any case: the release of its network need not wait for their end.
    let machine = timeline.measure("end of the pod process", end_machine(&services, &id, client, process, limit));
    let network = timeline.measure("end of the network", async {
        // `limit` bounds the plugins; the rest takes a moment.
        match timeout(limit + NO_PLUGIN, services.networks.release(&id, limit)).await {
            Ok(released) => released.map_err(|error| Chain(&error).to_string()),
            Err(_elapsed) => Err(format!("no end after {} s", (limit + NO_PLUGIN).as_secs())),
        }
    });
    let (machine, network) = tokio::join!(machine, network);
    let mut left = Vec::new();
    let mut failed = |what: &str, why: String| {
        tracing::error!(pod = %id, what, why, "cannot release a resource of the pod; the next stop tries again");
        left.push(CleanupFailure { what: what.to_owned(), why });
    };
    let last = machine.unwrap_or_else(|why| {
        failed("machine", why);
        None
    });
    match network {
        Ok(None) => {}
        Ok(Some(owed)) => tracing::warn!(
            pod = %id, error = %Chain(&owed),
            "the CNI DEL of the pod is owed: its network keeps what the pod had until it succeeds; it is tried again"
        ),
        Err(why) => failed("network", why),
    }
    TornDown { last, left, timeline }
}

/// Stops the pod process in good order, and kills it if it does not stop by itself. Returns its last report, or why it still
/// lives.
async fn end_machine(
    services: &NodeServices,
    id: &PodId,
    client: Option<PodClient>,
    process: Option<PodProcess>,
    limit: Duration,
) -> Result<Option<SavedPodState>, String> {
    if let Some(client) = client {
        let orderly = async {
            client.stop(Duration::ZERO).await?;
            client.wait_for_exit().await
        };
        match timeout(limit, orderly).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(pod = %id, "the pod process did not stop: {}", Chain(&error)),
            Err(_elapsed) => tracing::warn!(pod = %id, "the pod process did not stop in time"),
        }
    }
    match timeout(limit, services.clean_up(&services.pod_dir(id), process.as_ref())).await {
        Ok(Ok(last)) => Ok(last),
        Ok(Err(error)) => Err(Chain(&error).to_string()),
        Err(_elapsed) => Err(format!("it still lives after {} s", limit.as_secs())),
    }
}

/// Removes the pod's directory.
pub(crate) async fn remove_directory(services: &NodeServices, id: &PodId) -> Result<(), LifecycleError> {
    let dir = services.pod_dir(id);
    let removed = blocking(move || nacelle_pod::run_dir::remove(&dir)).await;
    removed.map_err(at("remove the directory of the pod"))
}
