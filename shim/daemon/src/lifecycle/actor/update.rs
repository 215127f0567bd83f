//! Owns: changing the limits of a container: one change after the other, recorded when the guest has taken it.

use super::super::error::LifecycleError;
use super::super::make;
use super::super::state::Container;
use super::{Actor, Answer, Message};
use crate::nouns::Resources;
use crate::oci;
use crate::store::Change;
use nacelle_base::ContainerId;
use std::sync::Arc;

impl Actor {
    pub(super) fn update(&mut self, id: ContainerId, change: Box<Resources>, answer: Answer<()>) {
        let Some(entry) = self.containers.get_mut(&id) else {
            return drop(answer.send(Err(LifecycleError::NotFound { what: "container", id: id.to_string() })));
        };
        entry.updates.push_back((change, answer));
        if entry.updates.len() == 1 {
            self.begin_update(&id);
        }
    }

    /// Begins with the first change that waits; those that cannot be are answered.
    fn begin_update(&mut self, id: &ContainerId) {
        let not_ready = self.not_ready();
        let Some(entry) = self.containers.get_mut(id) else { return };
        let there = matches!(entry.record.state, Container::Created | Container::Starting | Container::Running);
        match (&self.client, entry.updates.front()) {
            (Some(client), Some((change, _))) if there => {
                let next = Box::new(entry.record.resources().changed_by(change));
                let limits = oci::limits(&next, change);
                // 0 is the way to say nothing.
                let adjustment = i32::try_from(change.oom_score_adj).ok().filter(|adjustment| *adjustment != 0);
                let update = make::update(Arc::clone(&self.parts), client.clone(), id.clone(), limits, adjustment);
                let id = id.clone();
                self.effect(async move { Message::Updated(id, next, update.await) });
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
            self.begin_update(&id);
        }
    }
}
