//! Owns: the pods of this node: finding them, making them, and asking them. Each pod is an actor; this is the table
//! of their inboxes and of what they last showed.
//! May use: the state store, the image store, pod processes and networks (through `seams`). Knows no CRI.
//! Threads: `Node` is shared by all requests. The table's lock is held for look-ups only, never while waiting.

mod actor;
mod boot;
pub(crate) mod devices;
mod disks;
mod error;
pub mod events;
mod kernel;
mod machine;
mod make;
mod memory;
mod processors;
mod pushed;
pub mod recover;
pub mod seams;
pub mod shown;
mod size;

pub(crate) use error::at;
pub use error::{LifecycleError, StepError};
pub use events::{Event, EventKind, Events};
pub(crate) use make::ask;

use crate::config::{Config, EngineSetting};
use actor::{Answer, Begin, Message};
use ipnet::IpNet;
use nacelle_base::lock::PathLock;
use nacelle_base::machine::EngineKind;
pub(crate) use nacelle_base::timeline::now;
use nacelle_base::{Chain, ContainerId, PodId};
use nacelle_machines::vms::{Busy, Vms};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::digest::ImageId;
use nacelle_model::pod::{PodConfig, PodName};
use nacelle_model::process::PodProcess;
use nacelle_model::record::{ContainerRecord, PodRecord, VmRecord};
use nacelle_model::resources::{PodResources, Resources};
use nacelle_model::state;
use nacelle_pod::client::{ClientError, PodClient};
use nacelle_pod::record::PodRecord as LastRecord;
use nacelle_pod::spec::{Accelerator, EngineSpec};
use nacelle_proto::pod as proto;
use nacelle_store::Store;
use seams::{Networks, Pods};
use shown::Told;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// Texts of pod processes are cut after this many bytes.
pub(crate) const CLIP: usize = 2000;
/// What is shown of a console, in bytes.
const CONSOLE_SHOWN: usize = 4 << 10;

/// What runs machines on this node.
#[derive(Clone, Debug)]
pub struct EngineChoice {
    /// For handlers that name no engine.
    pub fitting: EngineKind,
    /// QEMU, for handlers whose engine it is.
    pub qemu: PathBuf,
    /// What QEMU runs guests with.
    pub accelerator: Accelerator,
    /// The agent's program, for pods that have no guest.
    pub agent: PathBuf,
    /// The keeper's program, for machine pods.
    pub keeper: PathBuf,
}

impl EngineChoice {
    /// The engine of a pod.
    pub(crate) fn spec(&self, setting: EngineSetting, pod: &PodConfig) -> EngineSpec {
        let setting = if pod.needs_host() { EngineSetting::Host } else { setting };
        let shares = pod.node_namespaces;
        let engine = setting.or(self.fitting);
        if pod.machine.is_some() && engine != EngineKind::Host {
            let accelerator = if engine == EngineKind::Kvm { Accelerator::Kvm } else { self.accelerator };
            let keep = pod.machine.as_ref().and_then(|machine| machine.keep.clone());
            let shares = pod.machine.as_ref().map_or(0, |machine| machine.filesystems.len());
            let (program, qemu) = (self.keeper.clone(), self.qemu.clone());
            return EngineSpec::Keeper { program, qemu, accelerator, keep, shares };
        }
        match engine {
            EngineKind::Kvm => EngineSpec::Kvm {},
            EngineKind::Qemu => EngineSpec::Qemu { binary: self.qemu.clone(), accelerator: self.accelerator },
            EngineKind::Host => EngineSpec::Host { agent: self.agent.clone(), shares },
        }
    }
}

/// All that the pods of a node share.
pub struct Parts {
    /// The configuration.
    pub config: Config,
    /// What runs machines.
    pub engine: EngineChoice,
    /// The state store.
    pub store: Store,
    /// The image store.
    pub images: nacelle_image::Store,
    /// Machines that outlive their pods.
    pub vms: Vms,
    /// Pod processes.
    pub pods: Arc<dyn Pods>,
    /// Networks.
    pub networks: Arc<dyn Networks>,
    /// The node's pod CIDRs.
    pub cidrs: RwLock<Vec<IpNet>>,
    /// What happens to pods and containers, for those who want to be told.
    pub events: Events,
    /// Keep other daemons out of the directories of this one.
    pub locks: Vec<PathLock>,
}

