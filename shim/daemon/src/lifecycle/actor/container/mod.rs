//! Changes the states of the pod's containers: applies events to the state table and the reports of the pod process.

mod cpus;
mod create;
mod memory_policy;
mod remove;
mod start;
mod stop;
mod update;

use super::{Actor, Entry};
use crate::lifecycle::container::report::{ContainerReport, sanitize};
use crate::lifecycle::context::unix_nanos;
use crate::metrics::labels::ExitReason;
use nacelle_base::ContainerId;
use nacelle_model::state::{ContainerAction, ContainerEvent, ContainerState};
use nacelle_pod::record::LOST;
use nacelle_proto::pod as proto;
use nacelle_store::Change;

/// Exit code of a container that could not be started, the same as in other runtimes.
const START_FAILED: i32 = 128;

/// Exit code of a container that was removed while it ran: killed by signal 9.
const KILLED: i32 = 128 + 9;

fn lost_code() -> i32 {
    i32::try_from(LOST).unwrap_or(i32::MAX)
}

impl Actor {
    /// Applies the container states that a pod process reports; impossible ones are ignored.
    pub(crate) async fn apply(&mut self, state: &proto::PodState) {
        for container in &state.containers {
            let Ok(id) = container.id.parse::<ContainerId>() else { continue };
            let Some(entry) = self.containers.get_mut(&id) else { continue };
            let report = sanitize(container, entry.record.created_at, unix_nanos());
            match report.phase {
                proto::ContainerPhase::Running => {
                    if matches!(entry.record.state, ContainerState::Created | ContainerState::Starting) {
                        entry.record.started_at = if report.started_at == 0 { unix_nanos() } else { report.started_at };
                        self.step_container(&id, ContainerEvent::Started).await;
                    }
                }
                proto::ContainerPhase::Exited => self.exited(&id, report).await,
                proto::ContainerPhase::Created | proto::ContainerPhase::Unspecified => {}
            }
        }
    }

    async fn exited(&mut self, id: &ContainerId, report: ContainerReport) {
        let Some(entry) = self.containers.get_mut(id) else { return };
        let is_news = match entry.record.state {
            ContainerState::Created | ContainerState::Starting | ContainerState::Running => true,
            // The removal kills the container, and may fail after that.
            ContainerState::Removing => entry.record.finished_at == 0,
            ContainerState::Creating | ContainerState::Exited => false,
        };
        if !is_news {
            return;
        }
        let record = &mut entry.record;
        if record.started_at == 0 {
            record.started_at = report.started_at;
        }
        // The start may have been dated here, by the node's clock at the time of the response.
        record.finished_at = report.finished_at.max(record.started_at);
        record.exit_code = report.exit_code;
        record.oom_killed = report.oom_killed;
        record.message = report.message;
        if record.state == ContainerState::Removing {
            self.services.counters.count_container_exit(ExitReason::of(record));
        }
        self.step_container(id, ContainerEvent::Exited).await;
    }

    async fn mark_lost(&mut self, id: &ContainerId, why: &str) {
        let now = unix_nanos();
        let report = ContainerReport {
            phase: proto::ContainerPhase::Exited,
            started_at: 0,
            finished_at: now,
            exit_code: lost_code(),
            oom_killed: false,
            message: why.to_owned(),
        };
        self.exited(id, report).await;
    }

    /// Marks the containers that still ran as ended with the VM.
    pub(crate) async fn mark_running_lost(&mut self, why: &str) {
        let ids: Vec<_> = self.containers.keys().cloned().collect();
        for id in ids {
            self.mark_lost(&id, why).await;
        }
    }

    /// Removes the container's entry, which ends the container if it still runs, and sends the event.
    pub(crate) fn remove_entry(&mut self, id: &ContainerId) -> Option<Entry> {
        let record = &mut self.containers.get_mut(id)?.record;
        if record.started_at != 0 && record.finished_at == 0 {
            // The clock may have been set back meanwhile.
            (record.finished_at, record.exit_code) = (unix_nanos().max(record.started_at), KILLED);
            self.services.counters.count_container_exit(ExitReason::of(record));
            self.publish();
        }
        let entry = self.containers.remove(id);
        self.publish();
        entry
    }

    /// Applies an event to a container's state, then records and publishes it. Returns `None` if the state rejects the event: for
    /// a reported event this is a bug, or the pod process sent a false report.
    async fn step_container(&mut self, id: &ContainerId, ask: ContainerEvent) -> Option<ContainerAction> {
        let entry = self.containers.get_mut(id)?;
        let from = entry.record.state;
        match from.step(ask) {
            Ok((next, act)) => {
                entry.record.state = next;
                let record = entry.record.clone();
                if next != from {
                    let ended = (next == ContainerState::Exited).then_some(&record);
                    // An end before or during a removal was counted then.
                    if let Some(record) = ended.filter(|_| from != ContainerState::Removing) {
                        self.services.counters.count_container_exit(ExitReason::of(record));
                    }
                    let exit_code = ended.map(|record| record.exit_code);
                    let oom_killed = ended.map(|record| record.oom_killed);
                    let why = ended.map(|record| record.message.as_str()).filter(|message| !message.is_empty());
                    let name = &record.config.name;
                    tracing::info!(
                        pod = %self.pod.id, container = %id, name, ?from, to = ?next, exit_code, oom_killed, why, "container"
                    );
                }
                let kept = self.services.store.commit(vec![Change::Container(record.into())]).await;
                self.log_unkept(kept);
                self.publish();
                Some(act)
            }
            Err(refused) => {
                tracing::error!(pod = %self.pod.id, container = %id, %refused, "BUG: the state of the container does not allow this event");
                None
            }
        }
    }
}
