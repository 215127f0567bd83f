//! Holds the state of the pod. One task takes requests and events one by one, applies the tables of `state`, starts the
//! effects, writes state.json, and only then publishes the new state and replies.
//!
//! The task waits for nothing but its inbox and the write of the record. Effects run in other tasks and report back as `News`.

mod containers;
mod devices;

use crate::agent::Agent;
use crate::boot::{self, Ready};
use crate::container::{self, Attached, Ended, Started};
use crate::devices::Devices;
use crate::error::{Failure, PodError};
use crate::guest_values::{Bounded, describe_exit};
use crate::images::{Images, Placement};
use crate::log::LogPath;
use crate::machine::{self, Assembled, IMAGE_DISK, VOLUME_DISK};
use crate::memory;
use crate::pushed::Pushed;
use crate::record::{Phase, PodRecord};
use crate::spec::PodSpec;
use crate::state::{ContainerEvent, ContainerState, PodAction, PodEvent};
use crate::stops::{Stop, Stops};
use crate::teardown;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_base::undo::{Left, UndoStack};
use nacelle_engine::{Engine, Machine, MachineExit, Slot};
use nacelle_proto::{common, pod};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

pub use devices::Offer;

/// The channel for the reply to a request.
pub type Reply<T> = oneshot::Sender<Result<T, Failure>>;

/// A request of the server.
pub enum Ask {
    /// Configure the pod's network.
    Configure(pod::ConfigureRequest, Reply<Bounded<pod::ConfigureResponse>>),
    /// Create a container.
    Create(pod::CreateContainerRequest, Reply<Bounded<common::CreateContainerResponse>>),
    /// Start the container with this id.
    Start(String, Reply<()>),
    /// Stop a container, with the time between stop signal and SIGKILL.
    Stop(String, Duration, Reply<()>),
    /// Remove a container.
    Remove(String, Reply<()>),
    /// Reopen a container's log after its rotation.
    ReopenLog(String, Reply<()>),
    /// Take a device of the node for a container that is about to be created; the reply is the number of the offer.
    Offer(Offer, Reply<u64>),
    /// Withdraw the offer with this number.
    Withdraw(u64),
    /// Run a command in a container.
    Exec(pod::ExecSyncRequest, Reply<Bounded<pod::ExecSyncResponse>>),
    /// Return a running container.
    Running(String, Reply<Live>),
    /// Return the agent.
    Agent(Reply<Agent>),
    /// Return the VM and its agent.
    Machine(Reply<Able>),
    /// Stop the pod, with the grace period of its containers. SIGTERM sends it without a reply channel.
    StopPod(Duration, Option<Reply<()>>),
}

/// A running container, for streams, execs and attaches.
pub struct Live {
    /// The agent of its guest.
    pub agent: Agent,
    /// The request that created the container.
    pub request: Arc<pod::CreateContainerRequest>,
    /// The outputs that clients can attach to.
    pub outputs: container::Outputs,
}

/// A running VM. Callers must not keep it beyond their request.
pub struct Able {
    /// The agent in the guest.
    pub agent: Agent,
    /// The VM.
    pub machine: Arc<dyn Machine>,
}

/// An event that an effect reports.
enum News {
    Assembled(Result<Assembled, PodError>),
    Greeted(Result<Ready, PodError>),
    VmExited(MachineExit),
    Created(String, Result<Bounded<common::CreateContainerResponse>, Failure>),
    Started(String, Result<Started, PodError>),
    Exited(String, Ended),
    Removed(String, Result<(), PodError>),
    Detached(Placement),
    DeviceDetached(u32),
    CleanedUp(Vec<Left>),
}

/// A message to the actor.
pub enum Message {
    /// A request from outside.
    Ask(Ask),
    /// An event from one of the actor's own effects.
    #[expect(private_interfaces, reason = "only this module makes and reads news")]
    News(News),
}

struct Entry {
    state: ContainerState,
    request: Arc<pod::CreateContainerRequest>,
    log: Option<LogPath>,
    response: Bounded<common::CreateContainerResponse>,
    creating: Vec<Reply<Bounded<common::CreateContainerResponse>>>,
    /// Requests that wait for the start or the removal in progress.
    waiting: Vec<Reply<()>>,
    started: Option<(container::Streams, Arc<crate::log::LogFile>, container::Outputs)>,
    life: Option<AbortHandle>,
    stops: Stops,
}

/// The VM, as far as it has been assembled.
enum Body {
    Assembling,
    Running { machine: Arc<dyn Machine>, undo: UndoStack },
    None,
}