impl Parts {
    /// The run directory of a pod. It is the daemon's own; its process writes in a part of it (`nacelle_pod::jail_dir`).
    pub fn pod_dir(&self, id: &PodId) -> PathBuf {
        self.config.paths.pods().join(id.short())
    }

    /// Whether the pod is a machine.
    pub(crate) fn has_guest(&self, pod: &PodRecord) -> bool {
        let handler = self.config.handler(&pod.handler);
        !pod.config.needs_host() && handler.is_none_or(|(_, handler)| handler.engine != EngineSetting::Host)
    }

    /// Ends what is left of the pod process of this run directory, which the store knows as `stored`: also when the directory was
    /// lost, with all of `/run` perhaps. Where neither is known, there was no process.
    async fn clean_up(
        &self,
        dir: &std::path::Path,
        stored: Option<&PodProcess>,
    ) -> Result<Option<LastRecord>, ClientError> {
        match tokio::fs::try_exists(dir).await {
            Ok(false) if stored.is_none() => Ok(None),
            // If that cannot be told, cleaning up says why.
            _ => self.pods.clean_up(dir, stored).await,
        }
    }

    fn pod_cidrs(&self) -> Vec<IpNet> {
        self.cidrs.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// For an answer of a pod process, beside what the request itself allows.
    pub(crate) fn answer_limit(&self) -> Duration {
        Duration::from_secs(self.config.sandbox.answer_seconds)
    }

    /// For one step of taking a pod down.
    pub(crate) fn teardown_limit(&self) -> Duration {
        Duration::from_secs(self.config.sandbox.undo_seconds)
    }

    /// Lets go of images that nobody needs any more, in the background.
    fn collect_images(&self, table: &Table) {
        let (images, mut in_use) = (self.images.clone(), table.images_in_use());
        in_use.extend(self.vms.images());
        tokio::spawn(async move {
            if let Err(error) = images.collect(&in_use).await {
                tracing::warn!("cannot collect images: {}", Chain(&error));
            }
        });
    }
}

/// A pod as its actor last showed it.
#[derive(Clone, Debug)]
pub struct View {
    /// The pod.
    pub pod: PodRecord,
    /// Its containers.
    pub containers: BTreeMap<ContainerId, ContainerRecord>,
    client: Option<PodClient>,
}

impl View {
    pub(crate) fn new<'a>(
        pod: &PodRecord,
        containers: impl Iterator<Item = &'a ContainerRecord>,
        client: Option<PodClient>,
    ) -> View {
        View { pod: pod.clone(), containers: containers.map(|c| (c.id.clone(), c.clone())).collect(), client }
    }
}

/// The inbox of a pod that exists already, and the answer that it shall get.
type Known = (mpsc::Sender<Message>, Answer<()>);

#[derive(Clone)]
struct Handle {
    inbox: mpsc::Sender<Message>,
    view: watch::Receiver<Arc<View>>,
}

#[derive(Default)]
struct Rows {
    pods: BTreeMap<PodId, Handle>,
    names: BTreeMap<PodName, PodId>,
}

/// Who is there.
#[derive(Default)]
pub(crate) struct Table(Mutex<Rows>);

