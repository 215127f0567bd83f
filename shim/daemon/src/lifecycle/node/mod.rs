//! Provides the requests on pods and containers. Each request finds the pod's actor in the table, sends it a message and waits for
//! the response. It knows nothing of CRI.

mod checkpoint;
pub mod recover;
mod restore;
pub(crate) mod running;
mod templates;
pub(crate) mod users;
mod vms;

use super::actor;
use super::actor::announce::Announced;
use super::actor::message::{Answer, Begin, Message};
use super::actor::table::{Handle, Known, Table, ignore_not_found};
use super::checkpoint::Checkpoints;
use super::container;
use super::context::error::{LifecycleError, at};
use super::context::view::View;
use super::context::{NodeServices, new_id, unix_nanos};
use super::restore::{self as restoring, ContainerToRestore, PodBase, PodRestoreError, PodToRestore};
use crate::traces::{RequestSpan, TracedWork};
use ipnet::IpNet;
use nacelle_base::machine::EngineKind;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{Chain, Classify, ContainerId, FailureKind, PodId};
use nacelle_machines::runtime::holds_vm;
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::digest::ImageId;
use nacelle_model::pod::PodConfig;
use nacelle_model::record::PodRecord;
use nacelle_model::resources::{PodResources, Resources};
use nacelle_model::state;
use nacelle_pod::check_idmapped_mounts;
use nacelle_proto::pod as proto;
use nacelle_store::Change;
use running::Running;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use vms::held;

/// A pod that is to be started.
struct NewPodRequest {
    config: PodConfig,
    handler: String,
    engine: EngineKind,
    /// Its process gets a user of its own.
    has_user: bool,
    /// What it continues from.
    base: Option<Box<PodBase>>,
}

/// The pods of this node.
#[derive(Clone)]
pub struct Node {
    services: Arc<NodeServices>,
    table: Arc<Table>,
    checkpoints: Checkpoints,
}

impl Node {
    /// Returns what the pods share.
    pub fn services(&self) -> &NodeServices {
        &self.services
    }

    /// Releases the networks of pods that do not exist, and sends the CNI plugins the valid attachments. A failure is logged; the
    /// next call tries again.
    pub async fn collect_networks(&self) {
        // A pod is in the table from before it has a namespace until its network is released.
        let known = || self.table.rows().pods.keys().cloned().collect();
        if let Err(error) = self.services.networks.gc(&known, self.services.teardown_timeout()).await {
            tracing::warn!("cannot collect networks without a pod; the next interval tries again: {}", Chain(&error));
        }
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
        images.extend(self.services.vms.images());
        images
    }

    /// Creates a pod and waits until it is ready. A repeated request for a pod that boots or is ready returns the same pod. The containers
    /// of the checkpoint that the pod names continue when they are created.
    pub async fn run_pod(
        &self,
        config: PodConfig,
        handler: String,
        engine: EngineKind,
    ) -> Result<PodId, PodRestoreError> {
        let (answer, ready) = oneshot::channel();
        let base = match &config.checkpoint {
            Some(name) => {
                let checkpoint = self.services.config.paths.checkpoints().join(&config.name.namespace).join(name);
                let (config, handler) = (config.clone(), handler.clone());
                self.find_base(PodToRestore { checkpoint, config, handler, engine }).await?
            }
            None => None,
        };
        let has_user = self.can_have_user(&config, engine).await?;
        let (id, known) = self.place(NewPodRequest { config, handler, engine, has_user, base }, answer)?;
        if let Some((inbox, answer)) = known {
            let sent = inbox.send(Message::WaitReady(answer)).await;
            sent.map_err(|_closed| self.table.explain(&id, LifecycleError::Ended))?;
        }
        ready.await.map_err(|_dropped| self.table.explain(&id, LifecycleError::Ended))??;
        Ok(id)
    }

