//! Handles the actor's requests for single containers and the events that their effects report, and counts the users of images.

use super::{ContainerEntry, ContainerHandle, DeferredReplies, EffectEvent, PodActor, Reply, report, send_reply};
use crate::agent::Agent;
use crate::container::{self, ContainerExit, ImageAttachment, ImageContent, ImageUse, NodeVolumes, StartedContainer};
use crate::error::{Failure, PodError};
use crate::exec;
use crate::guest_values::Bounded;
use crate::images::{Placement, PlacementError, images_of};
use crate::log::ContainerLog;
use crate::record::{ContainerPhase, LOST, Phase, SavedContainerState};
use crate::state::{ContainerAction, ContainerEvent, ContainerState};
use crate::stops::{ContainerStop, ContainerStops};
use crate::text::printable;
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, FailureKind};
use nacelle_engine::{OpenExtent, Slot};
use nacelle_proto::{common, pod};
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The exit code of a container that could not be started.
const START_FAILED: u32 = 128;
const SIGTERM: u32 = 15;

impl PodActor {
    pub(super) fn create_container(
        &mut self,
        request: pod::CreateContainerRequest,
        reply: Reply<Bounded<common::CreateContainerResponse>>,
        replies: &mut DeferredReplies,
    ) {
        let id = request.id.clone();
        let current = self.containers.get(&id).map_or(ContainerState::Gone, |entry| entry.state);
        match (current.step(ContainerEvent::Create), self.containers.get_mut(&id)) {
            (Err(source), _) => send_reply(reply, Err(PodError::Container { id, source }.into())),
            (Ok((_, ContainerAction::Join)), Some(entry)) => entry.creating.push(reply),
            (Ok((_, ContainerAction::Nothing)), Some(entry)) => {
                let response = entry.response.clone();
                replies.add(move || send_reply(reply, Ok(response)));
            }
            (Ok((next, _)), _) => match self.begin_create(&id, next, request) {
                Ok(entry) => self.containers.entry(id).or_insert(entry).creating.push(reply),
                Err(failure) => send_reply(reply, Err(failure)),
            },
        }
    }

    fn begin_create(
        &mut self,
        id: &str,
        next: ContainerState,
        request: pod::CreateContainerRequest,
    ) -> Result<ContainerEntry, Failure> {
        let agent = self.agent()?;
        if !is_valid_id(id) {
            let rule = "1 to 128 letters, digits, '-', '_' or '.' are expected, and no '.' at the start";
            return Err(PodError::Field { field: "id", value: printable(id, 200), rule }.into());
        }
        let slot = self.image_disk();
        if slot.is_some() && request.images_by_path {
            let rule = "it must be false because the pod has an image disk";
            return Err(PodError::Field { field: "images_by_path", value: "true".to_owned(), rule }.into());
        }
        let volume_disk = self.check_devices(&request)?;
        let disks = self.take_offered_disks(&request)?;
        let returned = self.take_returned_files(&request)?;
        let devices = self.acquire_devices(volume_disk.as_ref(), &request)?;
        let images = match self.acquire_images(slot.as_ref(), &request) {
            Ok(images) => images,
            Err(failure) => {
                request.devices.iter().for_each(|device| self.cancel_device(&device.key));
                return Err(failure);
            }
        };
        let request = Arc::new(request);
        let (name, events, creation) = (id.to_owned(), self.events.clone(), Arc::clone(&request));
        let (copied_volumes, socket_volumes) = (self.copied_volumes.clone(), self.socket_volumes.clone());
        tokio::spawn(async move {
            let volumes = NodeVolumes { copied_volumes, socket_volumes };
            let created = container::create(agent, creation, images, devices, disks, volumes).await;
            report(&events, EffectEvent::Created(name, created));
        });
        Ok(ContainerEntry {
            state: next,
            request,
            log: Arc::new(ContainerLog::default()),
            response: Bounded::default(),
            creating: Vec::new(),
            waiting: Vec::new(),
            started: None,
            exit_task: None,
            returned,
            stops: ContainerStops::default(),
        })
    }

