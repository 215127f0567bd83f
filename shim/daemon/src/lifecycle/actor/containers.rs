//! The containers of a pod's actor: handles requests for them, and events of them.

use super::super::error::LifecycleError;
use super::super::make::{self, Prepared, Told, told};
use super::super::processors;
use super::super::{clip, new_id, now};
use super::{Actor, Answer, Entry, Message, PAUSE, Patience, Stopping, tell};
use nacelle_base::{Chain, ContainerId};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::record::ContainerRecord;
use nacelle_model::security::{ContainerUser, PidMode};
use nacelle_model::state;
use nacelle_model::state::{ContainerAction, ContainerEvent, ContainerState};
use nacelle_pod::record::LOST;
use nacelle_proto::pod as proto;
use nacelle_store::Change;
use std::sync::Arc;

/// Exit code of a container that could not be started, the same as in other runtimes.
const START_FAILED: i32 = 128;
/// Exit code of a container that was removed while it ran: killed by signal 9.
const KILLED: i32 = 128 + 9;

fn lost_code() -> i32 {
    i32::try_from(LOST).unwrap_or(i32::MAX)
}

impl Actor {
    pub(super) async fn create(
        &mut self,
        config: ContainerConfig,
        image: ContainerImage,
        volumes: Vec<ContainerImage>,
        answer: Answer<ContainerId>,
    ) {
        let same_name = |entry: &&mut Entry| {
            entry.record.config.name == config.name && entry.record.config.attempt == config.attempt
        };
        if let Some(entry) = self.containers.values_mut().find(same_name) {
            let ids = |images: &[ContainerImage]| images.iter().map(|image| image.id).collect::<Vec<_>>();
            let same = *entry.record.config == config
                && entry.record.image.id == image.id
                && ids(&entry.record.volumes) == ids(&volumes);
            match entry.record.state {
                ContainerState::Creating if same && !entry.record.answered => return entry.made.push(answer),
                ContainerState::Creating | ContainerState::Created if same => {
                    return drop(answer.send(Ok(entry.record.id.clone())));
                }
                _ => {}
            }
            let name = format!("{} (attempt {})", config.name, config.attempt);
            let id = entry.record.id.to_string();
            return drop(answer.send(Err(LifecycleError::NameTaken { what: "container", name, id })));
        }
        let record = match self.check_new(config, image, volumes) {
            Ok(record) => record,
            Err(error) => return drop(answer.send(Err(error))),
        };
        let Some(client) = self.client.clone() else { return drop(answer.send(Err(self.not_ready()))) };
        if let Err(error) = self.enough(Some(&record.config.resources), &record.config.resources.cpuset_cpus) {
            return drop(answer.send(Err(error)));
        }
        let confined = match self.confine(Some(&record.config.resources)).await {
            Ok(()) => self.commit(vec![Change::Container(record.clone().into())]).await,
            failed => failed,
        };
        if let Err(error) = confined {
            return drop(answer.send(Err(error)));
        }
        let id = record.id.clone();
        let mut entry = Entry::new(record.clone());
        let timeline = entry.timeline.clone();
        entry.made.push(answer);
        self.containers.insert(id.clone(), entry);
        self.publish();
        let (parts, pod) = (Arc::clone(&self.parts), self.pod.clone());
        self.effect(async move {
            let prepared = timeline.measure("prepared", make::prepare(&parts, client, &pod, &record)).await;
            Message::Prepared(id, prepared.map(Box::new))
        });
    }

    /// Creates a container whose creation an earlier daemon may have begun.
    pub(super) fn make_again(&self, id: ContainerId) {
        let Some(entry) = self.containers.get(&id).filter(|entry| entry.record.state == ContainerState::Creating)
        else {
            return;
        };
        let (parts, pod, record) = (Arc::clone(&self.parts), self.pod.clone(), entry.record.clone());
        let (client, not_ready) = (self.client.clone(), self.not_ready());
        self.effect(async move {
            let prepared = async {
                let client = client.ok_or(not_ready)?;
                let config = Arc::clone(&record.config);
                make::remove(Arc::clone(&parts), Some(client.clone()), pod.clone(), config, record.id.clone()).await?;
                make::prepare(&parts, client, &pod, &record).await.map(Box::new)
            };
            Message::Prepared(id, prepared.await)
        });
    }

