//! Owns: changing the limits of a container: one change after the other, recorded when the guest has taken it; and those
//! of the pod, which are recorded if its machine can hold them.

use super::super::error::{LifecycleError, at};
use super::super::make;
use super::super::processors;
use super::super::state::{self, Container};
use super::{Actor, Answer, Message};
use crate::nouns::{MachineSize, PodResources, Resources, cpu_milli};
use crate::oci;
use crate::store::Change;
use nacelle_base::ContainerId;
use std::sync::Arc;

impl Actor {
    pub(super) async fn update(&mut self, id: ContainerId, change: Box<Resources>, answer: Answer<()>) {
        if let Err(error) = processors::check(&change, self.parts.has_guest(&self.pod)) {
            return drop(answer.send(Err(error)));
        }
        let Some(entry) = self.containers.get_mut(&id) else {
            return drop(answer.send(Err(LifecycleError::NotFound { what: "container", id: id.to_string() })));
        };
        entry.updates.push_back((change, answer));
        // One that is being made is changed when it is made.
        if entry.updates.len() == 1 && entry.record.state != Container::Creating {
            self.begin_update(&id).await;
        }
    }

    /// Has the machine run where its containers may, and this one that there will be. What a change that is under way says
    /// counts already.
    pub(super) async fn confine(&mut self, new: Option<&Resources>) -> Result<(), LifecycleError> {
        if self.client.is_none() || !self.parts.has_guest(&self.pod) {
            return Ok(());
        }
        let live = self.containers.values().filter(|entry| {
            let state = entry.record.state;
            matches!(state, Container::Creating | Container::Created | Container::Starting | Container::Running)
        });
        // Processors of a machine that have some of the node to themselves stay there: its keeper has put them there.
        let pinned = self.pod.config.machine.as_ref().is_some_and(|machine| machine.processors.pins.is_some());
        if pinned && (new.is_none() || live.clone().next().is_some()) {
            return Ok(());
        }
        let of = live.map(|entry| match entry.updates.front() {
            Some((change, _)) if !change.cpuset_cpus.is_empty() => change.cpuset_cpus.as_str(),
            _ => entry.record.resources().cpuset_cpus.as_str(),
        });
        let wanted = processors::together(of.chain(new.map(|new| new.cpuset_cpus.as_str())));
        if self.confined.as_ref() == Some(&wanted) {
            return Ok(());
        }
        self.confined = None;
        let done = self.parts.pods.confine(&self.parts.pod_dir(&self.pod.id), wanted.clone()).await;
        done.map_err(at("keep the machine on the processors of its containers"))?;
        self.confined = Some(wanted);
        Ok(())
    }

    /// Begins with the first change that waits; those that cannot be are answered.
    pub(super) async fn begin_update(&mut self, id: &ContainerId) {
        let not_ready = self.not_ready();
        let confined = self.confine(None).await;
        let guest = self.parts.has_guest(&self.pod);
        let Some(entry) = self.containers.get_mut(id) else { return };
        let there = matches!(entry.record.state, Container::Created | Container::Starting | Container::Running);
        match (&self.client, entry.updates.front()) {
            (Some(client), Some((change, _))) if there => {
                let next = Box::new(entry.record.resources().changed_by(change));
                let change = if guest { &change.in_guest() } else { &**change };
                let limits = oci::limits(&next, change);
                // 0 is the way to say nothing.
                let adjustment = i32::try_from(change.oom_score_adj).ok().filter(|adjustment| *adjustment != 0);
                let update = make::update(Arc::clone(&self.parts), client.clone(), id.clone(), limits, adjustment);
                let id = id.clone();
                self.effect(async move {
                    let updated = match confined {
                        Ok(()) => update.await,
                        Err(error) => Err(error),
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

    /// The machine keeps its size, so nothing happens to it: its containers get their limits one by one.
    pub(super) async fn update_pod(&mut self, change: &PodResources) -> Result<(), LifecycleError> {
        if self.pod.state != state::Pod::Ready {
            return Err(self.not_ready());
        }
        let next = self.pod.resources.clone().unwrap_or_default().changed_by(change);
        // Of a pod that is older than the record of its machine, what it was promised is known.
        let config = &self.pod.config;
        let vcpus = config.cpu_limit_milli.map_or(1, |milli| u32::try_from(milli.div_ceil(1000)).unwrap_or(u32::MAX));
        let promised = MachineSize { vcpus, memory: config.memory_limit.unwrap_or(0) };
        fits(self.pod.machine.unwrap_or(promised), &next.containers)
            .map_err(|(has, wanted)| LifecycleError::TooSmall { id: self.pod.id.to_string(), has, wanted })?;
        let mut record = self.pod.clone();
        record.resources = Some(next);
        self.commit(vec![Change::Pod(record.clone().into())]).await?;
        self.pod = record;
        self.publish();
        Ok(())
    }
}

/// Whether a machine can hold what its containers may use together; else what it has, and what was wanted.
fn fits(machine: MachineSize, wanted: &Resources) -> Result<(), (String, String)> {
    let memory = u64::try_from(wanted.memory_limit).unwrap_or(0);
    if memory > machine.memory {
        return Err((format!("{} bytes of memory", machine.memory), memory.to_string()));
    }
    match cpu_milli(wanted.cpu_period, wanted.cpu_quota) {
        Some(milli) if milli > u64::from(machine.vcpus) * 1000 => {
            Err((format!("{} CPUs", machine.vcpus), format!("{milli} thousandths")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_holds_what_it_was_made_for() {
        let machine = MachineSize { vcpus: 2, memory: 1 << 28 };
        let wanted = |memory_limit, cpu_quota| {
            let wanted = Resources { memory_limit, cpu_quota, cpu_period: 100_000, ..Default::default() };
            fits(machine, &wanted)
        };
        // No limit is none that must be held.
        for (memory, quota) in [(0, 0), (1 << 28, 200_000), (5, -1)] {
            assert_eq!(wanted(memory, quota), Ok(()));
        }
        let (has, wants) = wanted((1 << 28) + 1, 0).unwrap_err();
        assert_eq!((has.as_str(), wants.as_str()), ("268435456 bytes of memory", "268435457"));
        let (has, wants) = wanted(5, 200_001).unwrap_err();
        assert_eq!((has.as_str(), wants.as_str()), ("2 CPUs", "2001 thousandths"));
        assert!(wanted(i64::MAX, i64::MAX).is_err());
    }
}