impl Table {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        // Rows are changed by single inserts and removals: a panic in between leaves them whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, pod: &PodRecord) {
        let mut rows = self.rows();
        rows.pods.remove(&pod.id);
        if rows.names.get(&pod.config.name) == Some(&pod.id) {
            rows.names.remove(&pod.config.name);
        }
    }

    /// Asks the task of a pod.
    async fn ask<T>(&self, handle: &Handle, message: impl FnOnce(Answer<T>) -> Message) -> Result<T, LifecycleError> {
        let asked = asked_inbox(&handle.inbox, message).await;
        asked.map_err(|error| self.explain(&handle.view.borrow().pod.id, error))
    }

    /// The error of a request to the task of a pod. A task that ends removes its row first: with the row still there it has failed,
    /// and the pod runs on.
    fn explain(&self, pod: &PodId, error: LifecycleError) -> LifecycleError {
        match error {
            LifecycleError::Ended if self.rows().pods.contains_key(pod) => {
                LifecycleError::TaskFailed { pod: pod.to_string() }
            }
            error => error,
        }
    }

    fn views(&self) -> Vec<Arc<View>> {
        self.rows().pods.values().map(|handle| Arc::clone(&handle.view.borrow())).collect()
    }

    fn images_in_use(&self) -> HashSet<ImageId> {
        let images_of =
            |c: &ContainerRecord| std::iter::once(&c.image).chain(&c.volumes).map(|i| i.id).collect::<Vec<_>>();
        self.views().iter().flat_map(|view| view.containers.values().flat_map(images_of).collect::<Vec<_>>()).collect()
    }

    /// The one pod whose id begins so.
    fn find(&self, id: &str) -> Result<(PodId, Handle), LifecycleError> {
        let rows = self.rows();
        let mut fitting = rows.pods.iter().filter(|(known, _)| !id.is_empty() && known.as_str().starts_with(id));
        match (fitting.next(), fitting.next()) {
            (Some((id, handle)), None) => Ok((id.clone(), handle.clone())),
            (None, _) => Err(LifecycleError::NotFound { what: "pod", id: clip(id) }),
            (Some(_), Some(_)) => Err(LifecycleError::Ambiguous { what: "pod", id: clip(id) }),
        }
    }

    /// The one container whose id begins so, with its pod.
    fn find_container(&self, id: &str) -> Result<(ContainerId, Handle, Arc<View>), LifecycleError> {
        let mut found = None;
        for handle in self.rows().pods.values() {
            let view = Arc::clone(&handle.view.borrow());
            for known in view.containers.keys().filter(|known| !id.is_empty() && known.as_str().starts_with(id)) {
                if found.is_some() {
                    return Err(LifecycleError::Ambiguous { what: "container", id: clip(id) });
                }
                found = Some((known.clone(), handle.clone(), Arc::clone(&view)));
            }
        }
        found.ok_or_else(|| LifecycleError::NotFound { what: "container", id: clip(id) })
    }
}

/// A container that runs, for those who have business with it.
pub(crate) struct Running {
    /// Its id.
    pub id: ContainerId,
    /// Its pod process.
    pub client: PodClient,
    /// It has a terminal.
    pub tty: bool,
    /// It has an input.
    pub stdin: bool,
    /// Its input ends with the first who attaches.
    pub stdin_once: bool,
    view: watch::Receiver<Arc<View>>,
}

impl Running {
    /// Waits until it runs no more.
    pub async fn ended(mut self) {
        let runs = |view: &Arc<View>| view.containers.get(&self.id).map(|record| record.state);
        // A pod that is gone shows nothing more.
        let _ = self.view.wait_for(|view| runs(view) != Some(state::ContainerState::Running)).await;
    }
}

/// Whether a pod has a machine that outlives it: until it is known to be gone.
fn holds(view: &View, vm: &str) -> bool {
    view.pod.config.vm.as_deref() == Some(vm) && view.pod.state != state::PodState::Stopped
}

fn held(vm: &str, view: &View) -> LifecycleError {
    LifecycleError::VmHeld { vm: vm.to_owned(), name: view.pod.config.name.to_string(), id: view.pod.id.to_string() }
}

/// The pods of this node.
#[derive(Clone)]
pub struct Node {
    parts: Arc<Parts>,
    table: Arc<Table>,
}

impl Node {
    /// What the pods share.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// All pods as they are.
    pub fn views(&self) -> Vec<Arc<View>> {
        self.table.views()
    }

    /// One pod, by its id or the beginning of it.
    pub fn pod(&self, id: &str) -> Result<Arc<View>, LifecycleError> {
        Ok(Arc::clone(&self.table.find(id)?.1.view.borrow()))
    }

    /// One container, by its id or the beginning of it, with its pod.
    pub fn container(&self, id: &str) -> Result<(ContainerId, Arc<View>), LifecycleError> {
        self.table.find_container(id).map(|(id, _, view)| (id, view))
    }

    /// Images that containers are made of or see as volumes, and those of disks that machines keep.
    pub fn images_in_use(&self) -> HashSet<ImageId> {
        let mut images = self.table.images_in_use();
        images.extend(self.parts.vms.images());
        images
    }