    /// Answers the request as soon as only work in the guest is left; that work continues concurrently with the caller's next
    /// request.
    pub(super) async fn prepared(&mut self, id: ContainerId, result: Result<Box<Prepared>, LifecycleError>) {
        let prepared = match result {
            Ok(prepared) => prepared,
            Err(error) => return self.made(id, Err(error)).await,
        };
        // A container that is being removed keeps its entry until this result has arrived.
        let Some(entry) = self.containers.get_mut(&id) else { return };
        if entry.record.state == ContainerState::Creating && prepared.is_certain() {
            entry.record.answered = true;
            tell(&mut entry.made, &Ok(id.clone()));
        }
        let (record, timeline) = (entry.record.clone(), entry.timeline.clone());
        self.publish();
        let making = make::make(Arc::clone(&self.parts), self.pod.clone(), record, *prepared);
        self.effect(async move { Message::Made(id, timeline.measure("made", making).await) });
    }

    /// Returns the record of a new container if it may be created.
    fn check_new(
        &self,
        config: ContainerConfig,
        image: ContainerImage,
        volumes: Vec<ContainerImage>,
    ) -> Result<ContainerRecord, LifecycleError> {
        if self.pod.state != state::PodState::Ready {
            return Err(self.not_ready());
        }
        if config.privileged && !self.pod.config.privileged {
            return Err(LifecycleError::NotPrivileged { name: config.name });
        }
        processors::check(&config.resources, self.parts.has_guest(&self.pod))?;
        match &config.pid {
            PidMode::Pod if !self.pod.config.shared_pid && !self.pod.config.node_namespaces.pid => {
                return Err(LifecycleError::NoPodPid { name: config.name });
            }
            PidMode::Of(target) => {
                let known = self.containers.values().find(|entry| entry.record.id.as_str() == target);
                let Some(entry) = known else {
                    return Err(LifecycleError::NotFound { what: "target container", id: target.clone() });
                };
                if entry.record.state != ContainerState::Running {
                    return Err(LifecycleError::NotRunning { id: target.clone() });
                }
            }
            PidMode::Pod | PidMode::Own => {}
        }
        let below = |directory: &std::path::PathBuf| directory.join(&config.log_path);
        let log_path = self.pod.config.log_directory.as_ref().filter(|_| !config.log_path.is_empty()).map(below);
        Ok(ContainerRecord {
            id: ContainerId::from_bytes(new_id()),
            pod: self.pod.id.clone(),
            config: Arc::new(config),
            resources: None,
            image,
            volumes,
            log_path,
            state: ContainerState::Creating,
            created_at: now(),
            started_at: 0,
            finished_at: 0,
            exit_code: 0,
            oom_killed: false,
            start_failed: false,
            message: String::new(),
            timeline: Vec::new(),
            answered: false,
            user: None,
        })
    }

    pub(super) async fn made(&mut self, id: ContainerId, result: Result<ContainerUser, LifecycleError>) {
        let Some(entry) = self.containers.get_mut(&id) else { return };
        entry.record.timeline = entry.timeline.steps();
        let ask = match result {
            Ok(user) => {
                // No caller knows a container that is removed before its creation is complete.
                if entry.record.state == ContainerState::Creating {
                    entry.record.answered = true;
                    entry.record.user = Some(user);
                }
                ContainerEvent::Created
            }
            Err(error) => {
                tracing::warn!(pod = %self.pod.id, container = %id, "not made: {}", Chain(&error));
                entry.record.message = clip(&Chain(&error).to_string());
                // Reported only after the cleanup, so that a repeated request finds nothing of the failed attempt.
                entry.make_error = Some(error);
                if entry.record.answered && entry.record.state == ContainerState::Creating {
                    entry.record.start_failed = true;
                    entry.record.exit_code = START_FAILED;
                    entry.record.finished_at = now();
                    ContainerEvent::CreateFailedAfterReply
                } else {
                    ContainerEvent::CreateFailed
                }
            }
        };
        if self.step_container(&id, ask).await == Some(ContainerAction::Remove) {
            return self.begin_remove(id);
        }
        let Some(entry) = self.containers.get_mut(&id) else { return };
        tell(&mut entry.made, &Ok(id.clone()));
        // Requests that arrived during the creation.
        let (start, update) = (!entry.started.is_empty(), !entry.updates.is_empty());
        if let Some(error) = &entry.make_error {
            tell(&mut entry.started, &Err(error.clone()));
        } else if start {
            self.begin_start(&id).await;
        }
        if update {
            self.begin_update(&id).await;
        }
    }