    /// Counts this container as a user of each of its images, the root's first; if one image cannot be placed, counts it for none.
    fn acquire_images(
        &mut self,
        slot: Option<&Slot>,
        request: &pod::CreateContainerRequest,
    ) -> Result<Vec<ImageUse>, Failure> {
        let mut uses: Vec<ImageUse> = Vec::new();
        for (key, extents) in images_of(request) {
            let image = ImageDisk { extents: extents.iter().map(extent).collect() };
            let acquired = self.images.acquire(key, &image).and_then(|(placement, new)| {
                let content = if new { Some(self.image_content(slot, request, key, image)) } else { None };
                match content.transpose() {
                    Ok(content) => Ok((placement, content)),
                    Err(error) => {
                        self.images.release(key);
                        self.images.free(placement);
                        Err(error)
                    }
                }
            });
            let (placement, content) = match acquired {
                Ok(acquired) => acquired,
                Err(error) => {
                    // No image was attached yet: new images are forgotten, the others lose this user.
                    for (key, _) in images_of(request).take(uses.len()) {
                        if let Some(placement) = self.images.release(key) {
                            self.image_outcomes.remove(key);
                            self.images.free(placement);
                        }
                    }
                    return Err(PodError::from(error).into());
                }
            };
            let attachment = content.map(|content| {
                let (sender, outcome) = watch::channel(None);
                self.image_outcomes.insert(key.to_owned(), outcome);
                ImageAttachment { content, key: key.to_owned(), sender }
            });
            let outcome = self.image_outcomes.get(key).cloned().ok_or(PodError::Ending)?;
            uses.push(ImageUse { placement, attachment, outcome });
        }
        Ok(uses)
    }

    /// Returns where the content of an image is read from: its files, which were offered for this container, or without an image disk
    /// their paths.
    fn image_content(
        &mut self,
        slot: Option<&Slot>,
        request: &pod::CreateContainerRequest,
        key: &str,
        image: ImageDisk,
    ) -> Result<ImageContent, PlacementError> {
        let Some(slot) = slot else { return Ok(ImageContent::Paths(image)) };
        let expected = image.extents.len();
        let files = self.take_offered_image(&request.id, key).filter(|files| files.len() == expected);
        let files = files.ok_or_else(|| PlacementError::NotOffered { key: key.to_owned(), expected })?;
        let pieces = files.into_iter().zip(image.extents).map(|(file, extent)| OpenExtent { file, extent });
        Ok(ImageContent::Files(slot.clone(), pieces.collect()))
    }

    pub(super) fn on_created(
        &mut self,
        id: &str,
        outcome: Result<Bounded<common::CreateContainerResponse>, Failure>,
        replies: &mut DeferredReplies,
    ) {
        let event = if outcome.is_ok() { ContainerEvent::Created } else { ContainerEvent::CreateFailed };
        self.apply_container_event(id, event);
        let Some(entry) = self.containers.get_mut(id) else { return };
        for reply in std::mem::take(&mut entry.creating) {
            let outcome = outcome.clone();
            replies.add(move || send_reply(reply, outcome));
        }
        if let Ok(response) = outcome {
            self.record.containers.push(container::created_record(id, &response));
            entry.response = response;
            if self.agent.is_none() {
                // The VM ended before the reply arrived.
                self.mark_all_lost("the VM has ended");
            }
        } else if let Some(entry) = self.containers.remove(id) {
            self.release_all(&entry.request);
        }
    }

