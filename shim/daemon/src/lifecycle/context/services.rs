//! Defines what the lifecycle needs of the node besides the image store, pod processes and networks, as two narrow traits, and
//! implements them. All pods share the implementations.

use super::boot_files::{BootFileError, BootFiles};
use crate::systemd::{Scope, ScopeError};
use nacelle_base::task::run_blocking_or_panic;
use nacelle_base::{Classify, PodId};
use nacelle_model::process::PodProcess;
use nacelle_net::{Attachment, CniError, KnownPods, NetError, NodeNetworks, PodRef};
use nacelle_pod::MemoryPolicy;
use nacelle_pod::affinity::{self, AffinityError};
use nacelle_pod::client::{self, ClientError, PodClient};
use nacelle_pod::record::SavedPodState;
use nacelle_pod::share::{self, VolumeTarget, VolumeToMount, VolumesError};
use nacelle_pod::spec::PodSpec;
use nacelle_pod::template::TemplateSpec;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

/// Records a process that has been spawned and has not begun its work.
pub type Admit = Box<dyn FnOnce(PodProcess) -> Admitted + Send>;
/// The result of the record; an error prevents the process from beginning.
pub type Admitted = Pin<Box<dyn Future<Output = Result<(), ClientError>> + Send>>;

/// Manages the pod processes. Each has a run directory.
#[tonic::async_trait]
pub trait Pods: Send + Sync + 'static {
    /// Spawns the process of this directory, which begins after `admit` has succeeded. On failure no process is left. Must be
    /// awaited to its end.
    async fn spawn(&self, dir: &Path, spec: &PodSpec, admit: Admit) -> Result<PodClient, ClientError>;

    /// Checks the files from which a VM is about to start.
    async fn check_files(&self, _files: BootFiles) -> Result<(), BootFileError> {
        Ok(())
    }

    /// Runs the process that builds a template in `dir`, an empty directory, and waits for its end. If the future is dropped, no process
    /// is left.
    async fn build_template(&self, dir: &Path, spec: &TemplateSpec, limit: Duration) -> Result<(), ClientError>;

    /// Keeps the controllers of kubelet's pod cgroup enabled although the pod's process will not be in `_group` below it, so that
    /// the limits of that cgroup stay in force.
    async fn keep_controllers(&self, _group: &Path) -> Result<(), ClientError> {
        Ok(())
    }

    /// Connects to the process that serves this directory; fails with `ClientError::NotRunning` if there is none.
    async fn connect(&self, dir: &Path) -> Result<PodClient, ClientError> {
        client::connect(dir).await
    }

    /// Mounts volumes of the node for a container of the pod that this directory's process serves, all of them or none.
    async fn attach(
        &self,
        dir: &Path,
        process: VolumeTarget,
        container: &str,
        volumes: Vec<VolumeToMount>,
    ) -> Result<(), VolumesError> {
        share::attach(dir, process, container, volumes).await
    }

    /// Unmounts a container's volumes of the node. It can be repeated, and it succeeds for a pod that has ended.
    async fn detach(&self, dir: &Path, process: VolumeTarget, container: &str) -> Result<(), VolumesError> {
        share::detach(dir, process, container).await
    }

    /// Confines the VM to these CPUs of the node (empty: all CPUs). `pinned` is the number of vCPUs that are each pinned to a CPU
    /// of their own.
    async fn confine(&self, dir: &Path, processors: BTreeSet<u32>, pinned: Option<u32>) -> Result<(), AffinityError> {
        affinity::set_pod_affinity(dir, processors, pinned).await
    }

    /// Sets what the pod process and the VM may keep in swap, what of their memory is protected from reclaim, and how early the
    /// node's OOM killer ends them.
    async fn set_memory_policy(&self, group: &Path, policy: MemoryPolicy) -> Result<(), ClientError>;

    /// Returns whether the node's kernel has killed one of the pod's processes for lack of memory.
    async fn out_of_memory(&self, dir: &Path) -> bool {
        client::was_oom_killed(dir).await
    }

    /// Ends what is left of the process, which the store knows as `stored`, and returns its last record. It can be repeated.
    async fn clean_up(&self, dir: &Path, stored: Option<&PodProcess>) -> Result<Option<SavedPodState>, ClientError> {
        client::clean_up(dir, stored).await
    }

    /// Ends the processes of pods whose run directory would be in `pods` and is not one of `known`, also if it is lost.
    async fn end_unrecorded(&self, pods: &Path, known: &BTreeSet<PathBuf>) {
        client::end_unrecorded(pods, known).await;
    }
}