    pub(super) async fn start(&mut self, id: ContainerId, answer: Answer<()>) {
        let Some(entry) = self.containers.get_mut(&id) else {
            return drop(answer.send(Err(LifecycleError::NotFound { what: "container", id: id.to_string() })));
        };
        match entry.record.state.step(ContainerEvent::Start) {
            Err(source) => {
                let refused = LifecycleError::Refused { whose: "container", id: id.to_string(), source };
                // A container whose creation failed returns that error.
                drop(answer.send(Err(entry.make_error.clone().unwrap_or(refused))));
            }
            Ok((ContainerState::Running, _)) => drop(answer.send(Ok(()))),
            Ok((_, act)) => {
                entry.started.push(answer);
                if act == ContainerAction::Start {
                    self.begin_start(&id).await;
                }
            }
        }
    }

    /// Starts a created container for all requests that wait for its start.
    async fn begin_start(&mut self, id: &ContainerId) {
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
                self.publish();
                let (starting, id) = (make::start(Arc::clone(&self.parts), client, id.clone()), id.clone());
                self.effect(async move { Message::Started(id, timeline.measure("started", starting).await) });
            }
            Err(error) => tell(&mut entry.started, &Err(error)),
        }
    }

    pub(super) async fn started(&mut self, id: ContainerId, result: Result<(), LifecycleError>) {
        let Some(entry) = self.containers.get_mut(&id) else { return };
        entry.record.timeline = entry.timeline.steps();
        let ask = match &result {
            Ok(()) => {
                if entry.record.started_at == 0 {
                    entry.record.started_at = now();
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
                    entry.record.finished_at = now();
                }
                ContainerEvent::StartFailed
            }
        };
        self.step_container(&id, ask).await;
        if let Some(entry) = self.containers.get_mut(&id) {
            tell(&mut entry.started, &result);
        }
    }

    pub(super) async fn stop_container(&mut self, id: ContainerId, stopping: Stopping) {
        let client = self.client.clone();
        let Some(entry) = self.containers.get_mut(&id) else { return drop(stopping.answer.send(Ok(()))) };
        match (entry.record.state.step(ContainerEvent::Stop), client) {
            (Ok((_, ContainerAction::Stop)), Some(client)) => {
                let grace = stopping.grace.saturating_sub(stopping.since.elapsed());
                let work = make::stop(Arc::clone(&self.parts), client, id.clone(), grace);
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

    pub(super) async fn stopped(
        &mut self,
        id: ContainerId,
        result: Result<Option<proto::PodState>, LifecycleError>,
        mut stopping: Stopping,
    ) {
        let result = match result {
            Ok(Some(state)) => {
                self.apply(&state).await;
                Ok(())
            }
            Ok(None) => {
                self.lose(&id, "the pod process does not know the container").await;
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
            Err(error) if stopping.patience.lasts(&error, self.parts.answer_limit()) => {
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

    pub(super) async fn remove_container(&mut self, id: ContainerId, answer: Option<Answer<()>>) {
        let Some(entry) = self.containers.get_mut(&id) else {
            if let Some(answer) = answer {
                drop(answer.send(Ok(())));
            }
            return;
        };
        entry.removed.extend(answer);
        if self.step_container(&id, ContainerEvent::Remove).await == Some(ContainerAction::Remove) {
            self.begin_remove(id);
        }
    }

    pub(super) fn begin_remove(&mut self, id: ContainerId) {
        if self.pod.state == state::PodState::Ready && self.client.is_none() {
            let error = self.silent();
            return self.effect(async move { Message::Removed(id, Err(error)) });
        }
        let Some(config) = self.containers.get(&id).map(|entry| Arc::clone(&entry.record.config)) else { return };
        let (client, pod) = (self.client.clone(), self.pod.clone());
        let removing = make::remove(Arc::clone(&self.parts), client, pod, config, id.clone());
        self.effect(async move { Message::Removed(id, removing.await) });
    }

    pub(super) async fn removed(&mut self, id: ContainerId, result: Result<(), LifecycleError>) {
        // Without a VM only the record of the container is left.
        let result = if self.pod.state == state::PodState::Ready { result } else { Ok(()) };
        let result = match result {
            Ok(()) => self.commit(vec![Change::ForgetContainer(id.clone())]).await,
            failed => failed,
        };
        match result {
            Ok(()) => {
                let Some(mut entry) = self.leave(&id) else { return };
                tell(&mut entry.removed, &Ok(()));
                let gone = LifecycleError::NotFound { what: "container", id: id.to_string() };
                tell(&mut entry.made, &Err(entry.make_error.take().unwrap_or_else(|| gone.clone())));
                tell(&mut entry.started, &Err(gone.clone()));
                for (_, answer) in entry.updates.drain(..) {
                    drop(answer.send(Err(gone.clone())));
                }
                self.parts.collect_images(&self.table);
            }
            Err(error) => {
                let limit = self.parts.answer_limit();
                if self.containers.get_mut(&id).is_some_and(|entry| entry.removal.lasts(&error, limit)) {
                    return self.effect(async move {
                        tokio::time::sleep(PAUSE).await;
                        Message::RemoveAgain(id)
                    });
                }
                if let Some(entry) = self.containers.get_mut(&id).filter(|entry| entry.record.finished_at == 0) {
                    entry.record.finished_at = now();
                    entry.record.exit_code = lost_code();
                }
                self.step_container(&id, ContainerEvent::RemoveFailed).await;
                if let Some(entry) = self.containers.get_mut(&id) {
                    entry.removal = Patience::default();
                    tell(&mut entry.made, &Err(entry.make_error.take().unwrap_or_else(|| error.clone())));
                    tell(&mut entry.removed, &Err(error));
                }
            }
        }
    }

    /// Removes the container's entry, which ends the container if it still runs, and sends the event.
    pub(super) fn leave(&mut self, id: &ContainerId) -> Option<Entry> {
        let record = &mut self.containers.get_mut(id)?.record;
        if record.started_at != 0 && record.finished_at == 0 {
            (record.finished_at, record.exit_code) = (now(), KILLED);
            self.publish();
        }
        let entry = self.containers.remove(id);
        self.publish();
        entry
    }

    /// Applies the container states that a pod process reports; impossible ones are ignored.
    pub(super) async fn apply(&mut self, state: &proto::PodState) {
        for container in &state.containers {
            let Ok(id) = container.id.parse::<ContainerId>() else { continue };
            let Some(entry) = self.containers.get_mut(&id) else { continue };
            let told = told(container, entry.record.created_at, now());
            match told.phase {
                proto::ContainerPhase::Running => {
                    if matches!(entry.record.state, ContainerState::Created | ContainerState::Starting) {
                        entry.record.started_at = if told.started_at == 0 { now() } else { told.started_at };
                        self.step_container(&id, ContainerEvent::Started).await;
                    }
                }
                proto::ContainerPhase::Exited => self.exited(&id, told).await,
                proto::ContainerPhase::Created | proto::ContainerPhase::Unspecified => {}
            }
        }
    }

    async fn exited(&mut self, id: &ContainerId, told: Told) {
        let Some(entry) = self.containers.get_mut(id) else { return };
        if !matches!(entry.record.state, ContainerState::Created | ContainerState::Starting | ContainerState::Running) {
            return;
        }
        let record = &mut entry.record;
        if record.started_at == 0 {
            record.started_at = told.started_at;
        }
        // The start may have been dated here, by the node's clock at the time of the response.
        record.finished_at = told.finished_at.max(record.started_at);
        record.exit_code = told.exit_code;
        record.oom_killed = told.oom_killed;
        record.message = told.message;
        self.step_container(id, ContainerEvent::Exited).await;
    }

    async fn lose(&mut self, id: &ContainerId, why: &str) {
        let now = now();
        let told = Told {
            phase: proto::ContainerPhase::Exited,
            started_at: 0,
            finished_at: now,
            exit_code: lost_code(),
            oom_killed: false,
            message: why.to_owned(),
        };
        self.exited(id, told).await;
    }

    /// Marks the containers that still ran as ended with the VM.
    pub(super) async fn lose_running(&mut self, why: &str) {
        let ids: Vec<_> = self.containers.keys().cloned().collect();
        for id in ids {
            self.lose(&id, why).await;
        }
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
                    tracing::info!(pod = %self.pod.id, container = %id, ?from, to = ?next, "container");
                }
                let kept = self.parts.store.commit(vec![Change::Container(record.into())]).await;
                self.log_unkept(kept);
                self.publish();
                Some(act)
            }
            Err(refused) => {
                tracing::error!(pod = %self.pod.id, container = %id, %refused, "a step that cannot be");
                None
            }
        }
    }
}