    /// The pod that runs a machine which outlives its pods, or has not let go of it yet.
    pub fn holder(&self, vm: &str) -> Option<Arc<View>> {
        self.views().into_iter().find(|view| holds(view, vm))
    }

    /// Makes a copy of such a machine, with an identity of its own, if no pod holds it.
    pub async fn copy_vm(&self, vm: &str, namespace: &str, name: &str) -> Result<VmRecord, LifecycleError> {
        let (_record, _busy) = self.lend_vm(vm, "copied")?;
        self.parts.vms.copy(vm, namespace, name).await.map_err(at("copy the machine"))
    }

    /// Has such a machine, which no pod holds, stay as it is until what comes with it is dropped.
    pub fn lend_vm(&self, vm: &str, what: &'static str) -> Result<(VmRecord, Busy), LifecycleError> {
        // While these are looked at, no pod begins to hold it.
        let rows = self.table.rows();
        let views = rows.pods.values().map(|handle| Arc::clone(&handle.view.borrow()));
        if let Some(view) = views.into_iter().find(|view| holds(view, vm)) {
            return Err(held(vm, &view));
        }
        let step = "have the machine to itself";
        Ok((self.parts.vms.known(vm).map_err(at(step))?, self.parts.vms.take(vm, what).map_err(at(step))?))
    }

    /// Forgets such a machine, with all that it has kept, if no pod holds it.
    pub async fn forget_vm(&self, vm: &str) -> Result<(), LifecycleError> {
        let (_record, _busy) = self.lend_vm(vm, "deleted")?;
        self.parts.vms.forget(vm).await.map_err(at("forget the machine"))
    }

    /// Makes a pod and waits until it is ready. The same pod asked for again, while it boots or is ready, is the
    /// same pod.
    pub async fn run_pod(&self, config: PodConfig, handler: String) -> Result<PodId, LifecycleError> {
        let (answer, ready) = oneshot::channel();
        let (id, known) = self.place(config, handler, answer)?;
        if let Some((inbox, answer)) = known {
            let sent = inbox.send(Message::WaitReady(answer)).await;
            sent.map_err(|_closed| self.table.explain(&id, LifecycleError::Ended))?;
        }
        ready.await.map_err(|_dropped| self.table.explain(&id, LifecycleError::Ended))??;
        Ok(id)
    }

    /// Finds the pod of this name, or starts one: then `answer` is its actor's already.
    fn place(
        &self,
        config: PodConfig,
        handler: String,
        answer: Answer<()>,
    ) -> Result<(PodId, Option<Known>), LifecycleError> {
        let mut rows = self.table.rows();
        if let Some(id) = rows.names.get(&config.name) {
            let taken = || LifecycleError::NameTaken { what: "pod", name: config.name.to_string(), id: id.to_string() };
            let handle = rows.pods.get(id).ok_or_else(taken)?;
            let view = Arc::clone(&handle.view.borrow());
            let alive = matches!(view.pod.state, state::PodState::Booting | state::PodState::Ready);
            if !alive || *view.pod.config != config {
                return Err(taken());
            }
            return Ok((id.clone(), Some((handle.inbox.clone(), answer))));
        }
        if let Some(vm) = config.vm.as_deref() {
            let views = rows.pods.values().map(|handle| Arc::clone(&handle.view.borrow()));
            if let Some(view) = views.into_iter().find(|view| holds(view, vm)) {
                return Err(held(vm, &view));
            }
            // It was known a moment ago; it may be deleted now.
            self.parts.vms.is_free(vm).and_then(|()| self.parts.vms.known(vm)).map_err(at("run the machine"))?;
        }
        let id = loop {
            let id = PodId::from_bytes(new_id());
            // The folder's name is the beginning of the id.
            if !rows.pods.keys().any(|known| known.short() == id.short()) {
                break id;
            }
        };
        let record = PodRecord {
            id: id.clone(),
            config: Arc::new(config),
            handler,
            state: state::PodState::Booting,
            created_at: now(),
            was_ready: false,
            ips: Vec::new(),
            kernel_release: String::new(),
            failure: String::new(),
            left: Vec::new(),
            timeline: Vec::new(),
            ending: Vec::new(),
            machine: None,
            resources: None,
            process: None,
        };
        rows.names.insert(record.config.name.clone(), id.clone());
        let (actor, inbox, view) =
            actor::new(Arc::clone(&self.parts), Arc::clone(&self.table), record, Vec::new(), Told::default());
        rows.pods.insert(id.clone(), Handle { inbox, view });
        tokio::spawn(actor.run(Begin::New(answer)));
        Ok((id, None))
    }

