//! Finds, creates and controls the pods of this node. Each pod is an actor; this module holds the table of their inboxes and of
//! the states that they last published. It uses the state store, the image store, and pod processes and networks (through
//! `seams`), and knows nothing of CRI. All requests share `Node`. The table's lock is held for look-ups only, never while
//! waiting.

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

/// Texts of pod processes are cut to this number of bytes.
pub(crate) const CLIP: usize = 2000;
/// The number of bytes of a console that an error shows.
const CONSOLE_SHOWN: usize = 4 << 10;

/// The engines of this node.
#[derive(Clone, Debug)]
pub struct EngineChoice {
    /// The engine of handlers that name none.
    pub fitting: EngineKind,
    /// The QEMU binary, for handlers with that engine.
    pub qemu: PathBuf,
    /// QEMU's accelerator.
    pub accelerator: Accelerator,
    /// The agent's binary, for pods without a guest.
    pub agent: PathBuf,
    /// The keeper's binary, for machine pods.
    pub keeper: PathBuf,
}

impl EngineChoice {
    /// Returns the engine of a pod.
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

/// The state and the services that all pods of a node share.
pub struct Parts {
    /// The configuration.
    pub config: Config,
    /// The engines.
    pub engine: EngineChoice,
    /// The state store.
    pub store: Store,
    /// The image store.
    pub images: nacelle_image::Store,
    /// The persistent VMs.
    pub vms: Vms,
    /// The pod processes.
    pub pods: Arc<dyn Pods>,
    /// The networks.
    pub networks: Arc<dyn Networks>,
    /// The node's pod CIDRs.
    pub cidrs: RwLock<Vec<IpNet>>,
    /// The events of pods and containers.
    pub events: Events,
    /// Locks that keep other daemons out of this daemon's directories.
    pub locks: Vec<PathLock>,
}

impl Parts {
    /// Returns the run directory of a pod. It belongs to the daemon; the pod process writes in a part of it
    /// (`nacelle_pod::jail_dir`).
    pub fn pod_dir(&self, id: &PodId) -> PathBuf {
        self.config.paths.pods().join(id.short())
    }

    /// Returns whether the pod runs in a VM.
    pub(crate) fn has_guest(&self, pod: &PodRecord) -> bool {
        let handler = self.config.handler(&pod.handler);
        !pod.config.needs_host() && handler.is_none_or(|(_, handler)| handler.engine != EngineSetting::Host)
    }

    /// Ends what is left of the pod process of this run directory, which the store knows as `stored`. This works even if the
    /// directory was lost, for example with all of `/run`. If neither is known, there was no process.
    async fn clean_up(
        &self,
        dir: &std::path::Path,
        stored: Option<&PodProcess>,
    ) -> Result<Option<LastRecord>, ClientError> {
        match tokio::fs::try_exists(dir).await {
            Ok(false) if stored.is_none() => Ok(None),
            // If this cannot be determined, the cleanup returns the reason.
            _ => self.pods.clean_up(dir, stored).await,
        }
    }

