//! Holds the state of the pod. One task takes requests and events one by one, applies the tables of `state`, starts the
//! effects, writes state.json, and only then publishes the new state and replies.
//!
//! The task waits for nothing but its inbox and the write of the record. Effects run in other tasks and report back as
//! `EffectEvent`s.

mod checkpoint;
mod containers;
mod devices;

use crate::agent::Agent;
use crate::boot::{self, ReadyGuest, StartedVm};
use crate::checkpoint::SavablePod;
use crate::clock::{self, ClockSteps};
use crate::container::{self, AttachOutcome, ContainerExit, StartedContainer};
use crate::copied_volumes::CopiedVolumes;
use crate::device_table::DeviceTable;
use crate::error::{Failure, PodError};
use crate::file_server_channel::FileServerChannel;
use crate::guest_values::{Bounded, describe_exit};
use crate::images::{ImageTable, Placement};
use crate::log::ContainerLog;
use crate::machine::{self, AssembledVm, IMAGE_DISK, VOLUME_DISK, VmStart};
use crate::memory::{self, MemoryLayout, MemoryResizer, RunningVm};
use crate::record::{Phase, SavedPodState};
use crate::restore::{self, RestoredVm};
use crate::returned_files::ReturnedFile;
use crate::socket_volumes::SocketVolumes;
use crate::spec::PodSpec;
use crate::state::{ContainerEvent, ContainerState, PodAction, PodEvent};
use crate::stops::{ContainerStop, ContainerStops};
use crate::teardown;
use checkpoint::RunningCheckpoint;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_base::undo::{UndoStack, UnreleasedResource};
use nacelle_engine::{Engine, Machine, MachineExit, PageTracker, Slot};
use nacelle_proto::{common, pod};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

pub use devices::{OfferKind, OfferedFiles};

/// The channel for the reply to a request.
pub type Reply<T> = oneshot::Sender<Result<T, Failure>>;

/// A request of the server.
pub enum ActorRequest {
    /// Configure the pod's network.
    Configure(pod::ConfigureRequest, Reply<Bounded<pod::ConfigureResponse>>),
    /// Create a container.
    CreateContainer(Box<pod::CreateContainerRequest>, Reply<Bounded<common::CreateContainerResponse>>),
    /// Start the container with this id.
    StartContainer(String, Reply<()>),
    /// Stop a container, with the time between stop signal and SIGKILL.
    StopContainer(String, Duration, Reply<()>),
    /// Remove a container.
    RemoveContainer(String, Reply<()>),
    /// Write a container's output to this file from now on.
    SetLog(String, File, Reply<()>),
    /// Keep open files of the node for a container that is about to be created; the reply is the number of the offer.
    KeepOffer(OfferedFiles, Reply<u64>),
    /// Withdraw the offer with this number.
    WithdrawOffer(u64),
    /// Save the pod, whose memory is not resized meanwhile.
    Checkpoint(pod::CheckpointRequest, MemoryResizer, Reply<Bounded<pod::CheckpointResponse>>),
    /// Return what the pod has at the moment, unless it cannot be saved.
    DescribeSavable(oneshot::Sender<Result<SavablePod, PodError>>),
    /// Run a command in a container.
    ExecSync(pod::ExecSyncRequest, Reply<Bounded<pod::ExecSyncResponse>>),
    /// Return a running container.
    GetContainer(String, Reply<ContainerHandle>),
    /// Return the agent.
    GetAgent(Reply<Agent>),
    /// Return the VM and its agent.
    GetVm(Reply<RunningVm>),
    /// Stop the pod, with the grace period of its containers. SIGTERM sends it without a reply channel.
    StopPod(Duration, Option<Reply<()>>),
}

/// A running container, for streams, execs and attaches.
pub struct ContainerHandle {
    /// The agent of its guest.
    pub agent: Agent,
    /// The request that created the container.
    pub request: Arc<pod::CreateContainerRequest>,
    /// The outputs that clients can attach to.
    pub outputs: container::Outputs,
}

