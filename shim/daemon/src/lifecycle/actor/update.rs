//! Changes the limits of containers and pods. Changes of a container are applied one at a time, and each is recorded after the
//! guest has applied it. A change of the pod resizes its VM as far as the VM can follow.

use super::super::error::{LifecycleError, at};
use super::super::make;
use super::super::processors;
use super::super::size;
use super::{Actor, Answer, Entry, Message, Wish};
use crate::oci;
use nacelle_base::ContainerId;
use nacelle_base::cpulist::numbers;
use nacelle_model::machine_pod::MachinePod;
use nacelle_model::resources::{PodResources, Resources, VmResources};
use nacelle_model::state;
use nacelle_model::state::ContainerState;
use nacelle_pod::client::PodClient;
use nacelle_store::Change;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::oneshot;

impl Actor {
    pub(super) async fn update(&mut self, id: ContainerId, change: Box<Resources>, answer: Answer<()>) {
        if let Err(error) = processors::check(&change, self.parts.has_guest(&self.pod)) {
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
            ContainerState::Creating => self.refuse_too_few(&id),
            _ => self.begin_update(&id).await,
        }
    }

    /// Returns the CPUs of the pod's containers and of a container to be created. A change that is being applied counts already.
    fn wanted(&self, new: Option<&Resources>) -> BTreeSet<u32> {
        let of = self.live().map(|entry| match entry.updates.front() {
            Some((change, _)) if !change.cpuset_cpus.is_empty() => change.cpuset_cpus.as_str(),
            _ => entry.record.resources().cpuset_cpus.as_str(),
        });
        processors::together(of.chain(new.map(|new| new.cpuset_cpus.as_str())))
    }

    fn live(&self) -> impl Iterator<Item = &Entry> {
        self.containers.values().filter(|entry| is_live(entry.record.state))
    }

    /// Returns the number of the VM's vCPUs if each of them is pinned to a CPU of its own.
    fn pinned(&self) -> Option<u32> {
        let config = &self.pod.config;
        let shaped = config.shape.as_ref().is_some_and(|shape| shape.pinned);
        let machine = config.machine.as_ref().is_some_and(|machine| machine.processors.pins.is_some());
        self.pod.machine.filter(|_| shaped || machine).map(|machine| machine.vcpus)
    }

    /// Rejects a change that would leave a VM with pinned vCPUs fewer CPUs of the node than it has vCPUs. A container without a
    /// CPU list takes no CPU away.
    pub(super) fn enough(&self, new: Option<&Resources>, asked: &str) -> Result<(), LifecycleError> {
        let Some(vcpus) = self.pinned().filter(|_| !asked.is_empty()) else { return Ok(()) };
        let left = self.wanted(new).len();
        if left >= usize::try_from(vcpus).unwrap_or(usize::MAX) {
            return Ok(());
        }
        let (id, asked) = (self.pod.id.to_string(), asked.to_owned());
        Err(LifecycleError::TooFewProcessors { id, asked, left, vcpus })
    }

    /// Completes the leading changes of a container that are rejected for this reason.
    fn refuse_too_few(&mut self, id: &ContainerId) {
        loop {
            let entry = self.containers.get(id).filter(|entry| is_live(entry.record.state));
            let Some((change, _)) = entry.and_then(|entry| entry.updates.front()) else { return };
            let Err(error) = self.enough(None, &change.cpuset_cpus) else { return };
            if let Some((_, answer)) = self.containers.get_mut(id).and_then(|entry| entry.updates.pop_front()) {
                drop(answer.send(Err(error)));
            }
        }
    }

