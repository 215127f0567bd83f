//! Follows the pod process: takes a connected one into use, handles its reports, and searches for one that went silent.

use super::Actor;
use super::message::Message;
use crate::lifecycle::context::text::clip;
use crate::metrics::labels::VmEndCause;
use nacelle_base::Chain;
use nacelle_model::state;
use nacelle_model::state::PodEvent;
use nacelle_pod::client::{ClientError, PodClient};
use nacelle_pod::record::{LOST, mark_oom_killed};
use nacelle_proto::pod as proto;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// First and longest pause between attempts to find a silent pod process again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

impl Actor {
    /// Takes a connected pod process into use and follows its changes.
    pub(crate) fn found(&mut self, client: PodClient) {
        if !matches!(self.pod.state, state::PodState::Booting | state::PodState::Ready) {
            return;
        }
        self.client = Some(client.clone());
        self.publish();
        let (me, id) = (self.me.clone(), self.pod.id.clone());
        self.watching = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            match client.watch().await {
                Ok(mut changes) => {
                    while let Ok(Some(state)) = changes.message().await {
                        if me.send(Message::Report(state)).await.is_err() {
                            return;
                        }
                    }
                }
                Err(error) => tracing::warn!(pod = %id, "cannot follow the pod process: {}", Chain(&error)),
            }
            let _ = me.send(Message::Lost).await;
        })));
    }

    pub(crate) async fn report(&mut self, mut state: proto::PodState) {
        if self.pod.state != state::PodState::Ready {
            return;
        }
        // If the pod process is gone as well, the cleanup of the pod checks this.
        let lost = state.phase() == proto::Phase::Stopped || state.containers.iter().any(|one| one.exit_code == LOST);
        let mut cause = VmEndCause::Ended;
        if lost && self.services.pods.out_of_memory(&self.services.pod_dir(&self.pod.id)).await {
            mark_oom_killed(&mut state);
            cause = VmEndCause::OomKilled;
        }
        match state.phase() {
            proto::Phase::Stopped => self.gone(Some(state), cause).await,
            _ => self.apply(&state).await,
        }
    }

    /// Handles the end of the connection: finds the pod process again if it lives, otherwise reads its last record.
    pub(crate) fn lost(&mut self) {
        if self.pod.state != state::PodState::Ready {
            return;
        }
        let (services, pod) = (Arc::clone(&self.services), self.pod.clone());
        let search = async move {
            let (id, process) = (&pod.id, pod.process.as_ref());
            let dir = services.pod_dir(id);
            let mut pause = RETRY.0;
            let mut cause = VmEndCause::ProcessLost;
            loop {
                match services.connect(&pod).await {
                    Ok(client) => {
                        // A process that accepts connections but cannot be followed must not keep this daemon busy.
                        tokio::time::sleep(pause).await;
                        return Message::Found(client);
                    }
                    Err(ClientError::NotRunning { .. }) => {
                        // The cleanup removes the cgroup, which has the count.
                        if services.pods.out_of_memory(&dir).await {
                            cause = VmEndCause::OomKilled;
                        }
                        match services.clean_up(&dir, process).await {
                            Ok(last) => return Message::Gone(last.as_ref().map(Into::into), cause),
                            Err(error) => tracing::warn!(pod = %id, "cannot clear up after it: {}", Chain(&error)),
                        }
                    }
                    Err(error) => tracing::warn!(pod = %id, "the pod process is silent: {}", Chain(&error)),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY.1);
            }
        };
        let me = self.me.clone();
        // The task ends with the pod's readiness: `watching` is dropped when the pod is stopped.
        self.watching = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let message = search.await;
            let _ = me.send(message).await;
        })));
    }

    /// Handles the unrequested end of the VM.
    pub(crate) async fn gone(&mut self, last: Option<proto::PodState>, cause: VmEndCause) {
        if self.pod.state != state::PodState::Ready {
            return;
        }
        self.services.counters.count_vm_end(cause);
        let failure = last.as_ref().map(|last| clip(&last.failure)).filter(|failure| !failure.is_empty());
        self.pod.failure = failure.unwrap_or_else(|| "the machine of the pod ended".to_owned());
        tracing::warn!(pod = %self.pod.id, failure = self.pod.failure, "the machine of the pod is gone");
        if let Some(last) = &last {
            self.apply(last).await;
        }
        let failure = self.pod.failure.clone();
        self.mark_running_lost(&failure).await;
        self.step(PodEvent::VmExited).await;
    }
}