/// An event that an effect reports.
enum EffectEvent {
    Assembled(Result<AssembledVm, PodError>),
    HandshakeEnded(Result<ReadyGuest, PodError>),
    VmExited(MachineExit),
    Created(String, Result<Bounded<common::CreateContainerResponse>, Failure>),
    Started(String, Result<StartedContainer, PodError>),
    Exited(String, ContainerExit),
    Removed(String, Result<(), PodError>),
    ImageDetached(Placement),
    DeviceDetached(u32),
    CheckpointEnded,
    CleanedUp(Vec<UnreleasedResource>),
}

/// A message to the actor.
pub enum ActorMessage {
    /// A request from outside.
    Request(ActorRequest),
    /// An event from one of the actor's own effects.
    #[expect(private_interfaces, reason = "only this module creates and reads these events")]
    Event(EffectEvent),
}

struct ContainerEntry {
    state: ContainerState,
    request: Arc<pod::CreateContainerRequest>,
    log: Arc<ContainerLog>,
    response: Bounded<common::CreateContainerResponse>,
    creating: Vec<Reply<Bounded<common::CreateContainerResponse>>>,
    /// Requests that wait for the start or the removal in progress.
    waiting: Vec<Reply<()>>,
    started: Option<(container::OutputStreams, container::Outputs)>,
    exit_task: Option<AbortHandle>,
    /// The files of the node that its end is written to.
    returned: Vec<ReturnedFile>,
    stops: ContainerStops,
}

/// The progress of the VM from its assembly to its end.
enum VmStage {
    Assembling,
    Running { machine: Arc<dyn Machine>, memory: MemoryLayout, undo: UndoStack },
    Gone,
}

/// The actor that owns the pod's state.
pub struct PodActor {
    spec: Arc<PodSpec>,
    dir: PathBuf,
    record: SavedPodState,
    published: watch::Sender<SavedPodState>,
    inbox: mpsc::UnboundedReceiver<ActorMessage>,
    events: mpsc::UnboundedSender<ActorMessage>,
    vm: VmStage,
    agent: Option<Agent>,
    configured: Bounded<pod::ConfigureResponse>,
    network: watch::Sender<Option<Arc<pod::ConfigureRequest>>>,
    configure_replies: Vec<Reply<Bounded<pod::ConfigureResponse>>>,
    stop_replies: Vec<Reply<()>>,
    stop_requested: bool,
    boot: Option<AbortHandle>,
    /// Why the VM failed to boot or ended by itself. Every later request receives it, so that none depends on its time.
    end: Option<Failure>,
    containers: BTreeMap<String, ContainerEntry>,
    images: ImageTable,
    image_outcomes: BTreeMap<String, AttachOutcome>,
    devices: DeviceTable,
    attached_devices: BTreeMap<String, devices::AttachedDevice>,
    offers: BTreeMap<u64, OfferedFiles>,
    last_offer: u64,
    copied_volumes: CopiedVolumes,
    socket_volumes: SocketVolumes,
    clock_steps: Option<ClockSteps>,
    /// `None`: the VM cannot be saved while it runs.
    tracker: Option<Arc<PageTracker>>,
    checkpoint: Option<RunningCheckpoint>,
}

/// The handles by which others reach the actor.
pub struct ActorHandles {
    /// The actor's inbox.
    pub inbox: mpsc::UnboundedSender<ActorMessage>,
    /// The published state of the pod.
    pub published: watch::Receiver<SavedPodState>,
}

impl PodActor {
    /// Creates an actor that does not run yet, and its handles.
    pub fn new(spec: Arc<PodSpec>, dir: &Path) -> (PodActor, ActorHandles) {
        let record = SavedPodState::new(spec.id.clone());
        let (published, published_receiver) = watch::channel(record.clone());
        let (events, inbox) = mpsc::unbounded_channel();
        let handles = ActorHandles { inbox: events.clone(), published: published_receiver };
        let images = spec.checkpoint.iter().flat_map(|checkpoint| &checkpoint.images);
        let images = ImageTable::with_saved(images.map(|image| (image.key.as_str(), Placement::from(image))));
        let actor = PodActor {
            spec,
            dir: dir.to_owned(),
            record,
            published,
            inbox,
            events,
            vm: VmStage::Assembling,
            agent: None,
            configured: Bounded::default(),
            network: watch::channel(None).0,
            configure_replies: Vec::new(),
            stop_replies: Vec::new(),
            stop_requested: false,
            boot: None,
            end: None,
            containers: BTreeMap::new(),
            images,
            image_outcomes: BTreeMap::new(),
            devices: DeviceTable::default(),
            attached_devices: BTreeMap::new(),
            offers: BTreeMap::new(),
            last_offer: 0,
            copied_volumes: CopiedVolumes::default(),
            socket_volumes: SocketVolumes::default(),
            clock_steps: None,
            tracker: None,
            checkpoint: None,
        };
        (actor, handles)
    }