    /// Confines the VM to the CPUs of the pod's containers and of a container to be created.
    pub(super) async fn confine(&mut self, new: Option<&Resources>) -> Result<(), LifecycleError> {
        if self.client.is_none() || !self.parts.has_guest(&self.pod) {
            return Ok(());
        }
        // Pinned vCPUs of a machine pod's machine keep their CPUs until the machine gets other pins: the keeper has pinned them,
        // and pins them again.
        let kept = self.pod.config.machine.as_ref().is_some_and(|machine| machine.processors.pins.is_some());
        let moves = |entry: &Entry| entry.updates.front().is_some_and(|(change, _)| !change.cpuset_cpus.is_empty());
        if kept && !self.live().any(moves) && (new.is_none() || self.live().next().is_some()) {
            return Ok(());
        }
        let wanted = self.wanted(new);
        let mut pinned = self.pinned().filter(|_| !kept && !wanted.is_empty());
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
            let why = "too few processors of the node are left for each of the machine's to have one to itself";
            tracing::warn!(pod = %self.pod.id, vcpus, left, why);
        }
        self.confined = None;
        let done = self.parts.pods.confine(&self.parts.pod_dir(&self.pod.id), wanted.0.clone(), wanted.1).await;
        done.map_err(at("keep the machine on the processors of its containers"))?;
        self.confined = Some(wanted);
        Ok(())
    }

    /// Starts the first pending change that is possible, and rejects those before it.
    pub(super) async fn begin_update(&mut self, id: &ContainerId) {
        self.refuse_too_few(id);
        if self.containers.get(id).is_none_or(|entry| entry.updates.is_empty()) {
            return;
        }
        let not_ready = self.not_ready();
        let confined = self.confine(None).await;
        let grown = self.grow_for(id).await;
        let guest = self.parts.has_guest(&self.pod);
        let config = Arc::clone(&self.pod.config);
        let Some(entry) = self.containers.get_mut(id) else { return };
        let there =
            matches!(entry.record.state, ContainerState::Created | ContainerState::Starting | ContainerState::Running);
        match (&self.client, entry.updates.front()) {
            (Some(client), Some((change, _))) if there => {
                let next = Box::new(entry.record.resources().changed_by(change));
                let processors = pins(config.machine.as_deref(), &next);
                let change = if guest { &change.in_guest() } else { &**change };
                let limits = oci::limits(&next, change);
                // In this field 0 means unset.
                let adjustment = i32::try_from(change.oom_score_adj).ok().filter(|adjustment| *adjustment != 0);
                let update =
                    make::update(Arc::clone(&self.parts), client.clone(), id.clone(), limits, adjustment, processors);
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
                    _ => LifecycleError::NotRunning { id: id.to_string() },
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
        let (tell, told) = oneshot::channel();
        let Some(machine) = self.pod.machine.filter(|machine| machine.reserve_used().is_some()) else { return told };
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
            self.change_size(Wish::Containers(bytes), tell).await;
        }
        told
    }

    pub(super) async fn updated(&mut self, id: ContainerId, next: Resources, result: Result<(), LifecycleError>) {
        let Some(entry) = self.containers.get_mut(&id) else { return };
        let first = entry.updates.pop_front();
        if result.is_ok() {
            entry.record.resources = Some(next);
            let record = entry.record.clone();
            let kept = self.parts.store.commit(vec![Change::Container(record.into())]).await;
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

    /// Changes the pod's resources: resizes the VM to hold them, then records them.
    pub(super) async fn update_pod(&mut self, change: Box<PodResources>, answer: Answer<()>) {
        self.change_size(Wish::Pod(change), answer).await;
    }

    async fn change_size(&mut self, wish: Wish, answer: Answer<()>) {
        self.updates.push_back((wish, answer));
        if self.updates.len() == 1 {
            self.begin_pod_updates().await;
        }
    }

    /// Applies pending changes up to the first one that needs a resize of the VM.
    async fn begin_pod_updates(&mut self) {
        while let Some((wish, _)) = self.updates.front() {
            let done = match self.next_size(wish) {
                Ok((next, sizes, Some(client))) => {
                    let resized = make::resize(Arc::clone(&self.parts), client, sizes);
                    return self.effect(async move { Message::PodUpdated(Box::new(next), resized.await) });
                }
                Ok((next, _, None)) => {
                    let mut record = self.pod.clone();
                    record.resources = next;
                    let kept = self.commit(vec![Change::Pod(record.clone().into())]).await;
                    if kept.is_ok() {
                        self.pod = record;
                        self.publish();
                    }
                    kept
                }
                Err(error) => Err(error),
            };
            if let Some((_, answer)) = self.updates.pop_front() {
                drop(answer.send(done));
            }
        }
    }

    /// Returns the pod's resources after a change, the VM's resources that follow, and the client to ask for the resize: `None`
    /// if the VM keeps its size.
    fn next_size(
        &self,
        wish: &Wish,
    ) -> Result<(Option<PodResources>, make::Resize, Option<PodClient>), LifecycleError> {
        if self.pod.state != state::PodState::Ready {
            return Err(self.not_ready());
        }
        let known = self.pod.resources.clone();
        let (next, asked) = match wish {
            Wish::Pod(change) => {
                let next = known.unwrap_or_default().changed_by(change);
                (Some(next.clone()), next.containers)
            }
            // Never less than the current size: memory for other uses of the VM is part of the pod's limits.
            Wish::Containers(bytes) => {
                let least = self.pod.machine.map_or(0, |machine| machine.memory);
                let memory_limit = i64::try_from(least.max(*bytes)).unwrap_or(i64::MAX);
                (known, Resources { memory_limit, ..Resources::default() })
            }
        };
        // For a pod whose record is older than the record of VM resources, the promised size follows from its configuration.
        let config = &self.pod.config;
        let vcpus = config.cpu_limit_milli.map_or(1, |milli| u32::try_from(milli.div_ceil(1000)).unwrap_or(u32::MAX));
        let promised = VmResources {
            vcpus,
            max_vcpus: 0,
            memory: config.memory_limit.unwrap_or(0),
            least_memory: 0,
            max_memory: 0,
        };
        let machine = self.pod.machine.unwrap_or(promised);
        let handler = self.parts.config.handler(&self.pod.handler);
        let least = handler.map_or(1, |(_, handler)| handler.vcpus);
        let sized = size::wanted(machine, least, &asked).map_err(|(has, wanted)| LifecycleError::TooSmall {
            id: self.pod.id.to_string(),
            has,
            wanted,
        })?;
        // The agent of a pod that is older than the `max_vcpus` field may not support it.
        let processors = machine.max_vcpus > 0 && size::grows(config);
        let to = if processors { sized } else { VmResources { vcpus: machine.vcpus, ..sized } };
        let sizes = make::Resize { from: machine, to, processors };
        if !(processors || machine.reserve_used().is_some()) || !self.parts.has_guest(&self.pod) {
            return Ok((next, sizes, None));
        }
        // Sent even if the record shows this size already: an earlier response may have been lost.
        let client = self.client.clone().ok_or_else(|| self.not_ready())?;
        Ok((next, sizes, Some(client)))
    }

    pub(super) async fn pod_updated(
        &mut self,
        next: Option<PodResources>,
        resized: Result<VmResources, LifecycleError>,
    ) {
        let result = match resized {
            Ok(machine) => {
                // The resize has happened, whether or not the record can be written.
                self.pod.resources = next;
                self.pod.machine = Some(machine);
                self.keep_pod().await;
                Ok(())
            }
            Err(error) => Err(error),
        };
        if let Some((_, answer)) = self.updates.pop_front() {
            drop(answer.send(result));
        }
        self.begin_pod_updates().await;
    }
}

/// Returns the CPUs of the node to which the vCPUs of a machine pod's machine are pinned; empty if they are not pinned.
fn pins(machine: Option<&MachinePod>, next: &Resources) -> Vec<u32> {
    let Some(machine) = machine.filter(|machine| machine.processors.pins.is_some()) else { return Vec::new() };
    let count = usize::try_from(machine.processors.count()).unwrap_or(usize::MAX);
    numbers(&next.cpuset_cpus).unwrap_or_default().into_iter().take(count).collect()
}

/// Returns whether a container may run on the CPUs of its limits.
fn is_live(state: ContainerState) -> bool {
    matches!(
        state,
        ContainerState::Creating | ContainerState::Created | ContainerState::Starting | ContainerState::Running
    )
}
