//! Owns: one pod: its records, its machine's client, and the order in which things happen to it. One task per pod:
//! inbox → step → record → effect → publish. Effects run beside it and answer into the inbox, so a slow guest never
//! keeps a stop or a status waiting. Requests may be dropped at any time: what they asked for goes on here.
//! May use: the state tables, boot and make (effects), the store. Knows no CRI.

mod containers;
mod update;

use super::boot::{self, Undone, Up};
use super::error::{LifecycleError, left_line};
use super::events::EventKind;
use super::make::Prepared;
use super::seams::Admit;
use super::shown::Told;
use super::{Parts, Table, View, clip};
use nacelle_base::timeline::Timeline;
use nacelle_base::{Chain, Classify, ContainerId, Kind};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::process::PodProcess;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::resources::{PodResources, Resources, VmResources};
use nacelle_model::security::ContainerUser;
use nacelle_model::state;
use nacelle_model::state::{PodAction, PodEvent};
use nacelle_pod::client::{ClientError, PodClient};
use nacelle_pod::record::{LOST, blame_memory};
use nacelle_proto::pod as proto;
use nacelle_store::{Change, StoreError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Where an answer goes. Nobody may be there any more.
pub(super) type Answer<T> = oneshot::Sender<Result<T, LifecycleError>>;

/// Messages that wait for a pod's actor; more senders wait for a place.
const INBOX: usize = 64;
/// Between attempts to find a silent pod process again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Before a request is repeated that the pod process did not answer.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) enum Message {
    /// Asked.
    WaitReady(Answer<()>),
    Stop(Answer<()>),
    Remove(Answer<()>),
    Create {
        config: Box<ContainerConfig>,
        image: ContainerImage,
        volumes: Vec<ContainerImage>,
        answer: Answer<ContainerId>,
    },
    Start(ContainerId, Answer<()>),
    Update(ContainerId, Box<Resources>, Answer<()>),
    UpdatePod(Box<PodResources>, Answer<()>),
    StopContainer(ContainerId, Duration, Answer<()>),
    RemoveContainer(ContainerId, Answer<()>),
    /// Happened.
    Spawned(PodProcess, Answer<()>),
    Booted(Box<Result<Up, LifecycleError>>),
    Undone(Undone),
    Forgotten(Result<(), LifecycleError>),
    Found(PodClient),
    Report(proto::PodState),
    Lost,
    Gone(Option<proto::PodState>),
    MakeAgain(ContainerId),
    Prepared(ContainerId, Result<Box<Prepared>, LifecycleError>),
    Made(ContainerId, Result<ContainerUser, LifecycleError>),
    Started(ContainerId, Result<(), LifecycleError>),
    Stopped(ContainerId, Result<Option<proto::PodState>, LifecycleError>, Stopping),
    StopAgain(ContainerId, Stopping),
    Removed(ContainerId, Result<(), LifecycleError>),
    RemoveAgain(ContainerId),
    Updated(ContainerId, Box<Resources>, Result<(), LifecycleError>),
    PodUpdated(Box<Option<PodResources>>, Result<VmResources, LifecycleError>),
}

/// A container that is to be stopped.
pub(super) struct Stopping {
    /// How long after `since` it is killed. CRI sets no bound, so that the sum may be no point in time.
    grace: Duration,
    since: Instant,
    answer: Answer<()>,
    patience: Patience,
}

impl Stopping {
    fn new(grace: Duration, answer: Answer<()>) -> Stopping {
        Stopping { grace, since: Instant::now(), answer, patience: Patience::default() }
    }
}

/// How long a request is repeated that the pod process did not answer. It may have ended, which this task sees only a moment
/// later: then what was to be stopped or removed has ended with it, and that is what was asked for.
#[derive(Default)]
struct Patience(Option<Instant>);

impl Patience {
    /// Whether to try again after this error; the time runs from the first one on.
    fn lasts(&mut self, error: &LifecycleError, limit: Duration) -> bool {
        let end = *self.0.get_or_insert_with(|| Instant::now() + limit);
        error.kind() == Kind::Unavailable && Instant::now() < end
    }
}

/// What a change of the machine's size is for.
enum Wish {
    /// What the pod may have from now on.
    Pod(Box<PodResources>),
    /// So many bytes that its containers may use together, of whose pod nobody has said more.
    Containers(u64),
}

/// What is known of a container, and who waits for it.
struct Entry {
    record: ContainerRecord,
    made: Vec<Answer<ContainerId>>,
    make_error: Option<LifecycleError>,
    started: Vec<Answer<()>>,
    removed: Vec<Answer<()>>,
    removal: Patience,
    /// How it is made and started.
    timeline: Timeline,
    /// Changes of its limits, one after the other; the first is under way.
    updates: VecDeque<(Box<Resources>, Answer<()>)>,
}