    /// Boots the VM and serves until the pod has been stopped.
    pub async fn run(mut self, engine: Arc<dyn Engine>, mut prepared: machine::PreparedVm) {
        self.write().await;
        self.clock_steps = prepared.clock_steps.take();
        self.tracker = prepared.tracker.take().map(Arc::new);
        let channel = prepared.copied_volumes.take();
        let channel = channel.map(|stream| FileServerChannel::new(stream, self.spec.timeouts.call())).transpose();
        let channel = channel.unwrap_or_else(|error| {
            tracing::error!("cannot copy volumes into the guest of this pod: {}", Chain(&error));
            None
        });
        self.socket_volumes = SocketVolumes::new(channel.clone().filter(|_| self.spec.has_sockets));
        self.copied_volumes = CopiedVolumes::new(channel);
        let (spec, dir, events) = (Arc::clone(&self.spec), self.dir.clone(), self.events.clone());
        tokio::spawn(async move {
            let assembled = machine::assemble(&spec, &dir, engine, prepared).await;
            report(&events, EffectEvent::Assembled(assembled));
        });
        while let Some(message) = self.inbox.recv().await {
            let before = self.record.clone();
            let mut replies = DeferredReplies::default();
            match message {
                ActorMessage::Request(request) => self.handle_request(request, &mut replies),
                ActorMessage::Event(event) => self.handle_event(event, &mut replies),
            }
            if self.record != before {
                self.write().await;
                self.published.send_replace(self.record.clone());
            }
            replies.send_all();
            if self.record.phase == Phase::Stopped && self.stop_requested {
                self.stop_replies.drain(..).for_each(|reply| send_reply(reply, Ok(())));
                return;
            }
        }
    }

    /// Writes state.json. A failure, such as a full disk, does not stop the pod; the next change tries again.
    async fn write(&self) {
        let (record, dir) = (self.record.clone(), self.dir.clone());
        match run_blocking("write the pod's record", move || record.write(&dir)).await {
            Ok(Err(error)) => tracing::error!("{}", Chain(&error)),
            Err(error) => tracing::error!("{}", Chain(&error)),
            Ok(Ok(())) => {}
        }
    }

    fn handle_request(&mut self, request: ActorRequest, replies: &mut DeferredReplies) {
        match request {
            ActorRequest::Configure(request, reply) => self.configure(request, reply),
            ActorRequest::CreateContainer(request, reply) => self.create_container(*request, reply, replies),
            ActorRequest::StartContainer(id, reply) => self.start_container(&id, reply, replies),
            ActorRequest::StopContainer(id, grace, reply) => self.stop_container(&id, grace, reply),
            ActorRequest::RemoveContainer(id, reply) => self.remove_container(&id, reply),
            ActorRequest::SetLog(id, file, reply) => self.set_log(&id, file, reply),
            ActorRequest::KeepOffer(offer, reply) => self.keep_offer(offer, reply),
            ActorRequest::WithdrawOffer(number) => {
                self.offers.remove(&number);
                self.stop_checkpoint_of(number);
            }
            ActorRequest::Checkpoint(request, memory, reply) => self.checkpoint(&request, memory, reply),
            // The checkpoint may have ended meanwhile.
            ActorRequest::DescribeSavable(reply) => drop(reply.send(self.describe_savable())),
            ActorRequest::ExecSync(request, reply) => self.exec_sync(request, reply),
            ActorRequest::GetContainer(id, reply) => send_reply(reply, self.running_container(&id)),
            ActorRequest::GetVm(reply) => {
                let vm = match &self.vm {
                    VmStage::Running { machine, memory, .. } => Ok((Arc::clone(machine), *memory)),
                    VmStage::Assembling | VmStage::Gone => Err(self.unavailable()),
                };
                let vm =
                    self.agent().and_then(|agent| vm.map(|(machine, memory)| RunningVm { agent, machine, memory }));
                send_reply(reply, vm);
            }
            ActorRequest::GetAgent(reply) => send_reply(reply, self.agent()),
            ActorRequest::StopPod(grace, reply) => {
                self.stop_replies.extend(reply);
                self.stop_requested = true;
                self.apply_pod_event(PodEvent::Stop, grace);
            }
        }
    }

