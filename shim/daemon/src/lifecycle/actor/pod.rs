//! Changes the state of the pod: applies events to the state table, runs the resulting actions, and handles their results.

use super::message::Message;
use super::{Actor, answer_all};
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::events::EventKind;
use crate::lifecycle::pod::boot::BootedPod;
use crate::lifecycle::pod::teardown::{self, TornDown};
use crate::metrics::labels::StartResult;
use nacelle_base::Chain;
use nacelle_model::state;
use nacelle_model::state::{PodAction, PodEvent};
use nacelle_proto::pod as proto;
use nacelle_store::Change;
use std::sync::Arc;

impl Actor {
    /// Applies an event to the pod's state and runs the resulting action. A teardown never waits for the store: a full disk must
    /// not keep a VM running, and after a crash recovery finds the VM missing.
    pub(crate) async fn step(&mut self, ask: PodEvent) {
        let (next, act) = match self.pod.state.step(ask) {
            Ok(step) => step,
            Err(refused) => {
                tracing::error!(pod = %self.pod.id, %refused, "BUG: the state of the pod does not allow this event");
                return;
            }
        };
        if next != self.pod.state {
            let name = &self.pod.config.name;
            let (namespace, name) = (&name.namespace, &name.name);
            tracing::info!(pod = %self.pod.id, namespace, name, from = ?self.pod.state, to = ?next, "pod");
            self.pod.state = next;
            self.keep_pod().await;
        }
        match act {
            PodAction::Nothing => {}
            PodAction::CancelBoot => self.cancel_boot.cancel(),
            PodAction::CleanUp => {
                self.watching = None;
                let client = self.client.take();
                self.publish();
                let teardown = teardown::tear_down(
                    Arc::clone(&self.services),
                    self.pod.id.clone(),
                    client,
                    self.pod.process.clone(),
                );
                self.effect(async move { Message::TornDown(teardown.await) });
            }
            PodAction::Forget => {
                let services = Arc::clone(&self.services);
                let id = self.pod.id.clone();
                let mut changes: Vec<_> = self.containers.keys().cloned().map(Change::ForgetContainer).collect();
                changes.push(Change::ForgetPod(id.clone()));
                self.effect(async move {
                    let forgotten = match teardown::remove_directory(&services, &id).await {
                        Ok(()) => services.store.commit(changes).await.map_err(at("forget the pod")),
                        Err(error) => Err(error),
                    };
                    Message::Forgotten(forgotten)
                });
            }
        }
    }

    pub(crate) async fn booted(&mut self, result: Result<BootedPod, LifecycleError>) {
        self.pod.timeline = self.timeline.steps();
        match result {
            Ok(up) => {
                if self.pod.state == state::PodState::Booting {
                    self.count_start(StartResult::Ready);
                    (self.pod.ips, self.pod.kernel_release) = (up.ips, up.kernel_release);
                    self.pod.machine = Some(up.machine);
                    self.pod.was_ready = true;
                    self.found(up.client);
                } else {
                    self.count_start(StartResult::Cancelled);
                    self.client = Some(up.client);
                    self.boot_error = Some(LifecycleError::Cancelled);
                }
                self.step(PodEvent::Booted).await;
            }
            Err(error) => {
                let is_cancelled = self.pod.state != state::PodState::Booting;
                self.count_start(if is_cancelled { StartResult::Cancelled } else { StartResult::Failed });
                tracing::warn!(pod = %self.pod.id, timeline = %self.timeline, "the pod could not start: {}", Chain(&error));
                self.boot_error = Some(error);
                self.step(PodEvent::BootFailed).await;
            }
        }
    }

    pub(crate) async fn torn_down(&mut self, torn_down: TornDown) {
        self.pod.left = torn_down.left;
        self.pod.ending = torn_down.timeline.steps();
        if let Some(last) = torn_down.last {
            self.apply(&proto::PodState::from(&last)).await;
        }
        // Containers whose end the pod process could not report have ended with the VM.
        if self.pod.left.is_empty() {
            self.pod.process = None;
            self.mark_running_lost("the machine of the pod is gone").await;
            self.pod.ips.clear();
            self.step(PodEvent::CleanedUp).await;
        } else {
            self.step(PodEvent::CleanupFailed).await;
        }
    }

    pub(crate) async fn forgotten(&mut self, result: Result<(), LifecycleError>) {
        match result {
            Ok(()) => {
                self.table.forget(&self.pod);
                self.services.events.notify_change();
                self.ended = true;
                let ids: Vec<_> = self.containers.keys().cloned().collect();
                let mut gone: Vec<_> = ids.iter().filter_map(|id| self.remove_entry(id)).collect();
                if self.announced.is_known() {
                    self.publish_events(&[(EventKind::Deleted, self.pod.id.to_string())]);
                }
                answer_all(&mut self.wait_stopped, &Ok(()));
                answer_all(&mut self.wait_removed, &Ok(()));
                for entry in &mut gone {
                    answer_all(&mut entry.remove_waiters, &Ok(()));
                }
                if let Some(error) = self.boot_error.take() {
                    answer_all(&mut self.wait_ready, &Err(error));
                }
                self.table.collect_images(&self.services);
            }
            Err(error) => {
                self.step(PodEvent::ForgetFailed).await;
                answer_all(&mut self.wait_removed, &Err(error.clone()));
                // The boot failed first: what could not be forgotten after it is not the cause.
                let cause = self.boot_error.take().unwrap_or(error);
                answer_all(&mut self.wait_ready, &Err(cause));
                // No request waits any more, so the next `settle` does not retry by itself.
                self.pod.was_ready = true;
            }
        }
    }
}
