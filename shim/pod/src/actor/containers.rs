//! Handles the actor's requests for single containers and the events that their effects report, and counts the users of images.

use super::{Actor, Answers, Entry, Live, News, Reply, send, tell};
use crate::container::{self, Attach, Ended, ImageUse, Started};
use crate::error::{Failure, PodError, printable};
use crate::exec;
use crate::guest_values::Bounded;
use crate::log::LogPath;
use crate::record::{ContainerPhase, ContainerRecord, LOST, Phase};
use crate::state::{ContainerAction, ContainerEvent, ContainerState};
use crate::stops::{Stop, Stops};
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, Kind};
use nacelle_engine::Slot;
use nacelle_proto::{common, pod};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The exit code of a container that could not be started.
const START_FAILED: u32 = 128;
const SIGTERM: u32 = 15;

impl Actor {
    pub(super) fn create(
        &mut self,
        request: pod::CreateContainerRequest,
        reply: Reply<Bounded<common::CreateContainerResponse>>,
        answers: &mut Answers,
    ) {
        let id = request.id.clone();
        let current = self.containers.get(&id).map_or(ContainerState::Gone, |entry| entry.state);
        match (current.step(ContainerEvent::Create), self.containers.get_mut(&id)) {
            (Err(source), _) => tell(reply, Err(PodError::Container { id, source }.into())),
            (Ok((_, ContainerAction::Join)), Some(entry)) => entry.creating.push(reply),
            (Ok((_, ContainerAction::Nothing)), Some(entry)) => {
                let answer = entry.response.clone();
                answers.later(move || tell(reply, Ok(answer)));
            }
            (Ok((next, _)), _) => match self.begin_create(&id, next, request) {
                Ok(entry) => self.containers.entry(id).or_insert(entry).creating.push(reply),
                Err(failure) => tell(reply, Err(failure)),
            },
        }
    }

    fn begin_create(
        &mut self,
        id: &str,
        next: ContainerState,
        request: pod::CreateContainerRequest,
    ) -> Result<Entry, Failure> {
        let agent = self.agent()?;
        if !is_name(id) {
            let rule = "1 to 128 letters, digits, '-', '_' or '.' are expected";
            return Err(PodError::Field { field: "id", value: printable(id, 200), rule }.into());
        }
        let log = match request.log_path.as_str() {
            "" => None,
            path => Some(LogPath::check(self.spec.log_directory.as_deref(), Path::new(path)).map_err(PodError::from)?),
        };
        let volume_disk = self.check_devices(&request)?;
        let disks = self.take_disks(&request)?;
        let devices = self.acquire_devices(volume_disk.as_ref(), &request)?;
        let images = match self.acquire(self.image_disk().as_ref(), &request) {
            Ok(images) => images,
            Err(failure) => {
                request.devices.iter().for_each(|device| self.forget_device(&device.key));
                return Err(failure);
            }
        };
        let request = Arc::new(request);
        let (name, own, asked) = (id.to_owned(), self.own.clone(), Arc::clone(&request));
        let pushed = self.pushed.clone();
        tokio::spawn(async move {
            let made = container::make(agent, asked, images, devices, disks, pushed).await;
            send(&own, News::Created(name, made));
        });
        Ok(Entry {
            state: next,
            request,
            log,
            response: Bounded::default(),
            creating: Vec::new(),
            waiting: Vec::new(),
            started: None,
            life: None,
            stops: Stops::default(),
        })
    }