    fn handle_event(&mut self, event: EffectEvent, replies: &mut DeferredReplies) {
        match event {
            EffectEvent::Assembled(Ok(vm)) => self.on_assembled(vm),
            EffectEvent::Assembled(Err(error)) => {
                self.vm = VmStage::Gone;
                match self.record.phase {
                    // The pod was stopped while the VM was being assembled; the cleanup has waited for this event.
                    Phase::Stopping => self.clean_up(),
                    _ => self.on_boot_failed(error),
                }
            }
            EffectEvent::HandshakeEnded(Ok(guest)) => self.on_guest_ready(guest, replies),
            EffectEvent::HandshakeEnded(Err(error)) => self.on_boot_failed(error),
            EffectEvent::VmExited(exit) => self.on_vm_exited(&exit),
            EffectEvent::Created(id, outcome) => self.on_created(&id, outcome, replies),
            EffectEvent::Started(id, outcome) => self.on_started(&id, outcome, replies),
            EffectEvent::Exited(id, exit) => self.on_exited(&id, exit),
            EffectEvent::Removed(id, outcome) => self.on_removed(&id, outcome, replies),
            EffectEvent::ImageDetached(placement) => self.images.free(placement),
            EffectEvent::DeviceDetached(number) => self.devices.free(number),
            EffectEvent::CheckpointEnded => self.checkpoint = None,
            EffectEvent::CleanedUp(failures) => {
                for UnreleasedResource { what, reason: why } in failures {
                    tracing::error!(resource = what, why, "cleanup of the pod is incomplete");
                }
                self.mark_all_lost("the pod was stopped");
                self.apply_pod_event(PodEvent::CleanedUp, Duration::ZERO);
            }
        }
    }

    // The handlers for events of the pod itself.

    fn apply_pod_event(&mut self, event: PodEvent, grace: Duration) {
        match self.record.phase.step(event) {
            Ok((next, action)) => {
                self.record.phase = next;
                match action {
                    PodAction::Nothing => {}
                    PodAction::ShutDown => self.shut_down(grace),
                    PodAction::CleanUp => self.clean_up(),
                }
            }
            // The table accepts all requests of clients. A refused event is a BUG without consequences.
            Err(invalid) => tracing::error!("BUG: {}", Chain(&invalid)),
        }
        if matches!(self.record.phase, Phase::Stopping | Phase::Stopped) {
            let failure = self.unavailable();
            self.configure_replies.drain(..).for_each(|reply| send_reply(reply, Err(failure.clone())));
        }
    }

    fn on_assembled(&mut self, vm: AssembledVm) {
        let AssembledVm { machine, mut exit, start, undo, memory, timeline } = vm;
        let (events, exit_watch) = (self.events.clone(), exit.clone());
        tokio::spawn(async move {
            if let Ok(exit) = exit.wait_for(Option::is_some).await
                && let Some(exit) = exit.clone()
            {
                report(&events, EffectEvent::VmExited(exit));
            }
        });
        let vm = Arc::clone(&machine);
        self.vm = VmStage::Running { machine, memory, undo };
        if self.record.phase != Phase::Booting {
            // The pod was stopped while the engine was starting the VM.
            self.clean_up();
            return;
        }
        let (spec, network, events) = (Arc::clone(&self.spec), self.network.subscribe(), self.events.clone());
        let handshake = tokio::spawn(async move {
            let link = vm.link();
            let outcome = match start {
                VmStart::Handshake { incoming, from_template } => {
                    let started = StartedVm { incoming, link, exit_watch, memory, from_template };
                    let outcome = boot::configure_guest(&spec, started, network, &timeline).await;
                    if outcome.is_ok() && vm.as_memory_hotplug().is_some() {
                        memory::release_reserve(vm, memory).await;
                    }
                    outcome
                }
                // The reserve of a restored VM may be in use.
                VmStart::Checkpoint(base) => {
                    restore::adopt_guest(&spec, &base, RestoredVm { link, exit_watch }, network, &timeline).await
                }
            };
            report(&events, EffectEvent::HandshakeEnded(outcome));
        });
        self.boot = Some(handshake.abort_handle());
    }

