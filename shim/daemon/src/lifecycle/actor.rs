//! The actor of one pod: one task holds the pod's records and the client of its pod process, and handles the pod's events one at a
//! time: inbox → step → record → effect → publish. Effects run in tasks of their own and send their results to the inbox, so a
//! slow guest never delays a stop or a status. A caller may drop its request at any time; the actor completes the work all the
//! same. The module uses the state tables, `boot` and `make` (effects) and the store, and knows nothing of CRI.

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

/// The sender of a response. Its receiver may be gone.
pub(super) type Answer<T> = oneshot::Sender<Result<T, LifecycleError>>;

/// Capacity of a pod's inbox in messages; further senders wait.
const INBOX: usize = 64;
/// First and longest pause between attempts to find a silent pod process again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Pause before a request that the pod process did not answer is repeated.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) enum Message {
    /// Requests of callers.
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
    /// Results of effects, and events of the pod process.
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

/// A pending request to stop a container.
pub(super) struct Stopping {
    /// Time after `since` at which the container is killed. CRI sets no upper bound, so the sum may not be a valid `Instant`.
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

/// The deadline for repeating a request that the pod process did not answer. The process may have ended, which this task learns
/// only a moment later: the container to stop or remove has then ended with it, and the request has succeeded.
#[derive(Default)]
struct Patience(Option<Instant>);

impl Patience {
    /// Returns whether to retry after this error. `limit` runs from the first error.
    fn lasts(&mut self, error: &LifecycleError, limit: Duration) -> bool {
        let end = *self.0.get_or_insert_with(|| Instant::now() + limit);
        error.kind() == Kind::Unavailable && Instant::now() < end
    }
}

/// The reason for a resize of the VM.
enum Wish {
    /// New resource limits of the pod.
    Pod(Box<PodResources>),
    /// Memory limit in bytes of all containers together, for a pod that has no limits of its own.
    Containers(u64),
}

/// The record of a container and the pending responses to its callers.
struct Entry {
    record: ContainerRecord,
    made: Vec<Answer<ContainerId>>,
    make_error: Option<LifecycleError>,
    started: Vec<Answer<()>>,
    removed: Vec<Answer<()>>,
    removal: Patience,
    /// The steps of its creation and start, with their durations.
    timeline: Timeline,
    /// Pending changes of the container's limits, in order; the first one is being applied.
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

/// The initial state of an actor.
pub(super) enum Begin {
    /// A new pod, which is recorded and then booted.
    New(Answer<()>),
    /// A pod from the store, with what happened to it while no daemon ran.
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
    /// The error because of which the pod never became ready.
    boot_error: Option<LifecycleError>,
    wait_ready: Vec<Answer<()>>,
    wait_stopped: Vec<Answer<()>>,
    wait_removed: Vec<Answer<()>>,
    /// Pending changes of the pod's resources, in order; the first one is being applied.
    updates: VecDeque<(Wish, Answer<()>)>,
    /// The states that events have announced.
    told: Told,
    /// The steps of the pod's start, with their durations.
    timeline: Timeline,
    /// The CPUs of the node to which the VM is confined (empty: all CPUs), and the number of pinned vCPUs; `None` if unknown.
    confined: Option<(BTreeSet<u32>, Option<u32>)>,
    ended: bool,
}

/// Creates the actor and its channels; `Actor::run` starts it.
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
        // A booting VM is not confined yet.
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
        // A caller may have dropped its receiver.
        let _ = each.send(answer.clone());
    }
}

impl Actor {
    pub(super) async fn run(mut self, begin: Begin) {
        match begin {
            Begin::New(answer) => self.begin(answer).await,
            Begin::Known(first) => {
                // Publish what recovery found before the actor existed.
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
            // The handler existed when the request was checked, and the configuration does not change.
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

    /// Returns the callback by which the actor records the pod process before that process begins its work.
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

    /// Records the pod process. From then on it can be found again, even if its run directory is lost.
    async fn spawned(&mut self, process: PodProcess, answer: Answer<()>) {
        self.pod.process = Some(process);
        let recorded = self.commit(vec![Change::Pod(self.pod.clone().into())]).await;
        // A caller that cancelled the start has ended the process.
        let _ = answer.send(recorded);
    }

    /// Runs an effect in a task of its own; its result arrives as a message.
    fn effect(&self, work: impl Future<Output = Message> + Send + 'static) {
        let me = self.me.clone();
        tokio::spawn(async move {
            let message = work.await;
            // The inbox is closed if the pod was removed meanwhile.
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

    /// The error for a pod that is ready but whose process is being searched for.
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

    /// Applies an event to the pod's state and runs the resulting action. A teardown never waits for the store: a full disk must
    /// not keep a VM running, and after a crash recovery finds the VM missing.
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
                    let forgotten = match boot::remove_directory(&parts, &id).await {
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
        // Containers whose end the pod process could not report have ended with the VM.
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
                // No request waits any more, so the next `settle` does not retry by itself.
                self.boot_error = None;
                self.pod.was_ready = true;
            }
        }
    }

    /// Completes the requests that the current state satisfies, then starts the next queued one.
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
                // No client knows a pod that never became ready: it is removed as soon as possible.
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

    /// Takes a connected pod process into use and follows its changes.
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
        // If the pod process is gone as well, the cleanup of the pod checks this.
        let lost = state.phase() == proto::Phase::Stopped || state.containers.iter().any(|one| one.exit_code == LOST);
        if lost && self.parts.pods.out_of_memory(&self.parts.pod_dir(&self.pod.id)).await {
            blame_memory(&mut state);
        }
        match state.phase() {
            proto::Phase::Stopped => self.gone(Some(state)).await,
            _ => self.apply(&state).await,
        }
    }

    /// Handles the end of the connection: finds the pod process again if it lives, otherwise reads its last record.
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
                        // A process that accepts connections but cannot be followed must not keep this daemon busy.
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
        // The task ends with the pod's readiness: `watching` is dropped when the pod is stopped.
        self.watching = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let message = search.await;
            let _ = me.send(message).await;
        })));
    }

    /// Handles the unrequested end of the VM.
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

    /// Records and publishes the pod's current state. A failure is only logged: the event cannot be undone, and the next change
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

    /// Publishes the pod's current state, then sends the events that follow from it.
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
        // The view has no client: a queued event must not keep a connection open.
        let records = self.containers.values().map(|entry| &entry.record);
        let view = Arc::new(View::new(&self.pod, records, None));
        for (kind, id) in events {
            self.parts.events.tell(*kind, id, &view);
        }
    }
}