/// The actor that owns the pod's state.
pub struct Actor {
    spec: Arc<PodSpec>,
    dir: PathBuf,
    record: PodRecord,
    published: watch::Sender<PodRecord>,
    inbox: mpsc::UnboundedReceiver<Message>,
    own: mpsc::UnboundedSender<Message>,
    body: Body,
    agent: Option<Agent>,
    ready: Bounded<pod::ConfigureResponse>,
    network: watch::Sender<Option<Arc<pod::ConfigureRequest>>>,
    configuring: Vec<Reply<Bounded<pod::ConfigureResponse>>>,
    stopping: Vec<Reply<()>>,
    stop_wanted: bool,
    boot: Option<AbortHandle>,
    containers: BTreeMap<String, Entry>,
    images: Images,
    attached: BTreeMap<String, Attached>,
    devices: Devices,
    held: BTreeMap<String, devices::Held>,
    offers: BTreeMap<u64, Offer>,
    offered: u64,
    pushed: Pushed,
}

/// The handles by which others reach the actor.
pub struct Handles {
    /// The actor's inbox.
    pub inbox: mpsc::UnboundedSender<Message>,
    /// The published state of the pod.
    pub published: watch::Receiver<PodRecord>,
}

impl Actor {
    /// Creates an actor that does not run yet, and its handles.
    pub fn new(spec: Arc<PodSpec>, dir: &Path) -> (Actor, Handles) {
        let record = PodRecord::new(spec.id.clone());
        let (published, seen) = watch::channel(record.clone());
        let (own, inbox) = mpsc::unbounded_channel();
        let handles = Handles { inbox: own.clone(), published: seen };
        let actor = Actor {
            spec,
            dir: dir.to_owned(),
            record,
            published,
            inbox,
            own,
            body: Body::Assembling,
            agent: None,
            ready: Bounded::default(),
            network: watch::channel(None).0,
            configuring: Vec::new(),
            stopping: Vec::new(),
            stop_wanted: false,
            boot: None,
            containers: BTreeMap::new(),
            images: Images::default(),
            attached: BTreeMap::new(),
            devices: Devices::default(),
            held: BTreeMap::new(),
            offers: BTreeMap::new(),
            offered: 0,
            pushed: Pushed::default(),
        };
        (actor, handles)
    }