    /// Counts this container as a user of each of its images, the root's first; if one image cannot be placed, counts it for none.
    fn acquire(
        &mut self,
        slot: Option<&Slot>,
        request: &pod::CreateContainerRequest,
    ) -> Result<Vec<ImageUse>, Failure> {
        let mut uses: Vec<ImageUse> = Vec::new();
        for (key, extents) in images_of(request) {
            let image = ImageDisk { extents: extents.iter().map(extent).collect() };
            let (placement, new) = match self.images.acquire(key, &image) {
                Ok(acquired) => acquired,
                Err(error) => {
                    // No image was attached yet: new images are forgotten, the others lose this user.
                    for (key, _) in images_of(request).take(uses.len()) {
                        if let Some(placement) = self.images.release(key) {
                            self.attached.remove(key);
                            self.images.free(placement);
                        }
                    }
                    return Err(PodError::from(error).into());
                }
            };
            let mut attach = None;
            if new {
                let (tell, attached) = watch::channel(None);
                self.attached.insert(key.to_owned(), attached);
                attach = Some(Attach { slot: slot.cloned(), key: key.to_owned(), image, tell });
            }
            let attached = self.attached.get(key).cloned().ok_or(PodError::Ending)?;
            uses.push(ImageUse { placement, attach, attached });
        }
        Ok(uses)
    }

    pub(super) fn created(
        &mut self,
        id: &str,
        outcome: Result<Bounded<common::CreateContainerResponse>, Failure>,
        answers: &mut Answers,
    ) {
        let event = if outcome.is_ok() { ContainerEvent::Created } else { ContainerEvent::CreateFailed };
        self.step(id, event);
        let Some(entry) = self.containers.get_mut(id) else { return };
        for reply in std::mem::take(&mut entry.creating) {
            let outcome = outcome.clone();
            answers.later(move || tell(reply, outcome));
        }
        if let Ok(response) = outcome {
            self.record.containers.push(container::made_record(id, &response));
            entry.response = response;
            if self.agent.is_none() {
                // The VM was gone before the reply arrived.
                self.lose("the machine is gone");
            }
        } else if let Some(entry) = self.containers.remove(id) {
            self.release_all(&entry.request);
        }
    }

