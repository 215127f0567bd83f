//! Handles requests to create a container.

use super::START_FAILED;
use crate::lifecycle::actor::message::{Answer, Message};
use crate::lifecycle::actor::{Actor, Entry, answer_all};
use crate::lifecycle::container::prepare::Prepared;
use crate::lifecycle::container::{cpus, create, prepare, remove};
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::text::{clip, lead_with_reason};
use crate::lifecycle::context::{new_id, unix_nanos};
use crate::lifecycle::restore::Continuation;
use crate::traces::{RequestSpan, TracedWork};
use nacelle_base::{Chain, ContainerId};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::record::{ContainerRecord, PodRecord, RestoredFrom, WaitingContainer};
use nacelle_model::security::{ContainerUser, PidMode};
use nacelle_model::state;
use nacelle_model::state::{ContainerAction, ContainerEvent, ContainerState, PodEvent};
use nacelle_pod::protocol::PodFeatureSet;
use nacelle_store::Change;
use std::sync::Arc;

impl Actor {
    pub(crate) async fn create(
        &mut self,
        continuation: Option<Continuation>,
        config: ContainerConfig,
        image: ContainerImage,
        volumes: Vec<ContainerImage>,
        span: Option<RequestSpan>,
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
                ContainerState::Creating if same && !entry.record.answered => return entry.create_waiters.push(answer),
                ContainerState::Creating | ContainerState::Created if same => {
                    return drop(answer.send(Ok(entry.record.id.clone())));
                }
                _ => {}
            }
            let name = format!("{} (attempt {})", config.name, config.attempt);
            let id = entry.record.id.to_string();
            return drop(answer.send(Err(LifecycleError::NameTaken { what: "container", name, id })));
        }
        let taken = continuation.map(|continuation| self.take_up(continuation, &config.name)).transpose();
        let checked = taken.and_then(|taken| Ok((self.check_new(config, image, volumes)?, taken)));
        let (record, taken) = match checked {
            Ok((record, Some(taken))) => (ContainerRecord { id: taken.0.id.clone(), ..record }, Some(taken)),
            Ok((record, None)) => (record, None),
            Err(error) => return drop(answer.send(Err(error))),
        };
        let Some(client) = self.client.clone() else { return drop(answer.send(Err(self.not_ready()))) };
        // Refused before the record of the container, whose removal the process would refuse, too.
        if let Err(refused) = client.require(PodFeatureSet::BASE) {
            return drop(answer.send(Err(at("create the container")(refused))));
        }
        if let Err(error) =
            self.check_pinned_vcpus(Some(&record.config.resources), &record.config.resources.cpuset_cpus)
        {
            return drop(answer.send(Err(error)));
        }
        let confined = match self.confine(Some(&record.config.resources)).await {
            Ok(()) => {
                let restored = taken.as_ref().map(|(_, restored)| restored.clone());
                let pod = restored.map(|restored| PodRecord { restored: Some(restored), ..self.pod.clone() });
                let pod = pod.into_iter().map(|pod| Change::Pod(pod.into()));
                self.commit(pod.chain([Change::Container(record.clone().into())]).collect()).await
            }
            failed => failed,
        };
        if let Err(error) = confined {
            return drop(answer.send(Err(error)));
        }
        let id = record.id.clone();
        let mut entry = Entry::new(record.clone());
        entry.create_span = span;
        if let Some((waited, restored)) = taken {
            entry.waited = Some(waited);
            self.pod.restored = Some(restored);
        }
        let timeline = entry.timeline.clone();
        entry.create_waiters.push(answer);
        self.containers.insert(id.clone(), entry);
        self.publish();
        let (services, pod) = (Arc::clone(&self.services), self.pod.clone());
        self.effect(async move {
            let prepared = timeline.measure("prepared", prepare::prepare(&services, client, &pod, &record)).await;
            Message::Prepared(id, prepared.map(Box::new))
        });
    }

    /// Returns the container that continues, and the pod's part without it among the waiting ones.
    fn take_up(
        &self,
        continuation: Continuation,
        name: &str,
    ) -> Result<(WaitingContainer, RestoredFrom), LifecycleError> {
        let Continuation { id, volumes } = continuation;
        let mut restored = self.pod.restored.clone();
        let taken = restored.as_mut().and_then(|restored| {
            let place = restored.waiting.iter().position(|waiting| waiting.id == id)?;
            Some(restored.waiting.remove(place))
        });
        let (Some(waiting), Some(mut restored)) = (taken, restored) else {
            return Err(LifecycleError::Continued { name: name.to_owned() });
        };
        restored.volumes.extend(volumes);
        Ok((waiting, restored))
    }

    /// Lets a container wait again of whose continuation the guest knows nothing yet.
    async fn wait_again(&mut self, id: &ContainerId) {
        let waited = self.containers.get_mut(id).and_then(|entry| entry.waited.take());
        if let (Some(waiting), Some(restored)) = (waited, &mut self.pod.restored) {
            restored.waiting.push(waiting);
            self.keep_pod().await;
        }
    }

    /// Creates a container whose creation an earlier daemon may have begun.
    pub(crate) fn create_again(&self, id: ContainerId) {
        let Some(entry) = self.containers.get(&id).filter(|entry| entry.record.state == ContainerState::Creating)
        else {
            return;
        };
        let (services, pod, record) = (Arc::clone(&self.services), self.pod.clone(), entry.record.clone());
        let (client, not_ready) = (self.client.clone(), self.not_ready());
        self.effect(async move {
            let prepared = async {
                let client = client.ok_or(not_ready)?;
                let config = Arc::clone(&record.config);
                remove::remove(Arc::clone(&services), Some(client.clone()), pod.clone(), config, record.id.clone())
                    .await
                    .map_err(|failure| failure.error)?;
                prepare::prepare(&services, client, &pod, &record).await.map(Box::new)
            };
            Message::Prepared(id, prepared.await)
        });
    }

    /// Answers the request as soon as only work in the guest is left; that work continues concurrently with the caller's next
    /// request.
    pub(crate) async fn prepared(&mut self, id: ContainerId, result: Result<Box<Prepared>, LifecycleError>) {
        let prepared = match result {
            Ok(prepared) => prepared,
            Err(error) => {
                self.wait_again(&id).await;
                return self.created(id, Err(error)).await;
            }
        };
        // A container that is being removed keeps its entry until this result has arrived.
        let Some(entry) = self.containers.get_mut(&id) else { return };
        entry.record.stop_signal = Some(prepared.stop_signal());
        if entry.record.state == ContainerState::Creating && prepared.is_certain() && entry.waited.is_none() {
            entry.record.answered = true;
            answer_all(&mut entry.create_waiters, &Ok(id.clone()));
        }
        let (record, timeline) = (entry.record.clone(), entry.timeline.clone());
        self.publish();
        let making = create::create(Arc::clone(&self.services), self.pod.clone(), record, *prepared);
        self.effect(async move { Message::Created(id, timeline.measure("made", making).await) });
    }

    /// Ends a pod of whose containers one could not continue in the guest: it would be a new one if it was created again. RestorePod removes the pod.
    async fn end_unless_continued(&mut self, id: &ContainerId) {
        let failed = self.containers.get(id).filter(|entry| entry.waited.is_some()).and_then(|entry| {
            let error = entry.create_error.as_ref()?;
            Some((entry.record.config.name.clone(), Chain(error).to_string()))
        });
        let is_complete = self.pod.restored.as_ref().is_some_and(|restored| restored.is_complete);
        let Some((name, error)) = failed.filter(|_| is_complete && self.pod.state == state::PodState::Ready) else {
            return;
        };
        self.pod.failure = clip(&format!("container {name:?} could not continue from its checkpoint: {error}"));
        tracing::warn!(pod = %self.pod.id, failure = self.pod.failure, "the pod ends, because it would be incomplete");
        self.step(PodEvent::Stop).await;
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
        cpus::check(&config.resources, self.pod.config.kind.has_guest())?;
        match &config.pid {
            PidMode::Pod if !self.pod.config.shared_pid && !self.pod.config.kind.node_namespaces().pid => {
                return Err(LifecycleError::NoPodPid { name: config.name });
            }
            PidMode::Of(target) => {
                let known = self.containers.values().find(|entry| entry.record.id.as_str() == target);
                let Some(entry) = known else {
                    return Err(LifecycleError::NotFound { what: "target container", id: target.clone() });
                };
                if entry.record.state != ContainerState::Running {
                    return Err(LifecycleError::NotRunning { id: target.clone(), why: String::new() });
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
            created_at: unix_nanos(),
            started_at: 0,
            finished_at: 0,
            exit_code: 0,
            oom_killed: false,
            start_failed: false,
            message: String::new(),
            timeline: Vec::new(),
            answered: false,
            user: None,
            stop_signal: None,
        })
    }

    pub(crate) async fn created(&mut self, id: ContainerId, result: Result<ContainerUser, LifecycleError>) {
        let Some(entry) = self.containers.get_mut(&id) else { return };
        entry.record.timeline = entry.timeline.steps();
        if let Some(span) = entry.create_span.take() {
            span.add_steps(TracedWork::Container, &entry.record.timeline);
        }
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
                // Otherwise the request has failed, and is logged.
                if entry.record.answered {
                    tracing::warn!(pod = %self.pod.id, container = %id, "not created: {}", Chain(&error));
                }
                entry.record.message = clip(&lead_with_reason(&Chain(&error).to_string()));
                // Reported only after the cleanup, so that a repeated request finds nothing of the failed attempt.
                entry.create_error = Some(error);
                if entry.record.answered && entry.record.state == ContainerState::Creating {
                    entry.record.start_failed = true;
                    entry.record.exit_code = START_FAILED;
                    entry.record.finished_at = unix_nanos();
                    ContainerEvent::CreateFailedAfterReply
                } else {
                    ContainerEvent::CreateFailed
                }
            }
        };
        if self.step_container(&id, ask).await == Some(ContainerAction::Remove) {
            self.begin_remove(id.clone());
            return self.end_unless_continued(&id).await;
        }
        let Some(entry) = self.containers.get_mut(&id) else { return };
        answer_all(&mut entry.create_waiters, &Ok(id.clone()));
        // Requests that arrived during the creation.
        let (start, update) = (!entry.start_waiters.is_empty(), !entry.updates.is_empty());
        if let Some(error) = &entry.create_error {
            answer_all(&mut entry.start_waiters, &Err(error.clone()));
        } else if start {
            self.begin_start(&id).await;
        }
        if update {
            self.begin_update(&id).await;
        }
    }
}
