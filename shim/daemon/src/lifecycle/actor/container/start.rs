//! Handles requests to start a container.

use super::START_FAILED;
use crate::lifecycle::actor::message::{Answer, Message};
use crate::lifecycle::actor::{Actor, answer_all};
use crate::lifecycle::container::log::LogPath;
use crate::lifecycle::container::start;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::text::clip;
use crate::lifecycle::context::unix_nanos;
use crate::traces::{RequestSpan, TracedWork};
use nacelle_base::{Chain, ContainerId};
use nacelle_model::state::{ContainerAction, ContainerEvent, ContainerState};
use nacelle_store::Change;
use std::sync::Arc;

impl Actor {
    pub(crate) async fn start(&mut self, id: ContainerId, span: Option<RequestSpan>, answer: Answer<()>) {
        let Some(entry) = self.containers.get_mut(&id) else {
            return drop(answer.send(Err(LifecycleError::NotFound { what: "container", id: id.to_string() })));
        };
        if self.pod.restored.as_ref().is_some_and(|restored| !restored.is_complete) {
            // Otherwise a process could run that is removed when another container cannot be restored.
            let why = "it is being restored; start its containers after RestorePod has returned".to_owned();
            return drop(answer.send(Err(LifecycleError::NotReady { id: self.pod.id.to_string(), why })));
        }
        match entry.record.state.step(ContainerEvent::Start) {
            Err(source) => {
                let refused = LifecycleError::Refused { whose: "container", id: id.to_string(), source };
                // A container whose creation failed returns that error.
                drop(answer.send(Err(entry.create_error.clone().unwrap_or(refused))));
            }
            Ok((ContainerState::Running, _)) => drop(answer.send(Ok(()))),
            Ok((_, act)) => {
                entry.start_waiters.push(answer);
                entry.start_span = span.or(entry.start_span.take());
                if act == ContainerAction::Start {
                    self.begin_start(&id).await;
                }
            }
        }
    }

    /// Starts a created container for all requests that wait for its start.
    pub(crate) async fn begin_start(&mut self, id: &ContainerId) {
        let Some(entry) = self.containers.get(id) else { return };
        let mut next = entry.record.clone();
        next.state = ContainerState::Starting;
        let begun = match self.client.clone() {
            Some(client) => self.commit(vec![Change::Container(next.clone().into())]).await.map(|()| client),
            None => Err(self.not_ready()),
        };
        let Some(entry) = self.containers.get_mut(id) else { return };
        match begun {
            Ok(client) => {
                entry.record = next;
                let timeline = entry.timeline.clone();
                let log = LogPath::of(&self.pod, &entry.record);
                self.publish();
                let starting = start::start(Arc::clone(&self.services), client, id.clone(), log);
                let id = id.clone();
                self.effect(async move { Message::Started(id, timeline.measure("started", starting).await) });
            }
            Err(error) => answer_all(&mut entry.start_waiters, &Err(error)),
        }
    }

    pub(crate) async fn started(&mut self, id: ContainerId, result: Result<(), LifecycleError>) {
        let Some(entry) = self.containers.get_mut(&id) else { return };
        entry.record.timeline = entry.timeline.steps();
        if let Some(span) = entry.start_span.take() {
            span.add_steps(TracedWork::Container, &entry.record.timeline);
        }
        let ask = match &result {
            Ok(()) => {
                if entry.record.started_at == 0 {
                    entry.record.started_at = unix_nanos();
                }
                ContainerEvent::Started
            }
            Err(error) => {
                if entry.record.started_at == 0 {
                    entry.record.start_failed = true;
                    entry.record.message = clip(&Chain(error).to_string());
                    if entry.record.exit_code == 0 {
                        entry.record.exit_code = START_FAILED;
                    }
                    entry.record.finished_at = unix_nanos();
                }
                ContainerEvent::StartFailed
            }
        };
        self.step_container(&id, ask).await;
        if let Some(entry) = self.containers.get_mut(&id) {
            answer_all(&mut entry.start_waiters, &result);
        }
    }
}