    /// Stops a pod; one that does not exist is stopped.
    pub async fn stop_pod(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find(id) {
            Ok((_, handle)) => self.table.ask(&handle, Message::Stop).await.or_else(fine_if_gone),
            Err(error) => fine_if_gone(error),
        }
    }

    /// Stops and forgets a pod; one that does not exist is forgotten.
    pub async fn remove_pod(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find(id) {
            Ok((_, handle)) => self.table.ask(&handle, Message::Remove).await.or_else(fine_if_gone),
            Err(error) => fine_if_gone(error),
        }
    }

    /// Makes a container of an image that is in the store, with the images of its volumes, in their order.
    pub async fn create(
        &self,
        pod: &str,
        config: ContainerConfig,
        image: ContainerImage,
        volumes: Vec<ContainerImage>,
    ) -> Result<ContainerId, LifecycleError> {
        let (_, handle) = self.table.find(pod)?;
        self.table.ask(&handle, |answer| Message::Create { config: Box::new(config), image, volumes, answer }).await
    }

    /// Starts a container; one that runs is started.
    pub async fn start(&self, id: &str) -> Result<(), LifecycleError> {
        let (id, handle, _) = self.table.find_container(id)?;
        self.table.ask(&handle, |answer| Message::Start(id, answer)).await
    }

    /// Changes the limits of a container that has not ended; what the change does not set stays.
    pub async fn update(&self, id: &str, change: Resources) -> Result<(), LifecycleError> {
        let (id, handle, _) = self.table.find_container(id)?;
        self.table.ask(&handle, |answer| Message::Update(id, Box::new(change), answer)).await
    }

    /// Records what a ready pod may have, if its machine can hold it; what the change does not set stays.
    pub async fn update_pod(&self, id: &str, change: PodResources) -> Result<(), LifecycleError> {
        let (_, handle) = self.table.find(id)?;
        self.table.ask(&handle, |answer| Message::UpdatePod(Box::new(change), answer)).await
    }

    /// Stops a container; one that does not run or exist is stopped.
    pub async fn stop(&self, id: &str, grace: Duration) -> Result<(), LifecycleError> {
        match self.table.find_container(id) {
            Ok((id, handle, _)) => {
                self.table.ask(&handle, |answer| Message::StopContainer(id, grace, answer)).await.or_else(fine_if_gone)
            }
            Err(error) => fine_if_gone(error),
        }
    }

    /// Stops and forgets a container; one that does not exist is forgotten.
    pub async fn remove(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find_container(id) {
            Ok((id, handle, _)) => {
                self.table.ask(&handle, |answer| Message::RemoveContainer(id, answer)).await.or_else(fine_if_gone)
            }
            Err(error) => fine_if_gone(error),
        }
    }

    /// Runs a command in a running container to its end.
    pub async fn exec(
        &self,
        id: &str,
        args: Vec<String>,
        limit: Option<Duration>,
    ) -> Result<proto::ExecSyncResponse, LifecycleError> {
        let Running { id, client, .. } = self.running(id)?;
        make::exec(&self.parts, client, &id, args, limit).await
    }

    /// Closes the log of a running container and opens it again by its name.
    pub async fn reopen_log(&self, id: &str) -> Result<(), LifecycleError> {
        let Running { id, client, .. } = self.running(id)?;
        make::reopen(&self.parts, client, &id).await
    }

    /// Waits, at most so long, until a container does not run; whether that came.
    pub(crate) async fn ends(&self, id: &str, limit: Duration) -> bool {
        let Ok((id, mut handle, _)) = self.table.find_container(id) else { return true };
        let runs = |record: &ContainerRecord| record.state == state::ContainerState::Running;
        let ended = handle.view.wait_for(|view| !view.containers.get(&id).is_some_and(runs));
        // The view ends with the pod.
        tokio::time::timeout(limit, ended).await.is_ok()
    }