    fn pod_cidrs(&self) -> Vec<IpNet> {
        self.cidrs.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the time limit for a response of a pod process, in addition to what the request itself allows.
    pub(crate) fn answer_limit(&self) -> Duration {
        Duration::from_secs(self.config.sandbox.answer_seconds)
    }

    /// Returns the time limit for one step of a pod's teardown.
    pub(crate) fn teardown_limit(&self) -> Duration {
        Duration::from_secs(self.config.sandbox.undo_seconds)
    }

    /// Releases unused images in the background.
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

/// The state of a pod as its actor last published it.
#[derive(Clone, Debug)]
pub struct View {
    /// The pod.
    pub pod: PodRecord,
    /// The pod's containers.
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

/// The inbox of an existing pod, and the response that the pod is to send.
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

/// The table of all pods.
#[derive(Default)]
pub(crate) struct Table(Mutex<Rows>);

impl Table {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        // Rows change by single inserts and removals, so a panic in between leaves the table consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, pod: &PodRecord) {
        let mut rows = self.rows();
        rows.pods.remove(&pod.id);
        if rows.names.get(&pod.config.name) == Some(&pod.id) {
            rows.names.remove(&pod.config.name);
        }
    }

    /// Sends a request to the pod's task and waits for the response.
    async fn ask<T>(&self, handle: &Handle, message: impl FnOnce(Answer<T>) -> Message) -> Result<T, LifecycleError> {
        let asked = asked_inbox(&handle.inbox, message).await;
        asked.map_err(|error| self.explain(&handle.view.borrow().pod.id, error))
    }

    /// Returns the error of a request to a pod's task that sent no response. A task that ends removes its row first: if the row
    /// is still there, the task has panicked, and the pod runs on.
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

    /// Returns the only pod whose id has this prefix.
    fn find(&self, id: &str) -> Result<(PodId, Handle), LifecycleError> {
        let rows = self.rows();
        let mut fitting = rows.pods.iter().filter(|(known, _)| !id.is_empty() && known.as_str().starts_with(id));
        match (fitting.next(), fitting.next()) {
            (Some((id, handle)), None) => Ok((id.clone(), handle.clone())),
            (None, _) => Err(LifecycleError::NotFound { what: "pod", id: clip(id) }),
            (Some(_), Some(_)) => Err(LifecycleError::Ambiguous { what: "pod", id: clip(id) }),
        }
    }

    /// Returns the only container whose id has this prefix, with its pod.
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

/// A running container, for streams and commands.
pub(crate) struct Running {
    /// The container's id.
    pub id: ContainerId,
    /// The client of its pod process.
    pub client: PodClient,
    /// The container has a terminal.
    pub tty: bool,
    /// The container has a standard input.
    pub stdin: bool,
    /// The standard input is closed when the first attached client ends.
    pub stdin_once: bool,
    view: watch::Receiver<Arc<View>>,
}

impl Running {
    /// Waits until the container no longer runs.
    pub async fn ended(mut self) {
        let runs = |view: &Arc<View>| view.containers.get(&self.id).map(|record| record.state);
        // A removed pod publishes nothing more.
        let _ = self.view.wait_for(|view| runs(view) != Some(state::ContainerState::Running)).await;
    }
}

/// Returns whether a pod holds a persistent VM. It does so until the VM is known to have stopped.
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
    /// Returns what the pods share.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Returns the states of all pods.
    pub fn views(&self) -> Vec<Arc<View>> {
        self.table.views()
    }

    /// Returns a pod by its id or a prefix of it.
    pub fn pod(&self, id: &str) -> Result<Arc<View>, LifecycleError> {
        Ok(Arc::clone(&self.table.find(id)?.1.view.borrow()))
    }

    /// Returns a container by its id or a prefix of it, with its pod.
    pub fn container(&self, id: &str) -> Result<(ContainerId, Arc<View>), LifecycleError> {
        self.table.find_container(id).map(|(id, _, view)| (id, view))
    }

    /// Returns the images of containers and their volumes, and those below the disks of persistent VMs.
    pub fn images_in_use(&self) -> HashSet<ImageId> {
        let mut images = self.table.images_in_use();
        images.extend(self.parts.vms.images());
        images
    }

    /// Returns the pod that runs a persistent VM or has not released it yet.
    pub fn holder(&self, vm: &str) -> Option<Arc<View>> {
        self.views().into_iter().find(|view| holds(view, vm))
    }

    /// Copies a persistent VM that no pod holds. The copy gets an identity of its own.
    pub async fn copy_vm(&self, vm: &str, namespace: &str, name: &str) -> Result<VmRecord, LifecycleError> {
        let (_record, _busy) = self.lend_vm(vm, "copied")?;
        self.parts.vms.copy(vm, namespace, name).await.map_err(at("copy the machine"))
    }

    /// Locks a persistent VM that no pod holds; it does not change until the returned guard is dropped.
    pub fn lend_vm(&self, vm: &str, what: &'static str) -> Result<(VmRecord, Busy), LifecycleError> {
        // While the table is locked, no pod can begin to hold the VM.
        let rows = self.table.rows();
        let views = rows.pods.values().map(|handle| Arc::clone(&handle.view.borrow()));
        if let Some(view) = views.into_iter().find(|view| holds(view, vm)) {
            return Err(held(vm, &view));
        }
        let step = "have the machine to itself";
        Ok((self.parts.vms.known(vm).map_err(at(step))?, self.parts.vms.take(vm, what).map_err(at(step))?))
    }

    /// Deletes a persistent VM that no pod holds, with all its data.
    pub async fn forget_vm(&self, vm: &str) -> Result<(), LifecycleError> {
        let (_record, _busy) = self.lend_vm(vm, "deleted")?;
        self.parts.vms.forget(vm).await.map_err(at("forget the machine"))
    }

    /// Creates a pod and waits until it is ready. A repeated request for a pod that boots or is ready returns the same pod.
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

    /// Finds the pod of this name, or starts one, whose actor then owns `answer`.
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
            // The VM existed a moment ago, but may have been deleted since.
            self.parts.vms.is_free(vm).and_then(|()| self.parts.vms.known(vm)).map_err(at("run the machine"))?;
        }
        let id = loop {
            let id = PodId::from_bytes(new_id());
            // The run directory is named after the id's prefix.
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

    /// Stops a pod. A pod that does not exist counts as stopped.
    pub async fn stop_pod(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find(id) {
            Ok((_, handle)) => self.table.ask(&handle, Message::Stop).await.or_else(fine_if_gone),
            Err(error) => fine_if_gone(error),
        }
    }

    /// Stops and removes a pod. A pod that does not exist counts as removed.
    pub async fn remove_pod(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find(id) {
            Ok((_, handle)) => self.table.ask(&handle, Message::Remove).await.or_else(fine_if_gone),
            Err(error) => fine_if_gone(error),
        }
    }

    /// Creates a container from an image in the store; `volumes` are the images of its volumes, in their order.
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

    /// Starts a container. A running container counts as started.
    pub async fn start(&self, id: &str) -> Result<(), LifecycleError> {
        let (id, handle, _) = self.table.find_container(id)?;
        self.table.ask(&handle, |answer| Message::Start(id, answer)).await
    }

    /// Changes the limits of a container that has not ended; unset limits stay.
    pub async fn update(&self, id: &str, change: Resources) -> Result<(), LifecycleError> {
        let (id, handle, _) = self.table.find_container(id)?;
        self.table.ask(&handle, |answer| Message::Update(id, Box::new(change), answer)).await
    }

    /// Changes the resources of a ready pod if its VM can hold them; unset limits stay.
    pub async fn update_pod(&self, id: &str, change: PodResources) -> Result<(), LifecycleError> {
        let (_, handle) = self.table.find(id)?;
        self.table.ask(&handle, |answer| Message::UpdatePod(Box::new(change), answer)).await
    }

    /// Stops a container. A container that does not run or exist counts as stopped.
    pub async fn stop(&self, id: &str, grace: Duration) -> Result<(), LifecycleError> {
        match self.table.find_container(id) {
            Ok((id, handle, _)) => {
                self.table.ask(&handle, |answer| Message::StopContainer(id, grace, answer)).await.or_else(fine_if_gone)
            }
            Err(error) => fine_if_gone(error),
        }
    }

    /// Stops and removes a container. A container that does not exist counts as removed.
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

    /// Closes the log file of a running container and opens it again by its name.
    pub async fn reopen_log(&self, id: &str) -> Result<(), LifecycleError> {
        let Running { id, client, .. } = self.running(id)?;
        make::reopen(&self.parts, client, &id).await
    }

    /// Waits until a container no longer runs; returns `false` after `limit`.
    pub(crate) async fn ends(&self, id: &str, limit: Duration) -> bool {
        let Ok((id, mut handle, _)) = self.table.find_container(id) else { return true };
        let runs = |record: &ContainerRecord| record.state == state::ContainerState::Running;
        let ended = handle.view.wait_for(|view| !view.containers.get(&id).is_some_and(runs));
        // The view ends with the pod.
        tokio::time::timeout(limit, ended).await.is_ok()
    }

    /// Returns a running container.
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

    /// Returns a ready pod and its client.
    pub(crate) fn ready(&self, id: &str) -> Result<(PodId, PodClient), LifecycleError> {
        let (id, handle) = self.table.find(id)?;
        let view = Arc::clone(&handle.view.borrow());
        match &view.client {
            Some(client) if view.pod.state == state::PodState::Ready => Ok((id, client.clone())),
            _ => Err(LifecycleError::NotReady { id: id.to_string(), why: format!("it is {:?}", view.pod.state) }),
        }
    }

    /// Returns the end of the guest's console output; empty if there is no console.
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

    /// Stores the node's pod CIDRs.
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

/// Turns "not found" into success, for Stop and Remove.
fn fine_if_gone(error: LifecycleError) -> Result<(), LifecycleError> {
    match error {
        LifecycleError::NotFound { .. } | LifecycleError::Ended => Ok(()),
        error => Err(error),
    }
}

/// Returns the random bytes of a new id.
fn new_id() -> [u8; 32] {
    let mut bytes = [0; 32];
    // Linux provides random bytes to every process after its boot; without them nothing here could be named.
    nacelle_base::random::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}

/// Returns an untrusted text on one line and with limited length.
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
