//! Owns: what the lifecycle needs of the node besides the image store: pod processes and networks, as two narrow
//! traits, and the real ones behind them.
//! Threads: implementations are shared by all pods.

use crate::systemd::{Scope, ScopeError};
use nacelle_base::{Classify, PodId};
use nacelle_model::process::PodProcess;
use nacelle_net::{Attachment, CniError, NetError, Network, PodRef};
use nacelle_pod::client::{self, ClientError, PodClient};
use nacelle_pod::processors::{self, ProcessorsError};
use nacelle_pod::record::PodRecord;
use nacelle_pod::share::{self, Taker, Volume, VolumesError};
use nacelle_pod::spec::PodSpec;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

/// Records a process that has been started and has not begun.
pub type Admit = Box<dyn FnOnce(PodProcess) -> Admitted + Send>;
/// Whether the process may begin.
pub type Admitted = Pin<Box<dyn Future<Output = Result<(), ClientError>> + Send>>;

/// Pod processes. Each lives in its folder.
#[tonic::async_trait]
pub trait Pods: Send + Sync + 'static {
    /// Starts the process of this folder, which begins when `admit` has answered; on failure nothing runs. Must be awaited to its end.
    async fn spawn(&self, dir: &Path, spec: &PodSpec, admit: Admit) -> Result<PodClient, ClientError>;

    /// A pod's process will not be in this group, which lies in the one that kubelet has made for the pod: what that one can
    /// limit shall stay as if it were.
    async fn keep_controllers(&self, _group: &Path) -> Result<(), ClientError> {
        Ok(())
    }

    /// Finds the process that serves this folder; `ClientError::Gone` if there is none.
    async fn connect(&self, dir: &Path) -> Result<PodClient, ClientError> {
        client::connect(dir).await
    }

    /// Mounts volumes of the node for a container of the pod that this folder's process serves. All of them or none.
    async fn attach(
        &self,
        dir: &Path,
        taker: Taker,
        container: &str,
        volumes: Vec<Volume>,
    ) -> Result<(), VolumesError> {
        share::attach(dir, taker, container, volumes).await
    }

    /// Takes a container's volumes of the node back. Can be said twice, and of a pod that has ended.
    async fn detach(&self, dir: &Path, taker: Taker, container: &str) -> Result<(), VolumesError> {
        share::detach(dir, taker, container).await
    }

    /// Has the machine run on these processors of the node only; none: on all. `pinned`: each of its so many processors has one of them
    /// to itself.
    async fn confine(&self, dir: &Path, processors: BTreeSet<u32>, pinned: Option<u32>) -> Result<(), ProcessorsError> {
        processors::confine(dir, processors, pinned).await
    }

    /// Whether the node's kernel has killed one of the pod's processes because memory ran out.
    async fn out_of_memory(&self, dir: &Path) -> bool {
        client::out_of_memory(dir).await
    }

    /// Ends what is left of the process, which the store knows as `stored`, and returns what it last recorded. Can be said twice.
    async fn clean_up(&self, dir: &Path, stored: Option<&PodProcess>) -> Result<Option<PodRecord>, ClientError> {
        client::clean_up(dir, stored).await
    }
}

/// Networks of pods. Calls for one pod come one after the other.
#[tonic::async_trait]
pub trait Networks: Send + Sync + 'static {
    /// Makes the pod's namespace; returns the file that names it.
    async fn create(&self, id: &PodId) -> Result<PathBuf, NetError>;
    /// Attaches the pod.
    async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError>;
    /// Joins the machine's taps to the interfaces that the plugins made; pairs of names, the tap first.
    async fn join(&self, id: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError>;
    /// Takes attachment and namespace away. Plugins that fail within `limit` do not keep the rest: their DEL is owed then, the
    /// answer is why, and `settle` tries again. Can be said twice, and of a pod that has neither.
    async fn release(&self, id: &PodId, limit: Duration) -> Result<Option<CniError>, NetError>;
    /// Tries owed DELs again, each for at most `limit`.
    async fn settle(&self, limit: Duration);
    /// Why pods could not get a network now, if they could not.
    async fn status(&self) -> Result<(), NetError>;
    /// Takes away what belongs to no pod in `keep`; one step of it takes at most `limit`.
    async fn gc(&self, keep: &BTreeSet<PodId>, limit: Duration) -> Result<(), NetError>;
}

/// Real ones.
pub struct Processes {
    /// Their program.
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

    async fn keep_controllers(&self, group: &Path) -> Result<(), ClientError> {
        let Some(scope) = Scope::of(group) else { return Ok(()) };
        scope.keep_slice().await.map_err(|error| of_group(&scope, error))
    }
}

fn of_group(scope: &Scope, error: ScopeError) -> ClientError {
    ClientError::Group { group: scope.group.clone(), kind: error.kind(), source: Box::new(error) }
}

#[tonic::async_trait]
impl Networks for Network {
    async fn create(&self, id: &PodId) -> Result<PathBuf, NetError> {
        self.create_netns(id).await?;
        Ok(self.netns_path(id))
    }

    async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError> {
        Network::setup(self, pod).await
    }

    async fn join(&self, id: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError> {
        self.join_taps(id, pairs).await
    }

    async fn release(&self, id: &PodId, limit: Duration) -> Result<Option<CniError>, NetError> {
        Network::release(self, id, limit).await
    }

    async fn settle(&self, limit: Duration) {
        Network::settle(self, limit).await;
    }

    async fn status(&self) -> Result<(), NetError> {
        Network::status(self).await
    }

    async fn gc(&self, keep: &BTreeSet<PodId>, limit: Duration) -> Result<(), NetError> {
        Network::gc(self, keep, limit).await
    }
}