/// Manages the networks of pods. Calls for the same pod never overlap.
#[tonic::async_trait]
pub trait Networks: Send + Sync + 'static {
    /// Creates the pod's network namespace and returns the path of its file.
    async fn create_netns(&self, id: &PodId) -> Result<PathBuf, NetError>;
    /// Attaches the pod's networks.
    async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError>;
    /// Connects the taps of the VM with the interfaces of the plugins; each pair is (tap, interface).
    async fn connect_taps(&self, id: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError>;
    /// Detaches the pod and removes its namespace. A plugin that fails within `limit` does not block the rest: its DEL is then
    /// owed, the result is the reason, and `retry_owed_deletes` retries it. It can be repeated, and it succeeds for a pod without network
    /// and namespace.
    async fn release(&self, id: &PodId, limit: Duration) -> Result<Option<CniError>, NetError>;
    /// Retries the owed DELs that are due, each for at most `limit`.
    async fn retry_owed_deletes(&self, limit: Duration);
    /// Returns the number of pods that are gone and whose DEL has not succeeded, as far as this daemon knows. Does not block.
    fn count_owed_deletes(&self) -> usize {
        0
    }
    /// Returns the error because of which pods could not get a network now, if there is one.
    async fn status(&self) -> Result<(), NetError>;
    /// Removes everything of pods that are not known; each step takes at most `limit`. Pods may come and go meanwhile.
    async fn gc(&self, known: &KnownPods<'_>, limit: Duration) -> Result<(), NetError>;
}

/// The real pod processes.
pub struct Processes {
    /// The path of their binary.
    pub exe: PathBuf,
}

#[tonic::async_trait]
impl Pods for Processes {
    async fn spawn(&self, dir: &Path, spec: &PodSpec, admit: Admit) -> Result<PodClient, ClientError> {
        let scope = spec.jail.as_ref().and_then(|jail| Scope::of(jail.cgroup.as_deref()?));
        client::spawn(&self.exe, dir, spec, |started| async move {
            let pid = started.identity.pid;
            admit(started).await?;
            match (scope, u32::try_from(pid)) {
                (Some(scope), Ok(pid)) => scope.start(pid).await.map_err(|error| of_group(&scope, error)),
                _ => Ok(()),
            }
        })
        .await
    }

    async fn check_files(&self, files: BootFiles) -> Result<(), BootFileError> {
        run_blocking_or_panic(move || files.check()).await
    }

    async fn build_template(&self, dir: &Path, spec: &TemplateSpec, limit: Duration) -> Result<(), ClientError> {
        client::build_template(&self.exe, dir, spec, limit).await
    }

    async fn keep_controllers(&self, group: &Path) -> Result<(), ClientError> {
        let Some(scope) = Scope::of(group) else { return Ok(()) };
        scope.keep_slice().await.map_err(|error| of_group(&scope, error))
    }

    async fn set_memory_policy(&self, group: &Path, policy: MemoryPolicy) -> Result<(), ClientError> {
        let files = match Scope::of(group) {
            // systemd writes these files of its units itself, at any time.
            Some(scope) if nacelle_pod::is_unified() => {
                scope.set_memory_policy(policy).await.map_err(|error| of_group(&scope, error))
            }
            _ => {
                let group = group.to_owned();
                let write = move || nacelle_pod::set_memory_policy(&group, policy);
                run_blocking_or_panic(write).await.map_err(ClientError::from)
            }
        };
        let group = group.to_owned();
        let score = run_blocking_or_panic(move || nacelle_pod::set_oom_score(&group, policy.oom_score_adj)).await;
        files.and(score.map_err(ClientError::from))
    }
}

fn of_group(scope: &Scope, error: ScopeError) -> ClientError {
    ClientError::Cgroup { cgroup: scope.group.clone(), kind: error.kind(), source: Box::new(error) }
}

#[tonic::async_trait]
impl Networks for NodeNetworks {
    async fn create_netns(&self, id: &PodId) -> Result<PathBuf, NetError> {
        NodeNetworks::create_netns(self, id).await?;
        Ok(self.netns_path(id))
    }

    async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError> {
        NodeNetworks::setup(self, pod).await
    }

    async fn connect_taps(&self, id: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError> {
        NodeNetworks::connect_taps(self, id, pairs).await
    }

    async fn release(&self, id: &PodId, limit: Duration) -> Result<Option<CniError>, NetError> {
        NodeNetworks::release(self, id, limit).await
    }

    async fn retry_owed_deletes(&self, limit: Duration) {
        NodeNetworks::retry_owed_deletes(self, limit).await;
    }

    fn count_owed_deletes(&self) -> usize {
        NodeNetworks::count_owed_deletes(self)
    }

    async fn status(&self) -> Result<(), NetError> {
        NodeNetworks::status(self).await
    }

    async fn gc(&self, known: &KnownPods<'_>, limit: Duration) -> Result<(), NetError> {
        NodeNetworks::gc(self, known, limit).await
    }
}