impl Entry {
    fn new(record: ContainerRecord) -> Entry {
        Entry {
            timeline: Timeline::after(record.timeline.clone()),
            record,
            made: Vec::new(),
            make_error: None,
            started: Vec::new(),
            removed: Vec::new(),
            removal: Patience::default(),
            updates: VecDeque::new(),
        }
    }
}

/// How an actor begins.
pub(super) enum Begin {
    /// A new pod: recorded, then booted.
    New(Answer<()>),
    /// Found in the store: this happened meanwhile.
    Known(Option<Box<Message>>),
}

pub(super) struct Actor {
    parts: Arc<Parts>,
    table: Arc<Table>,
    pod: PodRecord,
    containers: BTreeMap<ContainerId, Entry>,
    client: Option<PodClient>,
    view: watch::Sender<Arc<View>>,
    inbox: mpsc::Receiver<Message>,
    me: mpsc::Sender<Message>,
    cancel_boot: CancellationToken,
    watching: Option<AbortOnDropHandle<()>>,
    /// Why the pod never became ready.
    boot_error: Option<LifecycleError>,
    wait_ready: Vec<Answer<()>>,
    wait_stopped: Vec<Answer<()>>,
    wait_removed: Vec<Answer<()>>,
    /// Changes of what the pod may have, one after the other; the first is under way.
    updates: VecDeque<(Wish, Answer<()>)>,
    /// What events have told.
    told: Told,
    /// How the pod comes up.
    timeline: Timeline,
    /// The processors on which the machine was told to run, none: on all; and how many of its own have one of them each; if that is known.
    confined: Option<(BTreeSet<u32>, Option<u32>)>,
    ended: bool,
}

/// Makes the actor's channels; the actor itself starts with `Actor::run`.
pub(super) fn new(
    parts: Arc<Parts>,
    table: Arc<Table>,
    pod: PodRecord,
    containers: Vec<ContainerRecord>,
    told: Told,
) -> (Actor, mpsc::Sender<Message>, watch::Receiver<Arc<View>>) {
    let (me, inbox) = mpsc::channel(INBOX);
    let containers: BTreeMap<_, _> = containers.into_iter().map(|c| (c.id.clone(), Entry::new(c))).collect();
    let (view, seen) = watch::channel(Arc::new(View::new(&pod, containers.values().map(|entry| &entry.record), None)));
    let actor = Actor {
        // One that boots runs nowhere yet.
        confined: (pod.state == state::PodState::Booting).then(Default::default),
        parts,
        table,
        pod,
        containers,
        client: None,
        view,
        inbox,
        me: me.clone(),
        cancel_boot: CancellationToken::new(),
        watching: None,
        boot_error: None,
        wait_ready: Vec::new(),
        wait_stopped: Vec::new(),
        wait_removed: Vec::new(),
        updates: VecDeque::new(),
        told,
        timeline: Timeline::default(),
        ended: false,
    };
    (actor, me, seen)
}

fn tell<T: Clone>(waiting: &mut Vec<Answer<T>>, answer: &Result<T, LifecycleError>) {
    for each in waiting.drain(..) {
        // A caller that went away is no reason to stop.
        let _ = each.send(answer.clone());
    }
}

impl Actor {
    pub(super) async fn run(mut self, begin: Begin) {
        match begin {
            Begin::New(answer) => self.begin(answer).await,
            Begin::Known(first) => {
                // What was found out before there was an actor.
                self.publish();
                if let Some(message) = first {
                    self.handle(*message).await;
                }
            }
        }
        while !self.ended {
            let Some(message) = self.inbox.recv().await else { return };
            self.handle(message).await;
        }
    }

    async fn begin(&mut self, answer: Answer<()>) {
        if let Err(error) = self.commit(vec![Change::Pod(self.pod.clone().into())]).await {
            self.table.forget(&self.pod);
            self.ended = true;
            let _ = answer.send(Err(error));
            return;
        }
        self.wait_ready.push(answer);
        let Some((_, handler)) = self.parts.config.handler(&self.pod.handler) else {
            // It was there when the request was checked, and the configuration does not change.
            return self.booted(Err(LifecycleError::NotFound { what: "handler", id: self.pod.handler.clone() })).await;
        };
        let boot = boot::boot(
            Arc::clone(&self.parts),
            self.pod.id.clone(),
            self.pod.config.clone(),
            handler.clone(),
            self.cancel_boot.clone(),
            self.timeline.clone(),
            self.admit(),
        );
        self.effect(async move { Message::Booted(Box::new(boot.await)) });
    }