    /// Returns whether the process of a pod can have a user of its own. That of a machine pod accesses files that stay root's, which
    /// needs idmapped mounts: where the node refuses them, the processes are root, without capabilities.
    async fn can_have_user(&self, config: &PodConfig, engine: EngineKind) -> Result<bool, LifecycleError> {
        let (user, count) = self.services.config.jail.pod_users();
        // The process of a pod without a VM signals its agent, which is root.
        if engine == EngineKind::Host || count == 0 {
            return Ok(false);
        }
        let Some(machine) = config.kind.machine() else { return Ok(true) };
        let paths = &self.services.config.paths;
        let directories: Vec<_> = [paths.scratch(), paths.images()].into_iter().chain(machine.keep.clone()).collect();
        let checked = blocking(move || check_idmapped_mounts(directories.iter().map(PathBuf::as_path), user)).await;
        match checked {
            Err(error) if error.kind() == FailureKind::Unsupported => {
                let error = Chain(&error);
                tracing::warn!(pod = %config.name, "the processes of the machine pod are root, without capabilities: {error}");
                Ok(false)
            }
            checked => checked.map(|()| true).map_err(at("prepare the files of the machine for a user of its own")),
        }
    }

    /// Finds the pod of this name, or starts one, whose actor then owns `answer`.
    fn place(&self, request: NewPodRequest, answer: Answer<()>) -> Result<(PodId, Option<Known>), LifecycleError> {
        let NewPodRequest { config, handler, engine, has_user, base } = request;
        let mut rows = self.table.rows();
        if let Some(id) = rows.names.get(&config.name) {
            let taken = || LifecycleError::NameTaken { what: "pod", name: config.name.to_string(), id: id.to_string() };
            let handle = rows.pods.get(id).ok_or_else(taken)?;
            let view = Arc::clone(&handle.view.borrow());
            let alive = matches!(view.pod.state, state::PodState::Booting | state::PodState::Ready);
            // RestorePod creates the containers itself, so that two of the same name exclude each other.
            let is_exclusive = config.checkpoint.is_none() && (base.is_some() || view.pod.restored.is_some());
            if !alive || *view.pod.config != config || is_exclusive {
                return Err(taken());
            }
            return Ok((id.clone(), Some((handle.inbox.clone(), answer))));
        }
        // The pod that had this name a moment ago is gone.
        if config.checkpoint.is_some() && base.is_none() {
            return Err(LifecycleError::Ended);
        }
        if let Some(vm) = config.kind.persistent_vm() {
            let views = rows.pods.values().map(|handle| Arc::clone(&handle.view.borrow()));
            if let Some(view) = views.into_iter().find(|view| holds_vm(&view.pod, vm)) {
                return Err(held(vm, &view));
            }
            // The VM existed a moment ago, but may have been deleted since.
            self.services
                .vms
                .check_unlocked(vm)
                .and_then(|()| self.services.vms.get(vm))
                .map_err(at("run the machine"))?;
        }
        let (id, seed) = loop {
            let bytes = new_id();
            let id = PodId::from_bytes(bytes);
            // The run directory is named after the id's prefix.
            if !rows.pods.keys().any(|known| known.short() == id.short()) {
                let [.., a, b, c, d] = bytes;
                break (id, u32::from_be_bytes([a, b, c, d]));
            }
        };
        let user = if has_user { rows.users.assign(seed)? } else { None };
        let record = PodRecord {
            id: id.clone(),
            config: Arc::new(config),
            handler,
            state: state::PodState::Booting,
            created_at: unix_nanos(),
            was_ready: false,
            applies_profiles: true,
            ips: Vec::new(),
            kernel_release: String::new(),
            failure: String::new(),
            left: Vec::new(),
            timeline: Vec::new(),
            ending: Vec::new(),
            machine: None,
            resources: base.as_ref().and_then(|base| base.resources.clone()),
            user,
            process: None,
            restored: base.as_ref().map(|base| base.restored.clone()),
        };
        rows.names.insert(record.config.name.clone(), id.clone());
        let (actor, inbox, view) =
            actor::new(Arc::clone(&self.services), Arc::clone(&self.table), record, Vec::new(), Announced::default());
        rows.pods.insert(id.clone(), Handle { inbox, view });
        self.services.events.notify_change();
        tokio::spawn(actor.run(Begin::New(engine, base, answer)));
        Ok((id, None))
    }