    fn on_guest_ready(&mut self, guest: ReadyGuest, replies: &mut DeferredReplies) {
        if self.record.phase == Phase::Booting {
            self.record.kernel_release.clone_from(&guest.response.kernel_release);
            if self.spec.engine.has_disks() {
                // Ends with the VM.
                tokio::spawn(clock::follow(guest.agent.clone(), self.clock_steps.take()));
            }
            if let VmStage::Running { machine, .. } = &self.vm
                && self.spec.has_sockets
            {
                self.socket_volumes.serve(&*machine.link());
            }
            self.detach_unused_images(&guest.agent);
            self.agent = Some(guest.agent);
            self.configured = guest.response;
            for reply in self.configure_replies.drain(..) {
                let response = self.configured.clone();
                replies.add(move || send_reply(reply, Ok(response)));
            }
        }
        self.apply_pod_event(PodEvent::Booted, Duration::ZERO);
    }

    fn on_boot_failed(&mut self, error: PodError) {
        let failure = Failure::from(error);
        if self.record.phase == Phase::Booting {
            tracing::error!("cannot boot the pod: {}", failure.message);
            self.record.failure.clone_from(&failure.message);
            self.end.get_or_insert_with(|| failure.clone());
        }
        self.configure_replies.drain(..).for_each(|reply| send_reply(reply, Err(failure.clone())));
        self.apply_pod_event(PodEvent::BootFailed, Duration::ZERO);
    }

    fn on_vm_exited(&mut self, exit: &MachineExit) {
        self.stop_checkpoint();
        let why = describe_exit(exit);
        if matches!(self.record.phase, Phase::Booting | Phase::Ready) {
            tracing::error!("the VM has ended: {why}");
            self.record.failure.clone_from(&why);
            let failure = Failure::from(PodError::Died { why: why.clone() });
            self.end.get_or_insert_with(|| failure.clone());
            self.configure_replies.drain(..).for_each(|reply| send_reply(reply, Err(failure.clone())));
        }
        self.mark_all_lost(&why);
        self.apply_pod_event(PodEvent::VmExited, Duration::ZERO);
    }

    /// Marks every container as exited, because the VM is gone or about to be.
    fn mark_all_lost(&mut self, why: &str) {
        self.agent = None;
        self.record.mark_containers_lost(why, crate::now_nanos());
        for (id, entry) in &mut self.containers {
            if let Ok((next, _)) = entry.state.step(ContainerEvent::Lost) {
                entry.state = next;
            }
            if let Some(exit_task) = entry.exit_task.take() {
                exit_task.abort();
                tracing::debug!(container = id, "the container has ended with the VM");
            }
        }
    }

    fn shut_down(&mut self, grace: Duration) {
        self.stop_checkpoint();
        let (Some(agent), VmStage::Running { machine, .. }) = (self.agent.clone(), &self.vm) else {
            self.clean_up();
            return;
        };
        let timeouts = self.spec.timeouts.clone();
        let running = self
            .containers
            .iter_mut()
            .filter(|(_, entry)| matches!(entry.state, ContainerState::Starting | ContainerState::Running));
        let begin_stop = |(id, entry): (&String, &mut ContainerEntry)| {
            let stop = ContainerStop {
                agent: agent.clone(),
                published: self.published.subscribe(),
                id: id.clone(),
                signal: containers::stop_signal(&entry.request),
                limit: timeouts.shutdown(),
            };
            (id.clone(), entry.stops.begin(stop, grace))
        };
        let stops = running.map(begin_stop).collect();
        let (machine, events) = (Arc::clone(machine), self.events.clone());
        let undo = self.take_undo();
        tokio::spawn(async move {
            teardown::await_container_stops(stops).await;
            let failures = teardown::stop_vm(machine, Some(agent), undo, &timeouts).await;
            report(&events, EffectEvent::CleanedUp(failures));
        });
    }

