//! Sets the memory policy of the VM's cgroup: what its containers may swap, and what of their memory is protected from reclaim.

use crate::lifecycle::actor::Actor;
use crate::lifecycle::container::memory_policy;
use crate::lifecycle::context::error::{LifecycleError, at};
use nacelle_model::resources::Resources;

impl Actor {
    /// Sets the policy that follows from the pod's containers and from a container to be created. A change that is being applied
    /// counts already.
    pub(crate) async fn apply_memory_policy(&mut self, new: Option<&Resources>) -> Result<(), LifecycleError> {
        if self.client.is_none() || !self.pod.config.kind.has_guest() {
            return Ok(());
        }
        let Some(group) = self.pod.process.as_ref().and_then(|process| process.cgroup.clone()) else { return Ok(()) };
        let of = self.live().map(|entry| match entry.updates.front() {
            Some((change, _)) => entry.record.resources().changed_by(change),
            None => entry.record.resources().clone(),
        });
        // A pod without running containers keeps its policy: one of them may be about to be started again.
        let Some(wanted) = memory_policy::add_up(of.chain(new.cloned())) else { return Ok(()) };
        if self.memory_policy == Some(wanted) {
            return Ok(());
        }
        self.memory_policy = None;
        let set = self.services.pods.set_memory_policy(&group, wanted).await;
        set.map_err(at("set the memory policy of the pod's VM"))?;
        self.memory_policy = Some(wanted);
        Ok(())
    }
}