    /// Has the actor record the pod process before that begins.
    fn admit(&self) -> Admit {
        let me = self.me.clone();
        Box::new(move |process: PodProcess| {
            let pid = process.identity.pid;
            Box::pin(async move {
                let recorded = super::asked_inbox(&me, |answer| Message::Spawned(process, answer)).await;
                recorded.map_err(|error| ClientError::Unrecorded { pid, kind: error.kind(), source: Box::new(error) })
            })
        })
    }

    /// From now on the process is found again, whatever becomes of its run directory.
    async fn spawned(&mut self, process: PodProcess, answer: Answer<()>) {
        self.pod.process = Some(process);
        let recorded = self.commit(vec![Change::Pod(self.pod.clone().into())]).await;
        // One who has given the start up has ended the process.
        let _ = answer.send(recorded);
    }

    /// Runs an effect beside the actor; its answer comes as a message.
    fn effect(&self, work: impl Future<Output = Message> + Send + 'static) {
        let me = self.me.clone();
        tokio::spawn(async move {
            let message = work.await;
            // A closed inbox: the pod was forgotten meanwhile.
            let _ = me.send(message).await;
        });
    }

    async fn handle(&mut self, message: Message) {
        match message {
            Message::WaitReady(answer) => self.ask_ready(answer),
            Message::Stop(answer) => {
                self.wait_stopped.push(answer);
                self.step(PodEvent::Stop).await;
            }
            Message::Remove(answer) => {
                self.wait_removed.push(answer);
                self.step(PodEvent::Remove).await;
            }
            Message::Spawned(process, answer) => self.spawned(process, answer).await,
            Message::Booted(result) => self.booted(*result).await,
            Message::Undone(undone) => self.undone(undone).await,
            Message::Forgotten(result) => self.forgotten(result).await,
            Message::Found(client) => self.found(client),
            Message::Report(state) => self.report(state).await,
            Message::Lost => self.lost(),
            Message::Gone(last) => self.gone(last).await,
            Message::Create { config, image, volumes, answer } => self.create(*config, image, volumes, answer).await,
            Message::Start(id, answer) => self.start(id, answer).await,
            Message::Update(id, change, answer) => self.update(id, change, answer).await,
            Message::UpdatePod(change, answer) => self.update_pod(change, answer).await,
            Message::PodUpdated(next, result) => self.pod_updated(*next, result).await,
            Message::Updated(id, next, result) => self.updated(id, *next, result).await,
            Message::StopContainer(id, grace, answer) => self.stop_container(id, Stopping::new(grace, answer)).await,
            Message::StopAgain(id, stopping) => self.stop_container(id, stopping).await,
            Message::RemoveContainer(id, answer) => self.remove_container(id, Some(answer)).await,
            Message::MakeAgain(id) => self.make_again(id),
            Message::Prepared(id, result) => self.prepared(id, result).await,
            Message::Made(id, result) => self.made(id, result).await,
            Message::Started(id, result) => self.started(id, result).await,
            Message::Stopped(id, result, stopping) => self.stopped(id, result, stopping).await,
            Message::Removed(id, result) => self.removed(id, result).await,
            Message::RemoveAgain(id) => self.begin_remove(id),
        }
        self.settle().await;
    }

    fn ask_ready(&mut self, answer: Answer<()>) {
        match self.pod.state {
            state::PodState::Booting => self.wait_ready.push(answer),
            state::PodState::Ready => drop(answer.send(Ok(()))),
            _ => drop(answer.send(Err(self.not_ready()))),
        }
    }

    /// The pod is ready, and its process is searched for.
    fn silent(&self) -> LifecycleError {
        LifecycleError::Silent { id: self.pod.id.to_string() }
    }

    fn not_ready(&self) -> LifecycleError {
        let why = match (&self.boot_error, self.pod.state) {
            (Some(error), _) => Chain(error).to_string(),
            (None, state::PodState::Booting) => "it boots".to_owned(),
            (None, _) if !self.pod.failure.is_empty() => self.pod.failure.clone(),
            (None, _) => "it was stopped".to_owned(),
        };
        LifecycleError::NotReady { id: self.pod.id.to_string(), why }
    }

