//! Handles requests to remove a container.

use super::lost_code;
use crate::lifecycle::actor::message::{Answer, Message, PAUSE, Patience};
use crate::lifecycle::actor::{Actor, answer_all};
use crate::lifecycle::container::remove::{self, RemoveFailure};
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::unix_nanos;
use crate::metrics::labels::ExitReason;
use nacelle_base::ContainerId;
use nacelle_model::state;
use nacelle_model::state::{ContainerAction, ContainerEvent};
use nacelle_pod::protocol::PodFeatureSet;
use nacelle_store::Change;
use std::sync::Arc;

impl Actor {
    pub(crate) async fn remove_container(&mut self, id: ContainerId, answer: Option<Answer<()>>) {
        let Some(entry) = self.containers.get_mut(&id) else {
            if let Some(answer) = answer {
                drop(answer.send(Ok(())));
            }
            return;
        };
        // Nothing is begun that an incompatible process will refuse: the container stays in its state.
        if let Some(Err(refused)) = self.client.as_ref().map(|client| client.require(PodFeatureSet::BASE)) {
            if let Some(answer) = answer {
                drop(answer.send(Err(at("remove the container")(refused))));
            }
            return;
        }
        entry.remove_waiters.extend(answer);
        if self.step_container(&id, ContainerEvent::Remove).await == Some(ContainerAction::Remove) {
            self.begin_remove(id);
        }
    }

    pub(crate) fn begin_remove(&mut self, id: ContainerId) {
        if self.pod.state == state::PodState::Ready && self.client.is_none() {
            let failure = RemoveFailure { error: self.silent(), is_in_guest: true };
            return self.effect(async move { Message::Removed(id, Err(failure)) });
        }
        let Some(config) = self.containers.get(&id).map(|entry| Arc::clone(&entry.record.config)) else { return };
        let (client, pod) = (self.client.clone(), self.pod.clone());
        let removing = remove::remove(Arc::clone(&self.services), client, pod, config, id.clone());
        self.effect(async move { Message::Removed(id, removing.await) });
    }

    pub(crate) async fn removed(&mut self, id: ContainerId, result: Result<(), RemoveFailure>) {
        // Without a VM only the record of the container is left.
        let result = if self.pod.state == state::PodState::Ready { result } else { Ok(()) };
        let is_in_guest = result.as_ref().is_err_and(|failure| failure.is_in_guest);
        let result = match result {
            Ok(()) => self.commit(vec![Change::ForgetContainer(id.clone())]).await,
            Err(failure) => Err(failure.error),
        };
        match result {
            Ok(()) => {
                let Some(mut entry) = self.remove_entry(&id) else { return };
                answer_all(&mut entry.remove_waiters, &Ok(()));
                let gone = LifecycleError::NotFound { what: "container", id: id.to_string() };
                answer_all(&mut entry.create_waiters, &Err(entry.create_error.take().unwrap_or_else(|| gone.clone())));
                answer_all(&mut entry.start_waiters, &Err(gone.clone()));
                for (_, answer) in entry.updates.drain(..) {
                    drop(answer.send(Err(gone.clone())));
                }
                self.table.collect_images(&self.services);
            }
            Err(error) => {
                let limit = self.services.request_timeout();
                if self.containers.get_mut(&id).is_some_and(|entry| entry.removal.lasts(&error, limit)) {
                    return self.effect(async move {
                        tokio::time::sleep(PAUSE).await;
                        Message::RemoveAgain(id)
                    });
                }
                let mut event = ContainerEvent::RemoveFailed;
                if let Some(entry) = self.containers.get_mut(&id).filter(|entry| entry.record.finished_at == 0) {
                    if is_in_guest && entry.record.started_at != 0 {
                        event = ContainerEvent::RemoveFailedRunning;
                    } else {
                        entry.record.finished_at = unix_nanos();
                        entry.record.exit_code = lost_code();
                        self.services.counters.count_container_exit(ExitReason::of(&entry.record));
                    }
                }
                self.step_container(&id, event).await;
                if let Some(entry) = self.containers.get_mut(&id) {
                    entry.removal = Patience::default();
                    answer_all(
                        &mut entry.create_waiters,
                        &Err(entry.create_error.take().unwrap_or_else(|| error.clone())),
                    );
                    answer_all(&mut entry.remove_waiters, &Err(error));
                }
            }
        }
    }
}