    /// Kills the VM at once and releases everything; a VM that is being assembled is killed when that has completed.
    fn clean_up(&mut self) {
        self.stop_checkpoint();
        if let Some(boot) = self.boot.take() {
            boot.abort();
        }
        let (timeouts, events) = (self.spec.timeouts.clone(), self.events.clone());
        match std::mem::replace(&mut self.vm, VmStage::Gone) {
            VmStage::Assembling => self.vm = VmStage::Assembling,
            VmStage::Gone => report(&events, EffectEvent::CleanedUp(Vec::new())),
            VmStage::Running { machine, undo, .. } => {
                tokio::spawn(async move {
                    report(&events, EffectEvent::CleanedUp(teardown::stop_vm(machine, None, undo, &timeouts).await));
                });
            }
        }
    }

    /// Takes the undo stack for the teardown. The VM stays reachable until it is gone.
    fn take_undo(&mut self) -> UndoStack {
        match &mut self.vm {
            VmStage::Running { undo, .. } => std::mem::take(undo),
            VmStage::Assembling | VmStage::Gone => UndoStack::new(),
        }
    }

    fn configure(&mut self, request: pod::ConfigureRequest, reply: Reply<Bounded<pod::ConfigureResponse>>) {
        if let Err(error) = boot::check_network(&self.spec, &request) {
            return send_reply(reply, Err(error.into()));
        }
        let known = self.network.borrow().clone();
        match (self.record.phase, known) {
            (Phase::Stopping | Phase::Stopped, _) => send_reply(reply, Err(self.unavailable())),
            (_, Some(known)) if *known != request => send_reply(reply, Err(PodError::OtherNetwork.into())),
            (Phase::Ready, _) => send_reply(reply, Ok(self.configured.clone())),
            (Phase::Booting, known) => {
                if known.is_none() {
                    self.network.send_replace(Some(Arc::new(request)));
                }
                self.configure_replies.push(reply);
            }
        }
    }

    /// Returns the error for requests that the guest cannot serve now: the cause of the VM's end if it ended by itself.
    fn unavailable(&self) -> Failure {
        if let Some(end) = &self.end {
            return end.clone();
        }
        let failure = match self.record.failure.as_str() {
            "" => String::new(),
            why => format!(": {why}"),
        };
        PodError::Phase { phase: self.record.phase, failure }.into()
    }

    fn agent(&self) -> Result<Agent, Failure> {
        let agent = self.agent.clone().filter(|_| self.record.phase == Phase::Ready);
        agent.ok_or_else(|| self.unavailable())
    }

    fn image_disk(&self) -> Option<Slot> {
        match &self.vm {
            VmStage::Running { machine, .. } => machine::disk(machine, IMAGE_DISK),
            VmStage::Assembling | VmStage::Gone => None,
        }
    }

    fn volume_disk(&self) -> Option<Slot> {
        match &self.vm {
            VmStage::Running { machine, .. } => machine::disk(machine, VOLUME_DISK),
            VmStage::Assembling | VmStage::Gone => None,
        }
    }

    /// Applies an event to a container's state; returns false if the event comes too late to matter.
    fn apply_container_event(&mut self, id: &str, event: ContainerEvent) -> bool {
        let Some(entry) = self.containers.get_mut(id) else { return false };
        match entry.state.step(event) {
            Ok((next, _)) => {
                let changed = next != entry.state;
                entry.state = next;
                changed
            }
            Err(invalid) => {
                tracing::error!(container = id, "{}", Chain(&invalid));
                false
            }
        }
    }
}

/// Replies that must not be sent before the record is written.
#[derive(Default)]
struct DeferredReplies(Vec<Box<dyn FnOnce() + Send>>);

impl DeferredReplies {
    fn add(&mut self, reply: impl FnOnce() + Send + 'static) {
        self.0.push(Box::new(reply));
    }

    fn send_all(self) {
        self.0.into_iter().for_each(|reply| reply());
    }
}

/// Sends a reply; ignores that the requester may have disconnected.
fn send_reply<T>(reply: Reply<T>, outcome: Result<T, Failure>) {
    let _ = reply.send(outcome);
}

/// Sends an event to the actor, which may have ended.
fn report(events: &mpsc::UnboundedSender<ActorMessage>, event: EffectEvent) {
    let _ = events.send(ActorMessage::Event(event));
}