    /// Takes a step of the pod and acts. Giving back never waits for the store: a full disk must not keep a machine
    /// alive, and after a crash the machine is found missing.
    async fn step(&mut self, ask: PodEvent) {
        let (next, act) = match self.pod.state.step(ask) {
            Ok(step) => step,
            Err(refused) => {
                tracing::error!(pod = %self.pod.id, %refused, "a step that cannot be; a defect");
                return;
            }
        };
        if next != self.pod.state {
            tracing::info!(pod = %self.pod.id, from = ?self.pod.state, to = ?next, "pod");
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
                let undo = boot::undo(Arc::clone(&self.parts), self.pod.id.clone(), client, self.pod.process.clone());
                self.effect(async move { Message::Undone(undo.await) });
            }
            PodAction::Forget => {
                let parts = Arc::clone(&self.parts);
                let id = self.pod.id.clone();
                let mut changes: Vec<_> = self.containers.keys().cloned().map(Change::ForgetContainer).collect();
                changes.push(Change::ForgetPod(id.clone()));
                self.effect(async move {
                    let forgotten = match boot::remove_folder(&parts, &id).await {
                        Ok(()) => parts.store.commit(changes).await.map_err(super::error::at("forget the pod")),
                        Err(error) => Err(error),
                    };
                    Message::Forgotten(forgotten)
                });
            }
        }
    }

    async fn booted(&mut self, result: Result<Up, LifecycleError>) {
        self.pod.timeline = self.timeline.steps();
        match result {
            Ok(up) => {
                if self.pod.state == state::PodState::Booting {
                    (self.pod.ips, self.pod.kernel_release) = (up.ips, up.kernel_release);
                    self.pod.machine = Some(up.machine);
                    self.pod.was_ready = true;
                    self.found(up.client);
                } else {
                    self.client = Some(up.client);
                    self.boot_error = Some(LifecycleError::Cancelled);
                }
                self.step(PodEvent::Booted).await;
            }
            Err(error) => {
                tracing::warn!(pod = %self.pod.id, timeline = %self.timeline, "the pod could not start: {}", Chain(&error));
                self.boot_error = Some(error);
                self.step(PodEvent::BootFailed).await;
            }
        }
    }

    async fn undone(&mut self, undone: Undone) {
        self.pod.left = undone.left;
        self.pod.ending = undone.timeline.steps();
        if let Some(last) = undone.last {
            self.apply(&proto::PodState::from(&last)).await;
        }
        // What the pod process could not tell of any more has ended with its machine.
        if self.pod.left.is_empty() {
            self.pod.process = None;
            self.lose_running("the machine of the pod is gone").await;
            self.pod.ips.clear();
            self.step(PodEvent::CleanedUp).await;
        } else {
            self.step(PodEvent::CleanupFailed).await;
        }
    }

    async fn forgotten(&mut self, result: Result<(), LifecycleError>) {
        match result {
            Ok(()) => {
                self.table.forget(&self.pod);
                self.ended = true;
                let ids: Vec<_> = self.containers.keys().cloned().collect();
                let mut gone: Vec<_> = ids.iter().filter_map(|id| self.leave(id)).collect();
                if self.told.is_known() {
                    self.tell_events(&[(EventKind::Deleted, self.pod.id.to_string())]);
                }
                tell(&mut self.wait_stopped, &Ok(()));
                tell(&mut self.wait_removed, &Ok(()));
                for entry in &mut gone {
                    tell(&mut entry.removed, &Ok(()));
                }
                if let Some(error) = self.boot_error.take() {
                    tell(&mut self.wait_ready, &Err(error));
                }
                self.parts.collect_images(&self.table);
            }
            Err(error) => {
                self.step(PodEvent::ForgetFailed).await;
                tell(&mut self.wait_removed, &Err(error.clone()));
                tell(&mut self.wait_ready, &Err(error));
                // Nobody waits any more, so the next settling does not try again by itself.
                self.boot_error = None;
                self.pod.was_ready = true;
            }
        }
    }

    /// Answers those whose wish has come true, and goes on with what waits for the present state.
    async fn settle(&mut self) {
        match self.pod.state {
            state::PodState::Ready => {
                tell(&mut self.wait_ready, &Ok(()));
                if let Err(error) = self.confine(None).await {
                    tracing::warn!(pod = %self.pod.id, "{}", Chain(&error));
                }
            }
            state::PodState::Stopped => {
                tell(&mut self.wait_stopped, &Ok(()));
                // A pod that never was ready is known to nobody: it goes as soon as it can.
                if !self.wait_removed.is_empty() || !self.pod.was_ready {
                    self.step(PodEvent::Remove).await;
                }
            }
            state::PodState::Unclean => {
                let id = self.pod.id.to_string();
                let error = LifecycleError::Unclean { id, left: left_line(&self.pod.left) };
                tell(&mut self.wait_stopped, &Err(error.clone()));
                tell(&mut self.wait_removed, &Err(error.clone()));
                let error = self.boot_error.clone().unwrap_or(error);
                tell(&mut self.wait_ready, &Err(error));
            }
            state::PodState::Booting | state::PodState::Stopping | state::PodState::Removing => {}
        }
    }

    /// There is a pod process to talk to: its changes are followed.
    fn found(&mut self, client: PodClient) {
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

    async fn report(&mut self, mut state: proto::PodState) {
        if self.pod.state != state::PodState::Ready {
            return;
        }
        // If the pod process is gone, too, this is looked at when what it left is cleared up.
        let lost = state.phase() == proto::Phase::Stopped || state.containers.iter().any(|one| one.exit_code == LOST);
        if lost && self.parts.pods.out_of_memory(&self.parts.pod_dir(&self.pod.id)).await {
            blame_memory(&mut state);
        }
        match state.phase() {
            proto::Phase::Stopped => self.gone(Some(state)).await,
            _ => self.apply(&state).await,
        }
    }

    /// The connection to the pod process ended. It may live: then it is found again; or not: then its record is read.
    fn lost(&mut self) {
        if self.pod.state != state::PodState::Ready {
            return;
        }
        let (parts, id, process) = (Arc::clone(&self.parts), self.pod.id.clone(), self.pod.process.clone());
        let search = async move {
            let dir = parts.pod_dir(&id);
            let mut pause = RETRY.0;
            loop {
                match parts.pods.connect(&dir).await {
                    Ok(client) => {
                        // One that can be connected to but not followed must not keep this daemon busy.
                        tokio::time::sleep(pause).await;
                        return Message::Found(client);
                    }
                    Err(ClientError::Gone { .. }) => match parts.clean_up(&dir, process.as_ref()).await {
                        Ok(last) => return Message::Gone(last.as_ref().map(Into::into)),
                        Err(error) => tracing::warn!(pod = %id, "cannot clear up after it: {}", Chain(&error)),
                    },
                    Err(error) => tracing::warn!(pod = %id, "the pod process is silent: {}", Chain(&error)),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY.1);
            }
        };
        let me = self.me.clone();
        // Ends with the pod's readiness: `watching` is dropped when the pod is stopped.
        self.watching = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let message = search.await;
            let _ = me.send(message).await;
        })));
    }

    /// The machine ended by itself.
    async fn gone(&mut self, last: Option<proto::PodState>) {
        if self.pod.state != state::PodState::Ready {
            return;
        }
        let failure = last.as_ref().map(|last| clip(&last.failure)).filter(|failure| !failure.is_empty());
        self.pod.failure = failure.unwrap_or_else(|| "the machine of the pod ended".to_owned());
        tracing::warn!(pod = %self.pod.id, failure = self.pod.failure, "the machine of the pod is gone");
        if let Some(last) = &last {
            self.apply(last).await;
        }
        let failure = self.pod.failure.clone();
        self.lose_running(&failure).await;
        self.step(PodEvent::VmExited).await;
    }

    async fn commit(&self, changes: Vec<Change>) -> Result<(), LifecycleError> {
        self.parts.store.commit(changes).await.map_err(super::error::at("record the change"))
    }

    /// Records and shows the pod as it is. A failure is logged: what happened has happened, and the next change
    /// writes the whole record again.
    async fn keep_pod(&mut self) {
        let kept = self.parts.store.commit(vec![Change::Pod(self.pod.clone().into())]).await;
        self.log_unkept(kept);
        self.publish();
    }

    fn log_unkept(&self, kept: Result<(), StoreError>) {
        if let Err(error) = kept {
            tracing::error!(pod = %self.pod.id, "cannot record a change: {}", Chain(&error));
        }
    }

    /// Shows the pod as it is, then tells of what is new in that.
    fn publish(&mut self) {
        let records = self.containers.values().map(|entry| &entry.record);
        self.view.send_replace(Arc::new(View::new(&self.pod, records.clone(), self.client.clone())));
        let due = self.told.due(&self.pod, records);
        self.tell_events(&due);
    }

    fn tell_events(&self, events: &[(EventKind, String)]) {
        if events.is_empty() {
            return;
        }
        // Without the client: an event that waits must not keep a connection.
        let records = self.containers.values().map(|entry| &entry.record);
        let view = Arc::new(View::new(&self.pod, records, None));
        for (kind, id) in events {
            self.parts.events.tell(*kind, id, &view);
        }
    }
}
