//! Confines the VM to the CPUs of the pod's containers.

use crate::lifecycle::actor::{Actor, Entry};
use crate::lifecycle::container::cpus;
use crate::lifecycle::context::error::{LifecycleError, at};
use nacelle_model::resources::Resources;
use nacelle_model::state::ContainerState;
use std::collections::BTreeSet;

impl Actor {
    /// Returns the CPUs of the pod's containers and of a container to be created. A change that is being applied counts already.
    fn container_cpus(&self, new: Option<&Resources>) -> BTreeSet<u32> {
        let of = self.live().map(|entry| match entry.updates.front() {
            Some((change, _)) if !change.cpuset_cpus.is_empty() => change.cpuset_cpus.as_str(),
            _ => entry.record.resources().cpuset_cpus.as_str(),
        });
        cpus::together(of.chain(new.map(|new| new.cpuset_cpus.as_str())))
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = &Entry> {
        self.containers.values().filter(|entry| is_live(entry.record.state))
    }

    /// Returns the number of the VM's vCPUs if each of them is pinned to a CPU of its own.
    fn pinned_vcpus(&self) -> Option<u32> {
        let config = &self.pod.config;
        let shaped = config.kind.shape().is_some_and(|shape| shape.pinned);
        let machine = config.kind.machine().is_some_and(|machine| machine.processors.pins.is_some());
        self.pod.machine.filter(|_| shaped || machine).map(|machine| machine.vcpus)
    }

    /// Rejects a change that would leave a VM with pinned vCPUs fewer CPUs of the node than it has vCPUs. A container without a
    /// CPU list takes no CPU away.
    pub(crate) fn check_pinned_vcpus(&self, new: Option<&Resources>, requested: &str) -> Result<(), LifecycleError> {
        let Some(vcpus) = self.pinned_vcpus().filter(|_| !requested.is_empty()) else { return Ok(()) };
        let left = self.container_cpus(new).len();
        if left >= usize::try_from(vcpus).unwrap_or(usize::MAX) {
            return Ok(());
        }
        let (id, requested) = (self.pod.id.to_string(), requested.to_owned());
        Err(LifecycleError::TooFewCpus { id, requested, left, vcpus })
    }

    /// Confines the VM to the CPUs of the pod's containers and of a container to be created, and applies their memory policy.
    /// Continues after a failure, and returns the first one.
    pub(crate) async fn confine(&mut self, new: Option<&Resources>) -> Result<(), LifecycleError> {
        let confined = self.confine_cpus(new).await;
        confined.and(self.apply_memory_policy(new).await)
    }

    /// Does the same when a container has ended. What has failed is left to the next creation or change: this runs after each
    /// message, and systemd may be slow to answer.
    pub(crate) async fn confine_again(&mut self) -> Result<(), LifecycleError> {
        let confined = self.confine_cpus(None).await;
        match self.memory_policy {
            Some(_) => confined.and(self.apply_memory_policy(None).await),
            None => confined,
        }
    }

    async fn confine_cpus(&mut self, new: Option<&Resources>) -> Result<(), LifecycleError> {
        if self.client.is_none() || !self.pod.config.kind.has_guest() {
            return Ok(());
        }
        // Pinned vCPUs of a machine pod keep their CPUs until the VM gets other pins: the keeper has pinned them,
        // and pins them again.
        let kept = self.pod.config.kind.machine().is_some_and(|machine| machine.processors.pins.is_some());
        let moves = |entry: &Entry| entry.updates.front().is_some_and(|(change, _)| !change.cpuset_cpus.is_empty());
        if kept && !self.live().any(moves) && (new.is_none() || self.live().next().is_some()) {
            return Ok(());
        }
        let wanted = self.container_cpus(new);
        let mut pinned = self.pinned_vcpus().filter(|_| !kept && !wanted.is_empty());
        let too_few = pinned.filter(|vcpus| usize::try_from(*vcpus).is_ok_and(|vcpus| vcpus > wanted.len()));
        if too_few.is_some() {
            pinned = None;
        }
        let wanted = (wanted, pinned);
        if self.confined.as_ref() == Some(&wanted) {
            return Ok(());
        }
        if let Some(vcpus) = too_few {
            let left = wanted.0.len();
            tracing::warn!(pod = %self.pod.id, vcpus, left, "the pod has too few CPUs of the node: its vCPUs are not pinned");
        }
        self.confined = None;
        let done = self.services.pods.confine(&self.services.pod_dir(&self.pod.id), wanted.0.clone(), wanted.1).await;
        done.map_err(at("confine the VM to the CPUs of its containers"))?;
        self.confined = Some(wanted);
        Ok(())
    }
}

/// Returns whether a container may run on the CPUs of its limits.
pub(crate) fn is_live(state: ContainerState) -> bool {
    matches!(
        state,
        ContainerState::Creating | ContainerState::Created | ContainerState::Starting | ContainerState::Running
    )
}
