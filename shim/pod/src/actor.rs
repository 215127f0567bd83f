//! Owns: the state of the pod. One task takes requests and news one by one, asks the tables of `state`, starts the
//! effects, records what changed in state.json, and only then publishes it and answers.
//! Threads: one task; it waits for nothing but its inbox and the writing of the record. Effects run beside it.

use crate::agent::{self, Agent};
use crate::boot::{self, Ready};
use crate::container::{self, Attach, Attached, Ended, ImageUse, Started};
use crate::error::{Failure, PodError, guest_text};
use crate::images::{Images, Placement};
use crate::log::LogPath;
use crate::machine::{self, Assembled, IMAGE_DISK, blocking};
use crate::record::{ContainerPhase, ContainerRecord, LOST, Phase, PodRecord};
use crate::spec::PodSpec;
use crate::state::{self, Container, ContainerAct, ContainerAsk, PodAct, PodAsk};
use crate::{exec, teardown};
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_base::undo::{Left, UndoStack};
use nacelle_base::{Chain, Kind};
use nacelle_engine::{Engine, Machine, MachineExit, Slot};
use nacelle_proto::pod;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

/// How somebody is answered.
pub type Reply<T> = oneshot::Sender<Result<T, Failure>>;

/// What the server asks.
pub enum Ask {
    /// The pod's network.
    Configure(pod::ConfigureRequest, Reply<pod::ConfigureResponse>),
    /// A container.
    Create(pod::CreateContainerRequest, Reply<pod::CreateContainerResponse>),
    /// Its start.
    Start(String, Reply<()>),
    /// Its end, with the time from stop signal to SIGKILL.
    Stop(String, Duration, Reply<()>),
    /// Its removal.
    Remove(String, Reply<()>),
    /// Its log's rotation.
    ReopenLog(String, Reply<()>),
    /// A command in it.
    Exec(pod::ExecSyncRequest, Reply<pod::ExecSyncResponse>),
    /// The end of the pod, with the time that containers get; without a reply: SIGTERM.
    StopPod(Duration, Option<Reply<()>>),
}

/// What effects report.
enum News {
    Assembled(Result<Assembled, PodError>),
    Greeted(Result<Ready, PodError>),
    MachineGone(MachineExit),
    Made(String, Result<pod::CreateContainerResponse, Failure>),
    Started(String, Result<Started, PodError>),
    Ended(String, Ended),
    Removed(String, Result<(), PodError>),
    Detached(Placement),
    Unwound(Vec<Left>),
}

/// The inbox.
pub enum Message {
    /// From outside.
    Ask(Ask),
    /// From an effect of the actor's own.
    #[expect(private_interfaces, reason = "only this module makes and reads news")]
    News(News),
}

struct Entry {
    state: Container,
    request: Arc<pod::CreateContainerRequest>,
    log: Option<LogPath>,
    response: pod::CreateContainerResponse,
    creating: Vec<Reply<pod::CreateContainerResponse>>,
    /// Whoever waits for the start or the removal that is under way.
    waiting: Vec<Reply<()>>,
    started: Option<(container::Streams, Arc<crate::log::LogFile>)>,
    life: Option<AbortHandle>,
}

/// The machine, as far as it is.
enum Body {
    Assembling,
    Running { machine: Arc<dyn Machine>, undo: UndoStack },
    None,
}

/// The owner of the pod.
pub struct Actor {
    spec: Arc<PodSpec>,
    dir: PathBuf,
    record: PodRecord,
    published: watch::Sender<PodRecord>,
    inbox: mpsc::UnboundedReceiver<Message>,
    own: mpsc::UnboundedSender<Message>,
    body: Body,
    agent: Option<Agent>,
    ready: pod::ConfigureResponse,
    network: watch::Sender<Option<Arc<pod::ConfigureRequest>>>,
    configuring: Vec<Reply<pod::ConfigureResponse>>,
    stopping: Vec<Reply<()>>,
    stop_wanted: bool,
    boot: Option<AbortHandle>,
    containers: BTreeMap<String, Entry>,
    images: Images,
    attached: BTreeMap<String, Attached>,
}

/// The actor's other ends.
pub struct Handles {
    /// Its inbox.
    pub inbox: mpsc::UnboundedSender<Message>,
    /// The pod as it is.
    pub published: watch::Receiver<PodRecord>,
}

