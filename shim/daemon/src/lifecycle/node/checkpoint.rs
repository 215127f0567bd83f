//! Checks the pod and the containers of a checkpoint, and starts it as a task that ends by itself.

use super::Node;
use crate::lifecycle::checkpoint::{self, CheckpointError, CheckpointOrder, CheckpointRefusal, PodCheckpoint};
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::view::View;
use crate::traces::RequestSpan;
use nacelle_base::ContainerId;
use nacelle_base::task::TaskError;
use nacelle_model::state::ContainerState;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Node {
    /// Saves a ready pod with all its running containers. When this returns, they run, and the directory has a complete checkpoint or is
    /// empty. If the future is dropped, that holds soon afterwards.
    pub async fn checkpoint_pod(&self, order: CheckpointOrder) -> Result<(), CheckpointError> {
        let (view, client) = self.ready(&order.pod)?;
        let containers = self.select_containers(&view, &order.containers)?;
        let pod_dir = self.services.pod_dir(&view.pod.id);
        let (claim, stop) = self.checkpoints.begin(&view.pod.id, order.limit)?;
        // Dropped with this future.
        let _guard = stop.guard();
        let services = Arc::clone(&self.services);
        let job = PodCheckpoint { services, view, client, pod_dir, output: order.output, containers, claim, stop };
        RequestSpan::spawn(checkpoint::save(job)).await.map_err(|error| TaskError::new("save the pod", error))?
    }

    /// Stops all checkpoints, now and from now on: the daemon ends.
    pub(crate) fn stop_checkpoints(&self) {
        self.checkpoints.stop_all();
    }

    /// Returns the containers of this pod that are named: these must be exactly those that run. The pod process, which knows of each exit
    /// first, checks that again while the containers are frozen.
    fn select_containers(&self, pod: &View, named: &[String]) -> Result<BTreeSet<ContainerId>, CheckpointError> {
        if let Some(waiting) = pod.pod.restored.as_ref().and_then(|restored| restored.waiting.first()) {
            let why = CheckpointRefusal::Waiting { name: waiting.saved.config.name.clone() };
            return Err(CheckpointError::Refused { pod: pod.pod.id.clone(), why });
        }
        let mut selected = BTreeSet::new();
        for name in named {
            let (id, _, view) = self.table.find_container(name)?;
            if view.pod.id != pod.pod.id {
                return Err(CheckpointError::OtherPod { id, other: view.pod.id.clone() });
            }
            self.running(id.as_str())?;
            // The manifest is made of this view.
            if pod.containers.get(&id).is_none_or(|record| record.state != ContainerState::Running) {
                let why = ": it has started during the request; try again".to_owned();
                return Err(LifecycleError::NotRunning { id: id.to_string(), why }.into());
            }
            if !selected.insert(id.clone()) {
                return Err(CheckpointError::Duplicate { id });
            }
        }
        let running = pod.containers.values().filter(|record| record.state == ContainerState::Running);
        match running.map(|record| &record.id).find(|id| !selected.contains(*id)) {
            Some(id) => {
                let why = CheckpointRefusal::NotSelected { id: id.clone() };
                Err(CheckpointError::Refused { pod: pod.pod.id.clone(), why })
            }
            None => Ok(selected),
        }
    }
}
