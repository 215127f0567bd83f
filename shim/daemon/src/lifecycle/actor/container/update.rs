//! Handles changes of a container's limits. They are applied one at a time, and each is recorded after the guest has applied it.

use super::cpus::is_live;
use crate::lifecycle::actor::message::{Answer, Message};
use crate::lifecycle::actor::{Actor, Entry, ResizeRequest};
use crate::lifecycle::container::{cpus, update};
use crate::lifecycle::context::error::LifecycleError;
use crate::oci;
use nacelle_base::ContainerId;
use nacelle_base::cpulist;
use nacelle_model::machine_pod::MachinePod;
use nacelle_model::resources::Resources;
use nacelle_model::state::ContainerState;
use nacelle_store::Change;
use std::sync::Arc;
use tokio::sync::oneshot;

impl Actor {
    pub(crate) async fn update(&mut self, id: ContainerId, change: Box<Resources>, answer: Answer<()>) {
        if let Err(error) = cpus::check(&change, self.pod.config.kind.has_guest()) {
            return drop(answer.send(Err(error)));
        }
        let Some(entry) = self.containers.get_mut(&id) else {
            return drop(answer.send(Err(LifecycleError::NotFound { what: "container", id: id.to_string() })));
        };
        entry.updates.push_back((change, answer));
        // A change of a container that is being created is applied after the creation.
        if entry.updates.len() > 1 {
            return;
        }
        match entry.record.state {
            ContainerState::Creating => self.reject_updates_with_too_few_cpus(&id),
            _ => self.begin_update(&id).await,
        }
    }

    /// Completes the leading changes of a container that are rejected for this reason.
    fn reject_updates_with_too_few_cpus(&mut self, id: &ContainerId) {
        loop {
            let entry = self.containers.get(id).filter(|entry| is_live(entry.record.state));
            let Some((change, _)) = entry.and_then(|entry| entry.updates.front()) else { return };
            let Err(error) = self.check_pinned_vcpus(None, &change.cpuset_cpus) else { return };
            if let Some((_, answer)) = self.containers.get_mut(id).and_then(|entry| entry.updates.pop_front()) {
                drop(answer.send(Err(error)));
            }
        }
    }

    /// Starts the first pending change that is possible, and rejects those before it.
    pub(crate) async fn begin_update(&mut self, id: &ContainerId) {
        self.reject_updates_with_too_few_cpus(id);
        if self.containers.get(id).is_none_or(|entry| entry.updates.is_empty()) {
            return;
        }
        let not_ready = self.not_ready();
        let confined = self.confine(None).await;
        let grown = self.grow_for(id).await;
        let guest = self.pod.config.kind.has_guest();
        let config = Arc::clone(&self.pod.config);
        let Some(entry) = self.containers.get_mut(id) else { return };
        let there =
            matches!(entry.record.state, ContainerState::Created | ContainerState::Starting | ContainerState::Running);
        match (&self.client, entry.updates.front()) {
            (Some(client), Some((change, _))) if there => {
                let next = Box::new(entry.record.resources().changed_by(change));
                let processors = pins(config.kind.machine(), &next);
                let limits = match guest {
                    true => oci::limits(&next.in_guest(), &change.in_guest()),
                    false => oci::limits(&next, change),
                };
                // In this field 0 means unset.
                let adjustment = i32::try_from(change.oom_score_adj).ok().filter(|adjustment| *adjustment != 0);
                let update = update::update(
                    Arc::clone(&self.services),
                    client.clone(),
                    id.clone(),
                    limits,
                    adjustment,
                    processors,
                );
                let id = id.clone();
                self.effect(async move {
                    let updated = match (confined, grown.await.unwrap_or(Ok(()))) {
                        (Ok(()), Ok(())) => update.await,
                        (Err(error), _) | (_, Err(error)) => Err(error),
                    };
                    Message::Updated(id, next, updated)
                });
            }
            (client, _) => {
                let error = match client {
                    None if there => not_ready,
                    _ => LifecycleError::NotRunning { id: id.to_string(), why: String::new() },
                };
                for (_, answer) in entry.updates.drain(..) {
                    drop(answer.send(Err(error.clone())));
                }
            }
        }
    }

    /// Grows the VM's memory to what its containers may use together after the change of this one, for a pod without limits of
    /// its own (kubelet changes the pod's limits, and does so first). The receiver never resolves if there is nothing to do.
    async fn grow_for(&mut self, id: &ContainerId) -> oneshot::Receiver<Result<(), LifecycleError>> {
        let (answer, answered) = oneshot::channel();
        let Some(machine) = self.pod.machine.filter(|machine| machine.hotplug_memory_used().is_some()) else {
            return answered;
        };
        let said = self.pod.resources.as_ref().is_some_and(|resources| resources.containers.memory_limit > 0);
        let there = self.containers.get(id).is_some_and(|entry| is_live(entry.record.state));
        let limit = |entry: &Entry| {
            let limits = entry.record.resources();
            let next = entry.updates.front().map_or_else(|| limits.clone(), |(change, _)| limits.changed_by(change));
            u64::try_from(next.memory_limit).ok().filter(|limit| *limit > 0)
        };
        let together = self.live().map(limit).try_fold(0u64, |sum, limit| Some(sum.saturating_add(limit?)));
        if let Some(bytes) = together.map(|bytes| bytes.min(machine.memory_bound()))
            && bytes > machine.memory
            && there
            && !said
        {
            self.change_size(ResizeRequest::Containers(bytes), answer).await;
        }
        answered
    }

    pub(crate) async fn updated(&mut self, id: ContainerId, next: Resources, result: Result<(), LifecycleError>) {
        let Some(entry) = self.containers.get_mut(&id) else { return };
        let first = entry.updates.pop_front();
        if result.is_ok() {
            entry.record.resources = Some(next);
            let record = entry.record.clone();
            let kept = self.services.store.commit(vec![Change::Container(record.into())]).await;
            self.log_unkept(kept);
            self.publish();
        }
        if let Some((_, answer)) = first {
            drop(answer.send(result));
        }
        if self.containers.get(&id).is_some_and(|entry| !entry.updates.is_empty()) {
            self.begin_update(&id).await;
        }
    }
}

/// Returns the CPUs of the node to which the vCPUs of a machine pod's machine are pinned; empty if they are not pinned.
fn pins(machine: Option<&MachinePod>, next: &Resources) -> Vec<u32> {
    let Some(machine) = machine.filter(|machine| machine.processors.pins.is_some()) else { return Vec::new() };
    let count = usize::try_from(machine.processors.count()).unwrap_or(usize::MAX);
    cpulist::parse(&next.cpuset_cpus).unwrap_or_default().into_iter().take(count).collect()
}
