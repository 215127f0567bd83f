//! The actor of one pod: one task holds the pod's records and the client of its pod process, and handles the pod's events one at a
//! time: inbox → step → record → effect → publish. Effects run in tasks of their own and send their results to the inbox, so a
//! slow guest never delays a stop or a status. A caller may drop its request at any time; the actor completes the work all the
//! same. The module uses the state tables, the effects in `pod` and `container`, and the store, and knows nothing of CRI.

pub mod announce;
mod container;
pub(crate) mod message;
mod pod;
mod process;
mod resize;
pub(crate) mod table;

use super::context::NodeServices;
use super::context::error::{LifecycleError, at, left_line};
use super::context::events::EventKind;
use super::context::services::Admit;
use super::context::view::View;
use super::pod::boot;
use super::pod::spec::NewPod;
use super::restore::PodBase;
use crate::metrics::labels::StartResult;
use crate::traces::{RequestSpan, TracedWork};
use announce::Announced;
use message::{Answer, Begin, Message, Patience, Stopping};
use nacelle_base::machine::EngineKind;
use nacelle_base::timeline::Timeline;
use nacelle_base::{Chain, Classify, ContainerId};
use nacelle_model::process::PodProcess;
use nacelle_model::record::{ContainerRecord, PodRecord, WaitingContainer};
use nacelle_model::resources::{PodResources, Resources};
use nacelle_model::state;
use nacelle_model::state::PodEvent;
use nacelle_pod::MemoryPolicy;
use nacelle_pod::client::{ClientError, PodClient};
use nacelle_store::{Change, StoreError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use table::Table;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Capacity of a pod's inbox in messages; further senders wait.
const INBOX: usize = 64;

/// The reason for a resize of the VM.
pub(crate) enum ResizeRequest {
    /// New resource limits of the pod.
    Pod(Box<PodResources>),
    /// Memory limit in bytes of all containers together, for a pod that has no limits of its own.
    Containers(u64),
}

/// The record of a container and the pending responses to its callers.
pub(crate) struct Entry {
    record: ContainerRecord,
    create_waiters: Vec<Answer<ContainerId>>,
    create_error: Option<LifecycleError>,
    start_waiters: Vec<Answer<()>>,
    remove_waiters: Vec<Answer<()>>,
    removal: Patience,
    /// The steps of its creation and start, with their durations.
    timeline: Timeline,
    /// The span of the request to create it, if it is recorded.
    create_span: Option<RequestSpan>,
    /// The span of the last request to start it, if it is recorded.
    start_span: Option<RequestSpan>,
    /// Pending changes of the container's limits, in order; the first one is being applied.
    updates: VecDeque<(Box<Resources>, Answer<()>)>,
    /// The container as it waited, if it continues from a checkpoint.
    waited: Option<WaitingContainer>,
}

impl Entry {
    fn new(record: ContainerRecord) -> Entry {
        Entry {
            timeline: Timeline::from_steps(record.timeline.clone()),
            record,
            create_waiters: Vec::new(),
            create_error: None,
            start_waiters: Vec::new(),
            remove_waiters: Vec::new(),
            removal: Patience::default(),
            create_span: None,
            start_span: None,
            updates: VecDeque::new(),
            waited: None,
        }
    }
}

pub(crate) struct Actor {
    services: Arc<NodeServices>,
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
    updates: VecDeque<(ResizeRequest, Answer<()>)>,
    /// The states that events have announced.
    announced: Announced,
    /// The steps of the pod's start, with their durations.
    timeline: Timeline,
    /// The span of the request that creates the pod, if it is recorded.
    span: Option<RequestSpan>,
    /// When this actor was created: for a new pod, when it was requested.
    since: Instant,
    /// The CPUs of the node to which the VM is confined (empty: all CPUs), and the number of pinned vCPUs; `None` if unknown.
    confined: Option<(BTreeSet<u32>, Option<u32>)>,
    /// The memory policy of the VM's cgroup; `None` if unknown.
    memory_policy: Option<MemoryPolicy>,
    ended: bool,
}

/// Creates the actor and its channels; `Actor::run` starts it.
pub(crate) fn new(
    services: Arc<NodeServices>,
    table: Arc<Table>,
    pod: PodRecord,
    containers: Vec<ContainerRecord>,
    announced: Announced,
) -> (Actor, mpsc::Sender<Message>, watch::Receiver<Arc<View>>) {
    let (me, inbox) = mpsc::channel(INBOX);
    let containers: BTreeMap<_, _> = containers.into_iter().map(|c| (c.id.clone(), Entry::new(c))).collect();
    let (view, seen) = watch::channel(Arc::new(View::new(&pod, containers.values().map(|entry| &entry.record), None)));
    let actor = Actor {
        // A booting VM is not confined yet.
        confined: (pod.state == state::PodState::Booting).then(Default::default),
        memory_policy: (pod.state == state::PodState::Booting).then(Default::default),
        services,
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
        announced,
        timeline: Timeline::default(),
        span: RequestSpan::current(),
        since: Instant::now(),
        ended: false,
    };
    (actor, me, seen)
}

fn answer_all<T: Clone>(waiting: &mut Vec<Answer<T>>, answer: &Result<T, LifecycleError>) {
    for each in waiting.drain(..) {
        // A caller may have dropped its receiver.
        let _ = each.send(answer.clone());
    }
}

impl Actor {
    pub(crate) async fn run(mut self, begin: Begin) {
        match begin {
            Begin::New(engine, base, answer) => self.begin(engine, base, answer).await,
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

    async fn begin(&mut self, engine: EngineKind, base: Option<Box<PodBase>>, answer: Answer<()>) {
        if let Err(error) = self.commit(vec![Change::Pod(self.pod.clone().into())]).await {
            self.count_start(StartResult::Failed);
            self.table.forget(&self.pod);
            self.services.events.notify_change();
            self.ended = true;
            let _ = answer.send(Err(error));
            return;
        }
        self.wait_ready.push(answer);
        let Some((_, handler)) = self.services.config.handler(&self.pod.handler) else {
            // The handler existed when the request was checked, and the configuration does not change.
            return self.booted(Err(LifecycleError::NotFound { what: "handler", id: self.pod.handler.clone() })).await;
        };
        let (id, config, handler) = (self.pod.id.clone(), Arc::clone(&self.pod.config), handler.clone());
        let boot = boot::boot(
            Arc::clone(&self.services),
            NewPod { id, config, handler, engine, user: self.pod.user, base: base.map(|base| *base) },
            self.cancel_boot.clone(),
            self.timeline.clone(),
            self.admit(),
        );
        self.effect(async move { Message::Booted(Box::new(boot.await)) });
    }

    /// Counts the end of the pod's start, and adds its steps to the trace.
    fn count_start(&mut self, result: StartResult) {
        let longest = self.services.config.sandbox.boot_timeout;
        let (counters, steps) = (&self.services.counters, self.timeline.steps());
        if let Some(span) = self.span.take() {
            span.add_steps(TracedWork::PodStart, &steps);
        }
        counters.count_pod_start(&self.pod.handler, result, self.since.elapsed(), &steps, longest);
    }

    /// Returns the callback by which the actor records the pod process before that process begins its work.
    fn admit(&self) -> Admit {
        let me = self.me.clone();
        Box::new(move |process: PodProcess| {
            let pid = process.identity.pid;
            Box::pin(async move {
                let recorded = table::send_request(&me, |answer| Message::Spawned(process, answer)).await;
                recorded.map_err(|error| ClientError::NotRecorded { pid, kind: error.kind(), source: Box::new(error) })
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
            Message::TornDown(torn_down) => self.torn_down(torn_down).await,
            Message::Forgotten(result) => self.forgotten(result).await,
            Message::Found(client) => self.found(client),
            Message::Report(state) => self.report(state).await,
            Message::Lost => self.lost(),
            Message::Gone(last, cause) => self.gone(last, cause).await,
            Message::Create { continuation, config, image, volumes, span, answer } => {
                self.create(continuation, *config, image, volumes, span, answer).await
            }
            Message::CompleteRestore(answer) => self.complete_restore(answer).await,
            Message::Start(id, span, answer) => self.start(id, span, answer).await,
            Message::Update(id, change, answer) => self.update(id, change, answer).await,
            Message::UpdatePod(change, answer) => self.update_pod(change, answer).await,
            Message::PodUpdated(next, result) => self.pod_updated(*next, result).await,
            Message::Updated(id, next, result) => self.updated(id, *next, result).await,
            Message::StopContainer(id, grace, answer) => self.stop_container(id, Stopping::new(grace, answer)).await,
            Message::StopAgain(id, stopping) => self.stop_container(id, stopping).await,
            Message::RemoveContainer(id, answer) => self.remove_container(id, Some(answer)).await,
            Message::CreateAgain(id) => self.create_again(id),
            Message::Prepared(id, result) => self.prepared(id, result).await,
            Message::Created(id, result) => self.created(id, result).await,
            Message::Started(id, result) => self.started(id, result).await,
            Message::Stopped(id, result, stopping) => self.stopped(id, result, stopping).await,
            Message::Removed(id, result) => self.removed(id, result).await,
            Message::RemoveAgain(id) => self.begin_remove(id),
        }
        self.settle().await;
    }

    /// Records that the pod is restored completely.
    async fn complete_restore(&mut self, answer: Answer<()>) {
        if self.pod.state != state::PodState::Ready {
            return drop(answer.send(Err(self.not_ready())));
        }
        let mut pod = self.pod.clone();
        if let Some(restored) = &mut pod.restored {
            restored.is_complete = true;
        }
        let kept = self.commit(vec![Change::Pod(pod.clone().into())]).await;
        if kept.is_ok() {
            self.pod = pod;
            self.publish();
        }
        // A caller that has given up removes the pod.
        let _ = answer.send(kept);
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

    /// Completes the requests that the current state satisfies, then starts the next queued one.
    async fn settle(&mut self) {
        match self.pod.state {
            state::PodState::Ready => {
                answer_all(&mut self.wait_ready, &Ok(()));
                if let Err(error) = self.confine_again().await {
                    tracing::warn!(pod = %self.pod.id, "{}", Chain(&error));
                }
            }
            state::PodState::Stopped => {
                answer_all(&mut self.wait_stopped, &Ok(()));
                // No client knows a pod that never became ready: it is removed as soon as possible.
                if !self.wait_removed.is_empty() || !self.pod.was_ready {
                    self.step(PodEvent::Remove).await;
                }
            }
            state::PodState::Unclean => {
                let id = self.pod.id.to_string();
                let error = LifecycleError::Unclean { id, left: left_line(&self.pod.left) };
                answer_all(&mut self.wait_stopped, &Err(error.clone()));
                answer_all(&mut self.wait_removed, &Err(error.clone()));
                let error = self.boot_error.clone().unwrap_or(error);
                answer_all(&mut self.wait_ready, &Err(error));
            }
            state::PodState::Booting | state::PodState::Stopping | state::PodState::Removing => {}
        }
    }

    async fn commit(&self, changes: Vec<Change>) -> Result<(), LifecycleError> {
        self.services.store.commit(changes).await.map_err(at("record the change"))
    }

    /// Records and publishes the pod's current state. A failure is only logged: the event cannot be undone, and the next change
    /// writes the whole record again.
    async fn keep_pod(&mut self) {
        let kept = self.services.store.commit(vec![Change::Pod(self.pod.clone().into())]).await;
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
        self.services.events.notify_change();
        let due = self.announced.due(&self.pod, records);
        self.publish_events(&due);
    }

    fn publish_events(&self, events: &[(EventKind, String)]) {
        if events.is_empty() {
            return;
        }
        // The view has no client: a queued event must not keep a connection open.
        let records = self.containers.values().map(|entry| &entry.record);
        let view = Arc::new(View::new(&self.pod, records, None));
        for (kind, id) in events {
            self.services.events.publish(*kind, id, &view);
        }
    }
}