    /// Stops a pod. A pod that does not exist counts as stopped.
    pub async fn stop_pod(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find(id) {
            Ok((_, handle)) => {
                let stopped = self.table.ask(&handle, Message::Stop).await.or_else(ignore_not_found);
                if let Some(span) = RequestSpan::current() {
                    span.add_steps(TracedWork::PodEnd, &handle.view.borrow().pod.ending);
                }
                stopped
            }
            Err(error) => ignore_not_found(error),
        }
    }

    /// Stops and removes a pod. A pod that does not exist counts as removed.
    pub async fn remove_pod(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find(id) {
            Ok((_, handle)) => self.table.ask(&handle, Message::Remove).await.or_else(ignore_not_found),
            Err(error) => ignore_not_found(error),
        }
    }

    /// Creates a container from an image in the store; `volumes` are the images of its volumes, in their order. It continues if the pod
    /// has a waiting container of its name.
    pub async fn create(
        &self,
        pod: &str,
        config: ContainerConfig,
        image: ContainerImage,
        volumes: Vec<ContainerImage>,
    ) -> Result<ContainerId, PodRestoreError> {
        let (_, handle) = self.table.find(pod)?;
        let view = Arc::clone(&handle.view.borrow());
        let continuation = match view.pod.restored.as_ref().filter(|restored| !restored.waiting.is_empty()) {
            Some(restored) => {
                let (config, image, volumes) = (config.clone(), image.clone(), volumes.clone());
                restoring::plan_container(&self.services, restored, ContainerToRestore { config, image, volumes })
                    .await?
            }
            None => None,
        };
        let (config, span) = (Box::new(config), RequestSpan::current());
        let create = |answer| Message::Create { continuation, config, image, volumes, span, answer };
        Ok(self.table.ask(&handle, create).await?)
    }

    /// Starts a container. A running container counts as started.
    pub async fn start(&self, id: &str) -> Result<(), LifecycleError> {
        let (id, handle, _) = self.table.find_container(id)?;
        self.table.ask(&handle, |answer| Message::Start(id, RequestSpan::current(), answer)).await
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
            Ok((id, handle, _)) => self
                .table
                .ask(&handle, |answer| Message::StopContainer(id, grace, answer))
                .await
                .or_else(ignore_not_found),
            Err(error) => ignore_not_found(error),
        }
    }

    /// Stops and removes a container. A container that does not exist counts as removed.
    pub async fn remove(&self, id: &str) -> Result<(), LifecycleError> {
        match self.table.find_container(id) {
            Ok((id, handle, _)) => {
                self.table.ask(&handle, |answer| Message::RemoveContainer(id, answer)).await.or_else(ignore_not_found)
            }
            Err(error) => ignore_not_found(error),
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
        container::exec::exec(&self.services, client, &id, args, limit).await
    }

    /// Opens the log file of a running container again by its name; the pod process continues in it.
    pub async fn reopen_log(&self, id: &str) -> Result<(), LifecycleError> {
        let Running { id, client, log, .. } = self.running(id)?;
        match log {
            Some(log) => log.open_and_send(&self.services, &client, &id).await,
            None => Ok(()),
        }
    }

    /// Stores the node's pod CIDRs.
    pub async fn set_pod_cidrs(&self, cidrs: Vec<IpNet>) -> Result<(), LifecycleError> {
        let text: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
        let change = Change::Setting(recover::POD_CIDRS, text.join(","));
        self.services.store.commit(vec![change]).await.map_err(at("record the pod CIDR"))?;
        *self.services.cidrs.write().unwrap_or_else(PoisonError::into_inner) = cidrs;
        Ok(())
    }
}