    pub(super) fn start_container(&mut self, id: &str, reply: Reply<()>, replies: &mut DeferredReplies) {
        let Some(entry) = self.containers.get_mut(id).filter(|entry| entry.state != ContainerState::Creating) else {
            return send_reply(reply, Err(PodError::NoContainer { id: id.to_owned() }.into()));
        };
        match entry.state.step(ContainerEvent::Start) {
            Err(source) => send_reply(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((_, ContainerAction::Join)) => entry.waiting.push(reply),
            Ok((next, ContainerAction::Start)) => {
                let Some(agent) = self.agent.clone().filter(|_| self.record.phase == Phase::Ready) else {
                    return send_reply(reply, Err(self.unavailable()));
                };
                entry.state = next;
                entry.waiting.push(reply);
                let (id, events) = (id.to_owned(), self.events.clone());
                let (tty, log) = (entry.request.tty, Arc::clone(&entry.log));
                tokio::spawn(async move {
                    let started = container::start(&agent, &id, tty, log).await;
                    report(&events, EffectEvent::Started(id, started));
                });
            }
            Ok(_) => replies.add(move || send_reply(reply, Ok(()))),
        }
    }

    pub(super) fn on_started(
        &mut self,
        id: &str,
        outcome: Result<StartedContainer, PodError>,
        replies: &mut DeferredReplies,
    ) {
        let event = if outcome.is_ok() { ContainerEvent::Started } else { ContainerEvent::StartFailed };
        let in_time = self.apply_container_event(id, event);
        let (events, unavailable) = (self.events.clone(), self.unavailable());
        let Some(entry) = self.containers.get_mut(id) else { return };
        let now = crate::now_nanos();
        let record = self.record.containers.iter_mut().find(|container| container.id == id);
        let reply_value = match (outcome, self.agent.clone()) {
            (Ok(StartedContainer { streams, outputs, mut pumps_running }), Some(agent)) if in_time => {
                if let Some(record) = record {
                    record.phase = ContainerPhase::Running;
                    record.started_at = now;
                }
                entry.started = Some((streams, outputs));
                let (id, returned) = (id.to_owned(), std::mem::take(&mut entry.returned));
                let exit_task = tokio::spawn(async move {
                    let exit = container::wait_for_exit(&agent, &id, &mut pumps_running, returned).await;
                    report(&events, EffectEvent::Exited(id, exit));
                });
                entry.exit_task = Some(exit_task.abort_handle());
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
            let reply_value = reply_value.clone();
            replies.add(move || send_reply(reply, reply_value));
        }
    }

    pub(super) fn on_exited(&mut self, id: &str, exit: ContainerExit) {
        // While the container is being removed its state stays, and the removal may still fail: the end counts all the same.
        self.apply_container_event(id, ContainerEvent::Exited);
        let record = self.record.containers.iter_mut().find(|container| container.id == id);
        if let Some(record) = record.filter(|record| record.phase == ContainerPhase::Running) {
            let now = crate::now_nanos();
            record.phase = ContainerPhase::Exited;
            record.exit_code = exit.code;
            record.oom_killed = exit.oom_killed;
            record.message = exit.message;
            record.finished_at = *exit.finished_at.bound_time(record.started_at, now);
        }
    }

    pub(super) fn stop_container(&mut self, id: &str, grace: Duration, reply: Reply<()>) {
        let entry = self.containers.get_mut(id);
        match entry.as_ref().map_or(ContainerState::Gone, |entry| entry.state).step(ContainerEvent::Stop) {
            Err(source) => send_reply(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((_, ContainerAction::Stop)) => {
                let (Some(entry), Some(agent)) = (entry, self.agent.clone()) else { return send_reply(reply, Ok(())) };
                let (id, published) = (id.to_owned(), self.published.subscribe());
                let (signal, limit) = (stop_signal(&entry.request), self.spec.timeouts.call());
                let outcome = entry.stops.begin(ContainerStop { agent, published, id, signal, limit }, grace);
                tokio::spawn(async move { send_reply(reply, outcome.wait().await) });
            }
            Ok(_) => send_reply(reply, Ok(())),
        }
    }

    pub(super) fn remove_container(&mut self, id: &str, reply: Reply<()>) {
        let Some(entry) = self.containers.get_mut(id) else { return send_reply(reply, Ok(())) };
        match entry.state.step(ContainerEvent::Remove) {
            Err(source) => send_reply(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((next, action)) => {
                entry.state = next;
                entry.waiting.push(reply);
                if action == ContainerAction::Remove {
                    let (id, events, agent) = (id.to_owned(), self.events.clone(), self.agent.clone());
                    tokio::spawn(async move {
                        // Without a VM there is nothing left to remove.
                        let removed = match agent {
                            Some(agent) => agent.remove_container(&id).await,
                            None => Ok(()),
                        };
                        report(&events, EffectEvent::Removed(id, removed));
                    });
                }
            }
        }
    }

    pub(super) fn on_removed(&mut self, id: &str, outcome: Result<(), PodError>, replies: &mut DeferredReplies) {
        // What was lost with the VM counts as removed.
        let outcome = match outcome {
            Err(PodError::Died { .. }) => Ok(()),
            _ if self.agent.is_none() => Ok(()),
            other => other.map_err(Failure::from),
        };
        let record = self.record.containers.iter().find(|container| container.id == id);
        let runs = record.is_some_and(|record| record.phase == ContainerPhase::Running);
        let event = match (&outcome, runs) {
            (Ok(()), _) => ContainerEvent::Removed,
            (Err(_), true) => ContainerEvent::RemoveFailedRunning,
            (Err(_), false) => ContainerEvent::RemoveFailed,
        };
        self.apply_container_event(id, event);
        let Some(entry) = self.containers.get_mut(id) else { return };
        for reply in std::mem::take(&mut entry.waiting) {
            let outcome = outcome.clone();
            replies.add(move || send_reply(reply, outcome));
        }
        // A container that still runs is watched as before.
        if event != ContainerEvent::RemoveFailedRunning
            && let Some(exit_task) = entry.exit_task.take()
        {
            exit_task.abort();
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
                if let Some(record) = record.filter(|record| record.phase == ContainerPhase::Created) {
                    mark_lost(record, &failure.message);
                }
            }
        }
    }

    pub(super) fn set_log(&mut self, id: &str, file: File, reply: Reply<()>) {
        let Some(entry) = self.containers.get(id) else {
            return send_reply(reply, Err(PodError::NoContainer { id: id.to_owned() }.into()));
        };
        let log = Arc::clone(&entry.log);
        tokio::spawn(async move {
            // A write to the old file may be in progress on a slow disk.
            let set = run_blocking("set the log of a container", move || log.set(file)).await;
            send_reply(reply, set.map_err(|error| PodError::from(error).into()));
        });
    }

    /// Returns this container if it runs.
    pub(super) fn running_container(&self, id: &str) -> Result<ContainerHandle, Failure> {
        let Some(entry) = self.containers.get(id) else {
            return Err(PodError::NoContainer { id: id.to_owned() }.into());
        };
        match &entry.started {
            Some((_, outputs)) if entry.state == ContainerState::Running => Ok(ContainerHandle {
                agent: self.agent()?,
                request: Arc::clone(&entry.request),
                outputs: outputs.clone(),
            }),
            _ => Err(Failure {
                kind: FailureKind::Conflict,
                message: format!("cannot use container {id}: it is {:?}, not Running", entry.state),
            }),
        }
    }

    pub(super) fn exec_sync(
        &mut self,
        request: pod::ExecSyncRequest,
        mut reply: Reply<Bounded<pod::ExecSyncResponse>>,
    ) {
        let agent = match self.running_container(&request.id) {
            Ok(container) => container.agent,
            Err(failure) => return send_reply(reply, Err(failure)),
        };
        tokio::spawn(async move {
            let outcome = tokio::select! {
                outcome = exec::run_to_end(agent, request) => outcome,
                // The requester has disconnected: dropping the future kills the command.
                () = reply.closed() => return,
            };
            send_reply(reply, outcome.map_err(Failure::from));
        });
    }

    /// Removes one container from the users of these images and devices, and its copied-in volumes and socket volumes.
    fn release_all(&mut self, request: &pod::CreateContainerRequest) {
        // A device of a volume stays attached until the pod ends.
        for device in request.devices.iter().filter(|device| !device.is_empty_dir) {
            self.release_device(&device.key);
        }
        for (key, _) in images_of(request) {
            self.release_image(key);
        }
        if let Some(agent) = self.agent.clone() {
            self.copied_volumes.remove_copies(agent, &request.copied_in_volumes);
        }
        self.socket_volumes.detach(&request.socket_volumes);
    }

    /// Removes one user of an image; when the last is gone, detaches the image from the VM.
    fn release_image(&mut self, key: &str) {
        let Some(placement) = self.images.release(key) else { return };
        self.image_outcomes.remove(key);
        self.detach_image(self.agent.clone(), self.image_disk(), placement);
    }

    /// Unmounts the images of a restored guest whose containers are not in this pod.
    pub(super) fn detach_unused_images(&mut self, agent: &Agent) {
        let Some(checkpoint) = &self.spec.checkpoint else { return };
        for image in checkpoint.images.iter().filter(|image| !image.is_used) {
            if let Some(placement) = self.images.forget_saved(&image.key) {
                // The node has nothing at that place.
                self.detach_image(Some(agent.clone()), None, placement);
            }
        }
    }

    fn detach_image(&self, agent: Option<Agent>, slot: Option<Slot>, placement: Placement) {
        let events = self.events.clone();
        tokio::spawn(async move {
            match container::detach_image(agent, slot, placement).await {
                Ok(()) => report(&events, EffectEvent::ImageDetached(placement)),
                Err(error) => {
                    tracing::warn!("cannot detach an image from the VM; it stays attached: {}", Chain(&error))
                }
            }
        });
    }
}

fn extent(piece: &pod::Extent) -> Extent {
    Extent { path: piece.path.clone().into(), offset: piece.offset, length: piece.length }
}

fn mark_lost(record: &mut SavedContainerState, why: &str) {
    record.phase = ContainerPhase::Exited;
    record.exit_code = LOST;
    record.finished_at = crate::now_nanos();
    record.message = why.to_owned();
}

pub(super) fn stop_signal(request: &pod::CreateContainerRequest) -> u32 {
    if request.stop_signal == 0 { SIGTERM } else { request.stop_signal }
}

fn is_valid_id(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=128).contains(&id.len()) && id.bytes().all(plain) && !id.starts_with('.')
}