    /// A container that runs.
    pub(crate) fn running(&self, id: &str) -> Result<Running, LifecycleError> {
        let (id, handle, view) = self.table.find_container(id)?;
        match (&view.client, view.containers.get(&id)) {
            (Some(client), Some(record)) if record.state == state::ContainerState::Running => {
                let config = &record.config;
                let (tty, stdin, stdin_once) = (config.tty, config.stdin, config.stdin_once);
                Ok(Running { id, client: client.clone(), tty, stdin, stdin_once, view: handle.view })
            }
            _ => Err(LifecycleError::NotRunning { id: id.to_string() }),
        }
    }

    /// A pod that is ready, and its process.
    pub(crate) fn ready(&self, id: &str) -> Result<(PodId, PodClient), LifecycleError> {
        let (id, handle) = self.table.find(id)?;
        let view = Arc::clone(&handle.view.borrow());
        match &view.client {
            Some(client) if view.pod.state == state::PodState::Ready => Ok((id, client.clone())),
            _ => Err(LifecycleError::NotReady { id: id.to_string(), why: format!("it is {:?}", view.pod.state) }),
        }
    }

    /// The end of the console of a pod's guest; nothing if there is none.
    pub async fn console(&self, pod: &PodId) -> String {
        let jailed = nacelle_pod::jailed(&self.parts.pod_dir(pod));
        let tail = boot::blocking(move || nacelle_engine::log_tail(&jailed, nacelle_pod::CONSOLE_FILE, CONSOLE_SHOWN));
        match tail.await {
            Ok(text) => text.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%pod, "the console's log cannot be shown: {}", Chain(&error));
                String::new()
            }
        }
    }

    /// Remembers the node's pod CIDRs.
    pub async fn set_pod_cidrs(&self, cidrs: Vec<IpNet>) -> Result<(), LifecycleError> {
        let text: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
        let change = nacelle_store::Change::Setting(recover::POD_CIDRS, text.join(","));
        self.parts.store.commit(vec![change]).await.map_err(error::at("record the pod CIDR"))?;
        *self.parts.cidrs.write().unwrap_or_else(PoisonError::into_inner) = cidrs;
        Ok(())
    }
}

async fn asked_inbox<T>(
    inbox: &mpsc::Sender<Message>,
    message: impl FnOnce(Answer<T>) -> Message,
) -> Result<T, LifecycleError> {
    let (answer, answered) = oneshot::channel();
    inbox.send(message(answer)).await.map_err(|_closed| LifecycleError::Ended)?;
    answered.await.map_err(|_dropped| LifecycleError::Ended)?
}

/// Stop and Remove of what is not there have succeeded.
fn fine_if_gone(error: LifecycleError) -> Result<(), LifecycleError> {
    match error {
        LifecycleError::NotFound { .. } | LifecycleError::Ended => Ok(()),
        error => Err(error),
    }
}

/// The bytes of an id.
fn new_id() -> [u8; 32] {
    let mut bytes = [0; 32];
    // Linux gives random bytes to everybody once it has booted; without them nothing here could be named.
    nacelle_base::random::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}

/// A text of a stranger, on one line and of limited length.
pub(crate) fn clip(text: &str) -> String {
    let mut short = String::new();
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if short.len() + c.len_utf8() > CLIP {
            short.push('…');
            break;
        }
        short.push(c);
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, Kind};

    #[tokio::test]
    async fn a_pod_whose_task_has_failed_is_not_said_to_be_gone() {
        let (table, pod) = (Table::default(), nacelle_model::testing::pod(1));
        let (inbox, task) = mpsc::channel(1);
        drop(task);
        let (_view, view) = watch::channel(Arc::new(View::new(&pod, std::iter::empty(), None)));
        let handle = Handle { inbox, view };
        table.rows().pods.insert(pod.id.clone(), handle.clone());
        let error = table.ask(&handle, Message::Stop).await.or_else(fine_if_gone).unwrap_err();
        assert!(matches!(&error, LifecycleError::TaskFailed { .. }) && error.kind() == Kind::Internal, "{error}");
        table.forget(&pod);
        table.ask(&handle, Message::Stop).await.or_else(fine_if_gone).unwrap();
    }
}