impl Actor {
    /// An actor that has not begun, and the way to talk to it.
    pub fn new(spec: PodSpec, dir: &Path) -> (Actor, Handles) {
        let record = PodRecord::new(spec.id.clone());
        let (published, seen) = watch::channel(record.clone());
        let (own, inbox) = mpsc::unbounded_channel();
        let handles = Handles { inbox: own.clone(), published: seen };
        let actor = Actor {
            spec: Arc::new(spec),
            dir: dir.to_owned(),
            record,
            published,
            inbox,
            own,
            body: Body::Assembling,
            agent: None,
            ready: pod::ConfigureResponse::default(),
            network: watch::channel(None).0,
            configuring: Vec::new(),
            stopping: Vec::new(),
            stop_wanted: false,
            boot: None,
            containers: BTreeMap::new(),
            images: Images::default(),
            attached: BTreeMap::new(),
        };
        (actor, handles)
    }

    /// Boots the machine and serves until the pod has been stopped.
    pub async fn run(mut self, engine: Arc<dyn Engine>) {
        self.write().await;
        let (spec, dir, own) = (Arc::clone(&self.spec), self.dir.clone(), self.own.clone());
        tokio::spawn(async move {
            let assembled = machine::assemble(&spec, &dir, engine).await;
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

    /// Writes state.json. A full disk must not stop the pod; the next change tries again.
    async fn write(&self) {
        let (record, dir) = (self.record.clone(), self.dir.clone());
        match blocking("the record", move || record.write(&dir)).await {
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
            Ask::Exec(request, reply) => self.exec(request, reply),
            Ask::StopPod(grace, reply) => {
                self.stopping.extend(reply);
                self.stop_wanted = true;
                self.pod(PodAsk::Stop, grace);
            }
        }
    }

    fn heard(&mut self, news: News, answers: &mut Answers) {
        match news {
            News::Assembled(Ok(assembled)) => self.assembled(assembled),
            News::Assembled(Err(error)) => {
                self.body = Body::None;
                match self.record.phase {
                    // Stopped while it was being assembled: that is what the end has waited for.
                    Phase::Stopping => self.unwind(),
                    _ => self.boot_failed(error),
                }
            }
            News::Greeted(Ok(ready)) => self.greeted(ready, answers),
            News::Greeted(Err(error)) => self.boot_failed(error),
            News::MachineGone(exit) => self.machine_gone(&exit),
            News::Made(id, outcome) => self.made(&id, outcome, answers),
            News::Started(id, outcome) => self.started(&id, outcome, answers),
            News::Ended(id, end) => self.ended(&id, end),
            News::Removed(id, outcome) => self.removed(&id, outcome, answers),
            News::Detached(placement) => self.images.free(placement),
            News::Unwound(left) => {
                for Left { what, why } in left {
                    tracing::error!(what, why, "could not be given back");
                }
                self.lose("the pod was stopped");
                self.pod(PodAsk::Unwound, Duration::ZERO);
            }
        }
    }

    // The pod.

    fn pod(&mut self, ask: PodAsk, grace: Duration) {
        match state::pod(self.record.phase, ask) {
            Ok((next, act)) => {
                self.record.phase = next;
                match act {
                    PodAct::Nothing => {}
                    PodAct::TakeDown => self.take_down(grace),
                    PodAct::Unwind => self.unwind(),
                }
            }
            // Asks of the outside are never refused; news that come twice are a defect that harms nobody.
            Err(refused) => tracing::error!("{}", Chain(&refused)),
        }
        if matches!(self.record.phase, Phase::Stopping | Phase::Stopped) {
            let failure = self.unavailable();
            self.configuring.drain(..).for_each(|reply| tell(reply, Err(failure.clone())));
        }
    }

    fn assembled(&mut self, assembled: Assembled) {
        let Assembled { machine, mut gone, incoming, netns, undo } = assembled;
        let (own, end) = (self.own.clone(), gone.clone());
        tokio::spawn(async move {
            if let Ok(exit) = gone.wait_for(Option::is_some).await
                && let Some(exit) = exit.clone()
            {
                send(&own, News::MachineGone(exit));
            }
        });
        let link = machine.link();
        self.body = Body::Running { machine, undo };
        if self.record.phase != Phase::Booting {
            // Stopped while the engine was starting.
            self.unwind();
            return;
        }
        let (spec, network, own) = (Arc::clone(&self.spec), self.network.subscribe(), self.own.clone());
        let greeting = tokio::spawn(async move {
            let greeted = boot::greet(&spec, incoming, link, end, netns, network).await;
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
        self.pod(PodAsk::GuestReady, Duration::ZERO);
    }

    fn boot_failed(&mut self, error: PodError) {
        let failure = Failure::from(error);
        if self.record.phase == Phase::Booting {
            tracing::error!("the pod does not come up: {}", failure.message);
            self.record.failure.clone_from(&failure.message);
        }
        self.configuring.drain(..).for_each(|reply| tell(reply, Err(failure.clone())));
        self.pod(PodAsk::BootFailed, Duration::ZERO);
    }

    fn machine_gone(&mut self, exit: &MachineExit) {
        let why = agent::why(exit);
        if matches!(self.record.phase, Phase::Booting | Phase::Ready) {
            tracing::error!("the machine is gone: {why}");
            self.record.failure.clone_from(&why);
            let failure = Failure::from(PodError::Died { why: why.clone() });
            self.configuring.drain(..).for_each(|reply| tell(reply, Err(failure.clone())));
        }
        self.lose(&why);
        self.pod(PodAsk::MachineGone, Duration::ZERO);
    }

    /// The machine is gone or about to be: every container has ended.
    fn lose(&mut self, why: &str) {
        self.agent = None;
        self.record.lose_containers(why, crate::now_nanos());
        for (id, entry) in &mut self.containers {
            if let Ok((next, _)) = state::container(entry.state, ContainerAsk::Lost) {
                entry.state = next;
            }
            if let Some(life) = entry.life.take() {
                life.abort();
                tracing::debug!(container = id, "lost");
            }
        }
    }

    fn take_down(&mut self, grace: Duration) {
        let (Some(agent), Body::Running { machine, .. }) = (self.agent.clone(), &self.body) else {
            self.unwind();
            return;
        };
        let running =
            self.containers.iter().filter(|(_, entry)| matches!(entry.state, Container::Starting | Container::Running));
        let running = running.map(|(id, entry)| (id.clone(), signal_of(&entry.request))).collect();
        let (machine, published, own) = (Arc::clone(machine), self.published.subscribe(), self.own.clone());
        let timeouts = self.spec.timeouts.clone();
        let undo = self.take_undo();
        tokio::spawn(async move {
            teardown::containers(&agent, &published, running, grace, &timeouts).await;
            let left = teardown::machine(machine, Some(agent), undo, &timeouts).await;
            send(&own, News::Unwound(left));
        });
    }

    /// Ends the machine at once and gives everything back; while it is being assembled: later.
    fn unwind(&mut self) {
        if let Some(boot) = self.boot.take() {
            boot.abort();
        }
        let (timeouts, own) = (self.spec.timeouts.clone(), self.own.clone());
        match std::mem::replace(&mut self.body, Body::None) {
            Body::Assembling => self.body = Body::Assembling,
            Body::None => send(&own, News::Unwound(Vec::new())),
            Body::Running { machine, undo } => {
                tokio::spawn(async move {
                    send(&own, News::Unwound(teardown::machine(machine, None, undo, &timeouts).await));
                });
            }
        }
    }

    /// For the take-down: the machine stays reachable until it is gone.
    fn take_undo(&mut self) -> UndoStack {
        match &mut self.body {
            Body::Running { undo, .. } => std::mem::take(undo),
            Body::Assembling | Body::None => UndoStack::new(),
        }
    }

    fn configure(&mut self, request: pod::ConfigureRequest, reply: Reply<pod::ConfigureResponse>) {
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

    /// Why nothing can be asked of the guest now.
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

    // Containers.

    fn create(
        &mut self,
        request: pod::CreateContainerRequest,
        reply: Reply<pod::CreateContainerResponse>,
        answers: &mut Answers,
    ) {
        let id = request.id.clone();
        let current = self.containers.get(&id).map_or(Container::Gone, |entry| entry.state);
        match (state::container(current, ContainerAsk::Create), self.containers.get_mut(&id)) {
            (Err(source), _) => tell(reply, Err(PodError::Container { id, source }.into())),
            (Ok((_, ContainerAct::Join)), Some(entry)) => entry.creating.push(reply),
            (Ok((_, ContainerAct::Nothing)), Some(entry)) => {
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
        next: Container,
        request: pod::CreateContainerRequest,
    ) -> Result<Entry, Failure> {
        let agent = self.agent()?;
        let slot = self.image_disk().ok_or_else(|| self.unavailable())?;
        if !is_name(id) {
            let rule = "1 to 128 letters, digits, '-', '_' or '.' are expected";
            return Err(PodError::Field { field: "id", value: guest_text(id, 200), rule }.into());
        }
        let log = match request.log_path.as_str() {
            "" => None,
            path => Some(LogPath::check(self.spec.log_directory.as_deref(), Path::new(path)).map_err(PodError::from)?),
        };
        let extents = request.image.iter().map(|extent| Extent {
            path: extent.path.clone().into(),
            offset: extent.offset,
            length: extent.length,
        });
        let image = ImageDisk { extents: extents.collect() };
        let key = request.image_key.clone();
        let (placement, new) = self.images.acquire(&key, &image).map_err(PodError::from)?;
        let mut attach = None;
        if new {
            let (tell, attached) = watch::channel(None);
            self.attached.insert(key.clone(), attached);
            attach = Some(Attach { slot, key: key.clone(), image, tell });
        }
        let attached = self.attached.get(&key).cloned().ok_or(PodError::Ending)?;
        let request = Arc::new(request);
        let (name, own, asked) = (id.to_owned(), self.own.clone(), Arc::clone(&request));
        tokio::spawn(async move {
            let made = container::make(agent, asked, ImageUse { placement, attach, attached }).await;
            send(&own, News::Made(name, made));
        });
        Ok(Entry {
            state: next,
            request,
            log,
            response: pod::CreateContainerResponse::default(),
            creating: Vec::new(),
            waiting: Vec::new(),
            started: None,
            life: None,
        })
    }

    fn made(&mut self, id: &str, outcome: Result<pod::CreateContainerResponse, Failure>, answers: &mut Answers) {
        let ask = if outcome.is_ok() { ContainerAsk::Made } else { ContainerAsk::MakeFailed };
        self.step(id, ask);
        let Some(entry) = self.containers.get_mut(id) else { return };
        for reply in std::mem::take(&mut entry.creating) {
            let outcome = outcome.clone();
            answers.later(move || tell(reply, outcome));
        }
        if let Ok(response) = outcome {
            self.record.containers.push(container::made_record(id, &response));
            entry.response = response;
            if self.agent.is_none() {
                // The machine went while the reply was on its way.
                self.lose("the machine is gone");
            }
        } else if let Some(entry) = self.containers.remove(id) {
            self.release(&entry.request.image_key);
        }
    }

    fn start(&mut self, id: &str, reply: Reply<()>, answers: &mut Answers) {
        let Some(entry) = self.containers.get_mut(id).filter(|entry| entry.state != Container::Creating) else {
            return tell(reply, Err(PodError::NoContainer { id: id.to_owned() }.into()));
        };
        match state::container(entry.state, ContainerAsk::Start) {
            Err(source) => tell(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((_, ContainerAct::Join)) => entry.waiting.push(reply),
            Ok((next, ContainerAct::Start)) => {
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

    fn started(&mut self, id: &str, outcome: Result<Started, PodError>, answers: &mut Answers) {
        let ask = if outcome.is_ok() { ContainerAsk::Started } else { ContainerAsk::StartFailed };
        let in_time = self.step(id, ask);
        let (own, unavailable) = (self.own.clone(), self.unavailable());
        let Some(entry) = self.containers.get_mut(id) else { return };
        let now = crate::now_nanos();
        let record = self.record.containers.iter_mut().find(|container| container.id == id);
        let told = match (outcome, self.agent.clone()) {
            (Ok(Started { streams, log, mut pumping }), Some(agent)) if in_time => {
                if let Some(record) = record {
                    record.phase = ContainerPhase::Running;
                    record.started_at = now;
                }
                entry.started = Some((streams, log));
                let id = id.to_owned();
                let life = tokio::spawn(async move {
                    let end = container::ended(&agent, &id, &mut pumping).await;
                    send(&own, News::Ended(id, end));
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

    fn ended(&mut self, id: &str, end: Ended) {
        if !self.step(id, ContainerAsk::Ended) {
            return;
        }
        let record = self.record.containers.iter_mut().find(|container| container.id == id);
        if let Some(record) = record.filter(|record| record.phase == ContainerPhase::Running) {
            let now = crate::now_nanos();
            record.phase = ContainerPhase::Exited;
            record.exit_code = end.code;
            record.oom_killed = end.oom_killed;
            record.message = end.message;
            // The guest's clock is the guest's word.
            record.finished_at = if (record.started_at..=now).contains(&end.at) { end.at } else { now };
        }
    }

    fn stop(&mut self, id: &str, grace: Duration, reply: Reply<()>) {
        let entry = self.containers.get(id);
        match state::container(entry.map_or(Container::Gone, |entry| entry.state), ContainerAsk::Stop) {
            Err(source) => tell(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((_, ContainerAct::Stop)) => {
                let (Some(entry), Some(agent)) = (entry, self.agent.clone()) else { return tell(reply, Ok(())) };
                let (id, published) = (id.to_owned(), self.published.subscribe());
                let (signal, limit) = (signal_of(&entry.request), self.spec.timeouts.call());
                tokio::spawn(async move {
                    let stopped = container::stop(agent, published, &id, signal, grace, limit).await;
                    tell(reply, stopped.map_err(Failure::from));
                });
            }
            Ok(_) => tell(reply, Ok(())),
        }
    }

    fn remove(&mut self, id: &str, reply: Reply<()>) {
        let Some(entry) = self.containers.get_mut(id) else { return tell(reply, Ok(())) };
        match state::container(entry.state, ContainerAsk::Remove) {
            Err(source) => tell(reply, Err(PodError::Container { id: id.to_owned(), source }.into())),
            Ok((next, act)) => {
                entry.state = next;
                entry.waiting.push(reply);
                if act == ContainerAct::Remove {
                    let (id, own, agent) = (id.to_owned(), self.own.clone(), self.agent.clone());
                    tokio::spawn(async move {
                        // Without a machine there is nothing left to remove.
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

    fn removed(&mut self, id: &str, outcome: Result<(), PodError>, answers: &mut Answers) {
        // What the machine took with it when it died is removed all the same.
        let outcome = match outcome {
            Err(PodError::Died { .. }) => Ok(()),
            _ if self.agent.is_none() => Ok(()),
            other => other.map_err(Failure::from),
        };
        let ask = if outcome.is_ok() { ContainerAsk::Removed } else { ContainerAsk::RemoveFailed };
        self.step(id, ask);
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
                    self.release(&entry.request.image_key);
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

    fn reopen_log(&mut self, id: &str, reply: Reply<()>) {
        let Some(entry) = self.containers.get(id) else {
            return tell(reply, Err(PodError::NoContainer { id: id.to_owned() }.into()));
        };
        // One that has not started opens its log when it does.
        let Some((_, log)) = &entry.started else { return tell(reply, Ok(())) };
        let log = Arc::clone(log);
        tokio::spawn(async move {
            let reopened = blocking("the opening of a log", move || log.reopen()).await;
            tell(reply, reopened.and_then(|reopened| Ok(reopened?)).map_err(Failure::from));
        });
    }

    fn exec(&mut self, request: pod::ExecSyncRequest, mut reply: Reply<pod::ExecSyncResponse>) {
        let agent = match (self.containers.get(&request.id).map(|entry| entry.state), self.agent()) {
            (None, _) => return tell(reply, Err(PodError::NoContainer { id: request.id }.into())),
            (Some(Container::Running), Ok(agent)) => agent,
            (Some(Container::Running), Err(failure)) => return tell(reply, Err(failure)),
            (Some(state), _) => {
                let failure = Failure {
                    kind: Kind::Conflict,
                    message: format!("container {} is {state:?}; a command needs a running one", request.id),
                };
                return tell(reply, Err(failure));
            }
        };
        tokio::spawn(async move {
            let done = tokio::select! {
                done = exec::run(agent, request) => done,
                // Nobody waits any more: the command is killed with its future.
                () = reply.closed() => return,
            };
            tell(reply, done.map_err(Failure::from));
        });
    }

    /// One user of an image less; with the last one it is taken off the machine.
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

    /// Takes a container's state through the table; false if the news come too late to matter.
    fn step(&mut self, id: &str, ask: ContainerAsk) -> bool {
        let Some(entry) = self.containers.get_mut(id) else { return false };
        match state::container(entry.state, ask) {
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

/// The exit code of a container that could not be started.
const START_FAILED: u32 = 128;
const SIGTERM: u32 = 15;

fn mark_lost(record: &mut ContainerRecord, why: &str) {
    record.phase = ContainerPhase::Exited;
    record.exit_code = LOST;
    record.finished_at = crate::now_nanos();
    record.message = why.to_owned();
}

fn signal_of(request: &pod::CreateContainerRequest) -> u32 {
    if request.stop_signal == 0 { SIGTERM } else { request.stop_signal }
}

fn is_name(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=128).contains(&id.len()) && id.bytes().all(plain) && !id.starts_with('.')
}

/// Answers that must not be given before the record is written.
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

/// Answers; whoever asked may have gone.
fn tell<T>(reply: Reply<T>, outcome: Result<T, Failure>) {
    let _ = reply.send(outcome);
}

/// Reports to the actor; it may have ended.
fn send(own: &mpsc::UnboundedSender<Message>, news: News) {
    let _ = own.send(Message::News(news));
}
