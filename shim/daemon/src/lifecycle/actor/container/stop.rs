//! Handles requests to stop a container.

use crate::lifecycle::actor::Actor;
use crate::lifecycle::actor::message::{Message, PAUSE, Stopping};
use crate::lifecycle::container::stop;
use crate::lifecycle::context::error::LifecycleError;
use nacelle_base::ContainerId;
use nacelle_model::state;
use nacelle_model::state::{ContainerAction, ContainerEvent, ContainerState};
use nacelle_proto::pod as proto;
use std::sync::Arc;

impl Actor {
    pub(crate) async fn stop_container(&mut self, id: ContainerId, stopping: Stopping) {
        let client = self.client.clone();
        let Some(entry) = self.containers.get_mut(&id) else { return drop(stopping.answer.send(Ok(()))) };
        match (entry.record.state.step(ContainerEvent::Stop), client) {
            (Ok((_, ContainerAction::Stop)), Some(client)) => {
                let grace = stopping.grace.saturating_sub(stopping.since.elapsed());
                let work = stop::stop(Arc::clone(&self.services), client, id.clone(), grace);
                self.effect(async move { Message::Stopped(id, work.await, stopping) });
            }
            // The pod process is being searched for.
            (Ok((_, ContainerAction::Stop)), None) if self.pod.state == state::PodState::Ready => {
                self.stopped(id, Err(self.silent()), stopping).await;
            }
            // The container ends with its VM, which is being stopped.
            (Ok((_, ContainerAction::Stop)), None) => self.wait_stopped.push(stopping.answer),
            _ => drop(stopping.answer.send(Ok(()))),
        }
    }

    pub(crate) async fn stopped(
        &mut self,
        id: ContainerId,
        result: Result<Option<proto::PodState>, LifecycleError>,
        mut stopping: Stopping,
    ) {
        let result = match result {
            Ok(state) => {
                if let Some(state) = &state {
                    self.apply(state).await;
                }
                if !state.is_some_and(|state| state.containers.iter().any(|container| container.id == id.as_str())) {
                    self.mark_lost(&id, "the pod process does not know the container").await;
                }
                Ok(())
            }
            Err(error) => Err(error),
        };
        // Whatever the result is, what counts is that the container does not run.
        let runs = self
            .containers
            .get(&id)
            .is_some_and(|entry| matches!(entry.record.state, ContainerState::Running | ContainerState::Starting));
        let result = match result {
            Err(_) if !runs => Ok(()),
            Err(error) if stopping.patience.lasts(&error, self.services.request_timeout()) => {
                return self.effect(async move {
                    tokio::time::sleep(PAUSE).await;
                    Message::StopAgain(id, stopping)
                });
            }
            Ok(()) if runs => {
                let why = "the pod process said that the container has stopped, but it has not".to_owned();
                Err(LifecycleError::NotReady { id: self.pod.id.to_string(), why })
            }
            other => other,
        };
        drop(stopping.answer.send(result));
    }
}