    pub(super) fn start(&mut self, id: &str, reply: Reply<()>, answers: &mut Answers) {
        let Some(entry) = self.containers.get_mut(id).filter(|entry| entry.state != ContainerState::Creating) else {
            return tell(reply, Err(PodError::NoContainer { id: id.to_owned() }.into()));
        };
        match entry.state.step(ContainerEvent::Start) {
            Err(source) => tell(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((_, ContainerAction::Join)) => entry.waiting.push(reply),
            Ok((next, ContainerAction::Start)) => {
                let Some(agent) = self.agent.clone().filter(|_| self.record.phase == Phase::Ready) else {
                    return tell(reply, Err(self.unavailable()));
                };
                entry.state = next;
                entry.waiting.push(reply);
                let (id, own) = (id.to_owned(), self.own.clone());
                let (tty, log) = (entry.request.tty, entry.log.clone());
                tokio::spawn(async move {
                    let started = container::start(&agent, &id, tty, log).await;
                    send(&own, News::Started(id, started));
                });
            }
            Ok(_) => answers.later(move || tell(reply, Ok(()))),
        }
    }

    pub(super) fn started(&mut self, id: &str, outcome: Result<Started, PodError>, answers: &mut Answers) {
        let event = if outcome.is_ok() { ContainerEvent::Started } else { ContainerEvent::StartFailed };
        let in_time = self.step(id, event);
        let (own, unavailable) = (self.own.clone(), self.unavailable());
        let Some(entry) = self.containers.get_mut(id) else { return };
        let now = crate::now_nanos();
        let record = self.record.containers.iter_mut().find(|container| container.id == id);
        let told = match (outcome, self.agent.clone()) {
            (Ok(Started { streams, log, outputs, mut pumping }), Some(agent)) if in_time => {
                if let Some(record) = record {
                    record.phase = ContainerPhase::Running;
                    record.started_at = now;
                }
                entry.started = Some((streams, log, outputs));
                let id = id.to_owned();
                let life = tokio::spawn(async move {
                    let end = container::ended(&agent, &id, &mut pumping).await;
                    send(&own, News::Exited(id, end));
                });
                entry.life = Some(life.abort_handle());
                Ok(())
            }
            (Ok(_), _) => Err(unavailable),
            (Err(error), _) => {
                let failure = Failure::from(error);
                if let Some(record) = record.filter(|record| record.phase != ContainerPhase::Exited) {
                    record.phase = ContainerPhase::Exited;
                    record.finished_at = now;
                    record.exit_code = START_FAILED;
                    record.message.clone_from(&failure.message);
                }
                Err(failure)
            }
        };
        for reply in std::mem::take(&mut entry.waiting) {
            let told = told.clone();
            answers.later(move || tell(reply, told));
        }
    }

    pub(super) fn exited(&mut self, id: &str, end: Ended) {
        if !self.step(id, ContainerEvent::Exited) {
            return;
        }
        let record = self.record.containers.iter_mut().find(|container| container.id == id);
        if let Some(record) = record.filter(|record| record.phase == ContainerPhase::Running) {
            let now = crate::now_nanos();
            record.phase = ContainerPhase::Exited;
            record.exit_code = end.code;
            record.oom_killed = end.oom_killed;
            record.message = end.message;
            record.finished_at = *end.at.bound_time(record.started_at, now);
        }
    }

    pub(super) fn stop(&mut self, id: &str, grace: Duration, reply: Reply<()>) {
        let entry = self.containers.get_mut(id);
        match entry.as_ref().map_or(ContainerState::Gone, |entry| entry.state).step(ContainerEvent::Stop) {
            Err(source) => tell(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((_, ContainerAction::Stop)) => {
                let (Some(entry), Some(agent)) = (entry, self.agent.clone()) else { return tell(reply, Ok(())) };
                let (id, published) = (id.to_owned(), self.published.subscribe());
                let (signal, limit) = (signal_of(&entry.request), self.spec.timeouts.call());
                let outcome = entry.stops.begin(Stop { agent, published, id, signal, limit }, grace);
                tokio::spawn(async move { tell(reply, outcome.wait().await) });
            }
            Ok(_) => tell(reply, Ok(())),
        }
    }

    pub(super) fn remove(&mut self, id: &str, reply: Reply<()>) {
        let Some(entry) = self.containers.get_mut(id) else { return tell(reply, Ok(())) };
        match entry.state.step(ContainerEvent::Remove) {
            Err(source) => tell(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((next, act)) => {
                entry.state = next;
                entry.waiting.push(reply);
                if act == ContainerAction::Remove {
                    let (id, own, agent) = (id.to_owned(), self.own.clone(), self.agent.clone());
                    tokio::spawn(async move {
                        // Without a VM there is nothing left to remove.
                        let removed = match agent {
                            Some(agent) => agent.remove_container(&id).await,
                            None => Ok(()),
                        };
                        send(&own, News::Removed(id, removed));
                    });
                }
            }
        }
    }

    pub(super) fn removed(&mut self, id: &str, outcome: Result<(), PodError>, answers: &mut Answers) {
        // What was lost with the VM counts as removed.
        let outcome = match outcome {
            Err(PodError::Died { .. }) => Ok(()),
            _ if self.agent.is_none() => Ok(()),
            other => other.map_err(Failure::from),
        };
        let event = if outcome.is_ok() { ContainerEvent::Removed } else { ContainerEvent::RemoveFailed };
        self.step(id, event);
        let Some(entry) = self.containers.get_mut(id) else { return };
        for reply in std::mem::take(&mut entry.waiting) {
            let outcome = outcome.clone();
            answers.later(move || tell(reply, outcome));
        }
        if let Some(life) = entry.life.take() {
            life.abort();
        }
        match outcome {
            Ok(()) => {
                self.record.containers.retain(|container| container.id != id);
                if let Some(entry) = self.containers.remove(id) {
                    self.release_all(&entry.request);
                }
            }
            Err(failure) => {
                let record = self.record.containers.iter_mut().find(|container| container.id == id);
                if let Some(record) = record.filter(|record| record.phase != ContainerPhase::Exited) {
                    mark_lost(record, &failure.message);
                }
            }
        }
    }

    pub(super) fn reopen_log(&mut self, id: &str, reply: Reply<()>) {
        let Some(entry) = self.containers.get(id) else {
            return tell(reply, Err(PodError::NoContainer { id: id.to_owned() }.into()));
        };
        // A container that has not started opens its log when it starts.
        let Some((_, log, _)) = &entry.started else { return tell(reply, Ok(())) };
        let log = Arc::clone(log);
        tokio::spawn(async move {
            let reopened = run_blocking("reopen the log of a container", move || log.reopen()).await;
            let reopened = reopened.map_err(PodError::from).and_then(|reopened| Ok(reopened?));
            tell(reply, reopened.map_err(Failure::from));
        });
    }

    /// Returns this container if it runs.
    pub(super) fn running(&self, id: &str) -> Result<Live, Failure> {
        let Some(entry) = self.containers.get(id) else {
            return Err(PodError::NoContainer { id: id.to_owned() }.into());
        };
        match &entry.started {
            Some((_, _, outputs)) if entry.state == ContainerState::Running => {
                Ok(Live { agent: self.agent()?, request: Arc::clone(&entry.request), outputs: outputs.clone() })
            }
            _ => Err(Failure {
                kind: Kind::Conflict,
                message: format!("container {id} is {:?}; a running one is needed", entry.state),
            }),
        }
    }

    pub(super) fn exec(&mut self, request: pod::ExecSyncRequest, mut reply: Reply<Bounded<pod::ExecSyncResponse>>) {
        let agent = match self.running(&request.id) {
            Ok(live) => live.agent,
            Err(failure) => return tell(reply, Err(failure)),
        };
        tokio::spawn(async move {
            let done = tokio::select! {
                done = exec::run(agent, request) => done,
                // The requester has disconnected: dropping the future kills the command.
                () = reply.closed() => return,
            };
            tell(reply, done.map_err(Failure::from));
        });
    }

    /// Removes one container from the users of these images and devices, and its copied-in volumes.
    fn release_all(&mut self, request: &pod::CreateContainerRequest) {
        // A device of a volume stays attached until the pod ends.
        for device in request.devices.iter().filter(|device| !device.of_volume) {
            self.release_device(&device.key);
        }
        for (key, _) in images_of(request) {
            self.release(key);
        }
        if let Some(agent) = self.agent.clone() {
            self.pushed.drop_copies(agent, &request.pushed);
        }
    }

    /// Removes one user of an image; when the last is gone, detaches the image from the VM.
    fn release(&mut self, key: &str) {
        let Some(placement) = self.images.release(key) else { return };
        self.attached.remove(key);
        let (agent, slot, own) = (self.agent.clone(), self.image_disk(), self.own.clone());
        tokio::spawn(async move {
            match container::detach(agent, slot, placement).await {
                Ok(()) => send(&own, News::Detached(placement)),
                Err(error) => tracing::warn!("an image stays attached: {}", Chain(&error)),
            }
        });
    }
}

/// Returns the images that a container uses, by key: its root first, then its volumes.
fn images_of(request: &pod::CreateContainerRequest) -> impl Iterator<Item = (&str, &[pod::Extent])> {
    let volumes = request.volumes.iter().map(|volume| (volume.image_key.as_str(), volume.image.as_slice()));
    std::iter::once((request.image_key.as_str(), request.image.as_slice())).chain(volumes)
}

fn extent(piece: &pod::Extent) -> Extent {
    Extent { path: piece.path.clone().into(), offset: piece.offset, length: piece.length }
}

fn mark_lost(record: &mut ContainerRecord, why: &str) {
    record.phase = ContainerPhase::Exited;
    record.exit_code = LOST;
    record.finished_at = crate::now_nanos();
    record.message = why.to_owned();
}

pub(super) fn signal_of(request: &pod::CreateContainerRequest) -> u32 {
    if request.stop_signal == 0 { SIGTERM } else { request.stop_signal }
}

fn is_name(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=128).contains(&id.len()) && id.bytes().all(plain) && !id.starts_with('.')
}