    /// Boots the VM and serves until the pod has been stopped.
    pub async fn run(mut self, engine: Arc<dyn Engine>, mut prepared: machine::Prepared) {
        self.write().await;
        self.pushed = Pushed::new(prepared.pushed.take(), self.spec.timeouts.call());
        let (spec, dir, own) = (Arc::clone(&self.spec), self.dir.clone(), self.own.clone());
        tokio::spawn(async move {
            let assembled = machine::assemble(&spec, &dir, engine, prepared).await;
            send(&own, News::Assembled(assembled));
        });
        while let Some(message) = self.inbox.recv().await {
            let before = self.record.clone();
            let mut answers = Answers::default();
            match message {
                Message::Ask(ask) => self.asked(ask, &mut answers),
                Message::News(news) => self.heard(news, &mut answers),
            }
            if self.record != before {
                self.write().await;
                self.published.send_replace(self.record.clone());
            }
            answers.give();
            if self.record.phase == Phase::Stopped && self.stop_wanted {
                self.stopping.drain(..).for_each(|reply| tell(reply, Ok(())));
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

    fn asked(&mut self, ask: Ask, answers: &mut Answers) {
        match ask {
            Ask::Configure(request, reply) => self.configure(request, reply),
            Ask::Create(request, reply) => self.create(request, reply, answers),
            Ask::Start(id, reply) => self.start(&id, reply, answers),
            Ask::Stop(id, grace, reply) => self.stop(&id, grace, reply),
            Ask::Remove(id, reply) => self.remove(&id, reply),
            Ask::ReopenLog(id, reply) => self.reopen_log(&id, reply),
            Ask::Offer(offer, reply) => self.offer(offer, reply),
            Ask::Withdraw(number) => drop(self.offers.remove(&number)),
            Ask::Exec(request, reply) => self.exec(request, reply),
            Ask::Running(id, reply) => tell(reply, self.running(&id)),
            Ask::Machine(reply) => {
                let machine = match &self.body {
                    Body::Running { machine, .. } => Ok(Arc::clone(machine)),
                    Body::Assembling | Body::None => Err(self.unavailable()),
                };
                tell(reply, self.agent().and_then(|agent| Ok(Able { agent, machine: machine? })));
            }
            Ask::Agent(reply) => tell(reply, self.agent()),
            Ask::StopPod(grace, reply) => {
                self.stopping.extend(reply);
                self.stop_wanted = true;
                self.pod(PodEvent::Stop, grace);
            }
        }
    }

    fn heard(&mut self, news: News, answers: &mut Answers) {
        match news {
            News::Assembled(Ok(assembled)) => self.assembled(assembled),
            News::Assembled(Err(error)) => {
                self.body = Body::None;
                match self.record.phase {
                    // The pod was stopped while the VM was being assembled; the cleanup has waited for this event.
                    Phase::Stopping => self.clean_up(),
                    _ => self.boot_failed(error),
                }
            }
            News::Greeted(Ok(ready)) => self.greeted(ready, answers),
            News::Greeted(Err(error)) => self.boot_failed(error),
            News::VmExited(exit) => self.vm_exited(&exit),
            News::Created(id, outcome) => self.created(&id, outcome, answers),
            News::Started(id, outcome) => self.started(&id, outcome, answers),
            News::Exited(id, end) => self.exited(&id, end),
            News::Removed(id, outcome) => self.removed(&id, outcome, answers),
            News::Detached(placement) => self.images.free(placement),
            News::DeviceDetached(number) => self.devices.free(number),
            News::CleanedUp(left) => {
                for Left { what, why } in left {
                    tracing::error!(what, why, "could not be given back");
                }
                self.lose("the pod was stopped");
                self.pod(PodEvent::CleanedUp, Duration::ZERO);
            }
        }
    }

    // The handlers for events of the pod itself.

    fn pod(&mut self, event: PodEvent, grace: Duration) {
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
            Err(refused) => tracing::error!("BUG: {}", Chain(&refused)),
        }
        if matches!(self.record.phase, Phase::Stopping | Phase::Stopped) {
            let failure = self.unavailable();
            self.configuring.drain(..).for_each(|reply| tell(reply, Err(failure.clone())));
        }
    }

    fn assembled(&mut self, assembled: Assembled) {
        let Assembled { machine, mut gone, incoming, undo, timeline } = assembled;
        let (own, end) = (self.own.clone(), gone.clone());
        tokio::spawn(async move {
            if let Ok(exit) = gone.wait_for(Option::is_some).await
                && let Some(exit) = exit.clone()
            {
                send(&own, News::VmExited(exit));
            }
        });
        let link = machine.link();
        let made = Arc::clone(&machine);
        self.body = Body::Running { machine, undo };
        if self.record.phase != Phase::Booting {
            // The pod was stopped while the engine was starting the VM.
            self.clean_up();
            return;
        }
        let (spec, network, own) = (Arc::clone(&self.spec), self.network.subscribe(), self.own.clone());
        let greeting = tokio::spawn(async move {
            let greeted = boot::greet(&spec, incoming, link, end, network, &timeline).await;
            if greeted.is_ok() && made.as_reserve().is_some() {
                memory::clear(made).await;
            }
            send(&own, News::Greeted(greeted));
        });
        self.boot = Some(greeting.abort_handle());
    }

    fn greeted(&mut self, ready: Ready, answers: &mut Answers) {
        if self.record.phase == Phase::Booting {
            self.record.kernel_release.clone_from(&ready.answer.kernel_release);
            self.agent = Some(ready.agent);
            self.ready = ready.answer;
            for reply in self.configuring.drain(..) {
                let answer = self.ready.clone();
                answers.later(move || tell(reply, Ok(answer)));
            }
        }
        self.pod(PodEvent::Booted, Duration::ZERO);
    }

    fn boot_failed(&mut self, error: PodError) {
        let failure = Failure::from(error);
        if self.record.phase == Phase::Booting {
            tracing::error!("the pod does not come up: {}", failure.message);
            self.record.failure.clone_from(&failure.message);
        }
        self.configuring.drain(..).for_each(|reply| tell(reply, Err(failure.clone())));
        self.pod(PodEvent::BootFailed, Duration::ZERO);
    }

    fn vm_exited(&mut self, exit: &MachineExit) {
        let why = describe_exit(exit);
        if matches!(self.record.phase, Phase::Booting | Phase::Ready) {
            tracing::error!("the machine is gone: {why}");
            self.record.failure.clone_from(&why);
            let failure = Failure::from(PodError::Died { why: why.clone() });
            self.configuring.drain(..).for_each(|reply| tell(reply, Err(failure.clone())));
        }
        self.lose(&why);
        self.pod(PodEvent::VmExited, Duration::ZERO);
    }

    /// Marks every container as exited, because the VM is gone or about to be.
    fn lose(&mut self, why: &str) {
        self.agent = None;
        self.record.lose_containers(why, crate::now_nanos());
        for (id, entry) in &mut self.containers {
            if let Ok((next, _)) = entry.state.step(ContainerEvent::Lost) {
                entry.state = next;
            }
            if let Some(life) = entry.life.take() {
                life.abort();
                tracing::debug!(container = id, "lost");
            }
        }
    }

    fn shut_down(&mut self, grace: Duration) {
        let (Some(agent), Body::Running { machine, .. }) = (self.agent.clone(), &self.body) else {
            self.clean_up();
            return;
        };
        let timeouts = self.spec.timeouts.clone();
        let running = self
            .containers
            .iter_mut()
            .filter(|(_, entry)| matches!(entry.state, ContainerState::Starting | ContainerState::Running));
        let stop = |(id, entry): (&String, &mut Entry)| {
            let stop = Stop {
                agent: agent.clone(),
                published: self.published.subscribe(),
                id: id.clone(),
                signal: containers::signal_of(&entry.request),
                limit: timeouts.shutdown(),
            };
            (id.clone(), entry.stops.begin(stop, grace))
        };
        let stops = running.map(stop).collect();
        let (machine, own) = (Arc::clone(machine), self.own.clone());
        let undo = self.take_undo();
        tokio::spawn(async move {
            teardown::containers(stops).await;
            let left = teardown::machine(machine, Some(agent), undo, &timeouts).await;
            send(&own, News::CleanedUp(left));
        });
    }

    /// Kills the VM at once and releases everything; while the VM is being assembled, that happens when it is done.
    fn clean_up(&mut self) {
        if let Some(boot) = self.boot.take() {
            boot.abort();
        }
        let (timeouts, own) = (self.spec.timeouts.clone(), self.own.clone());
        match std::mem::replace(&mut self.body, Body::None) {
            Body::Assembling => self.body = Body::Assembling,
            Body::None => send(&own, News::CleanedUp(Vec::new())),
            Body::Running { machine, undo } => {
                tokio::spawn(async move {
                    send(&own, News::CleanedUp(teardown::machine(machine, None, undo, &timeouts).await));
                });
            }
        }
    }

    /// Takes the undo stack for the teardown. The VM stays reachable until it is gone.
    fn take_undo(&mut self) -> UndoStack {
        match &mut self.body {
            Body::Running { undo, .. } => std::mem::take(undo),
            Body::Assembling | Body::None => UndoStack::new(),
        }
    }

    fn configure(&mut self, request: pod::ConfigureRequest, reply: Reply<Bounded<pod::ConfigureResponse>>) {
        if let Err(error) = boot::check(&self.spec, &request) {
            return tell(reply, Err(error.into()));
        }
        let known = self.network.borrow().clone();
        match (self.record.phase, known) {
            (Phase::Stopping | Phase::Stopped, _) => tell(reply, Err(self.unavailable())),
            (_, Some(known)) if *known != request => tell(reply, Err(PodError::OtherNetwork.into())),
            (Phase::Ready, _) => tell(reply, Ok(self.ready.clone())),
            (Phase::Booting, known) => {
                if known.is_none() {
                    self.network.send_replace(Some(Arc::new(request)));
                }
                self.configuring.push(reply);
            }
        }
    }

    /// Returns the error for requests that the guest cannot serve now.
    fn unavailable(&self) -> Failure {
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
        match &self.body {
            Body::Running { machine, .. } => machine::disk(machine, IMAGE_DISK),
            Body::Assembling | Body::None => None,
        }
    }

    fn volume_disk(&self) -> Option<Slot> {
        match &self.body {
            Body::Running { machine, .. } => machine::disk(machine, VOLUME_DISK),
            Body::Assembling | Body::None => None,
        }
    }

    /// Applies an event to a container's state; returns false if the event comes too late to matter.
    fn step(&mut self, id: &str, event: ContainerEvent) -> bool {
        let Some(entry) = self.containers.get_mut(id) else { return false };
        match entry.state.step(event) {
            Ok((next, _)) => {
                let changed = next != entry.state;
                entry.state = next;
                changed
            }
            Err(refused) => {
                tracing::error!(container = id, "{}", Chain(&refused));
                false
            }
        }
    }
}

/// Replies that must not be sent before the record is written.
#[derive(Default)]
struct Answers(Vec<Box<dyn FnOnce() + Send>>);

impl Answers {
    fn later(&mut self, answer: impl FnOnce() + Send + 'static) {
        self.0.push(Box::new(answer));
    }

    fn give(self) {
        self.0.into_iter().for_each(|answer| answer());
    }
}

/// Sends a reply; ignores that the requester may have disconnected.
fn tell<T>(reply: Reply<T>, outcome: Result<T, Failure>) {
    let _ = reply.send(outcome);
}

/// Sends an event to the actor, which may have ended.
fn send(own: &mpsc::UnboundedSender<Message>, news: News) {
    let _ = own.send(Message::News(news));
}
