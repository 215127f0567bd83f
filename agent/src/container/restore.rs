//! Makes a VM that was restored while it was held the VM of another pod.

use nacelle_base::{Classify, FailureKind};
use nacelle_proto::agent::{RestoreRequest, RestoredContainer};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::error::AgentError;
use super::pod::{AgentPod, check_id};
use super::record::GuestContainer;
use crate::boot::BootError;
use crate::boot::restored::{PodIdentity, adopt_identity};
use crate::cgroup::FrozenCgroups;

/// The time in which a container of a frozen pod must count as frozen by itself.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(5);

/// Reasons a VM does not become that of another pod.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum AdoptionError {
    #[error("cannot restore the pod: its VM was not restored while it was held; send Renew first")]
    NotRestored,
    #[error("cannot restore the pod: the request names container {id} twice")]
    Twice { id: String },
    #[error("cannot restore the pod: container {id} did not run when it was saved")]
    NotRunning { id: String },
    #[error("cannot give the VM the identity of another pod")]
    Identity { source: BootError },
    #[error("cannot keep container {id} frozen until it is started")]
    Freeze { id: String, source: io::Error },
}

impl Classify for AdoptionError {
    fn kind(&self) -> FailureKind {
        match self {
            AdoptionError::Twice { .. } => FailureKind::Invalid,
            AdoptionError::NotRestored => FailureKind::Conflict,
            AdoptionError::NotRunning { .. } => FailureKind::NotFound,
            AdoptionError::Identity { .. } | AdoptionError::Freeze { .. } => FailureKind::Internal,
        }
    }
}

impl AgentPod {
    /// Gives the VM the identity of another pod and its containers their new ids, removes all others, and ends the hold. Each container
    /// stays frozen until it is started. A repeated request succeeds. After a failure the pod stays held.
    pub async fn restore(self: Arc<Self>, request: RestoreRequest) -> Result<(), AgentError> {
        let mut last = self.restored.lock().await;
        if !self.holds.is_restored() {
            let is_done = last.as_ref() == Some(&request);
            return if is_done { Ok(()) } else { Err(AdoptionError::NotRestored.into()) };
        }
        let ids = self.check_restored(&request.containers)?;
        let (identity, request) = (Arc::new(request.clone()), request);
        let adopted = tokio::task::spawn_blocking(move || {
            let RestoreRequest { hostname, interfaces, routes, dns, containers: _ } = &*identity;
            adopt_identity(PodIdentity { hostname, interfaces, routes, dns: dns.as_ref() })
        });
        adopted.await?.map_err(|source| AdoptionError::Identity { source })?;
        let kept: BTreeSet<&String> = ids.values().collect();
        for id in self.container_ids().into_iter().filter(|id| !kept.contains(id)) {
            Arc::clone(&self).remove_container(id).await?;
        }
        for id in ids.values() {
            let container = self.find_container(id)?;
            self.suspend(&container).await?;
        }
        self.ids.replace(ids);
        *last = Some(request);
        self.holds.release_restored().await;
        Ok(())
    }

    /// Checks the containers of a request. Returns their ids in the guest by their new ids.
    fn check_restored(&self, containers: &[RestoredContainer]) -> Result<BTreeMap<String, String>, AgentError> {
        let (mut ids, mut saved) = (BTreeMap::new(), BTreeSet::new());
        for RestoredContainer { saved_id, id } in containers {
            check_id(id)?;
            let in_guest = self.ids.in_guest(saved_id.clone());
            let found = self.find_container(&in_guest).ok().filter(|container| container.is_running());
            found.ok_or_else(|| AdoptionError::NotRunning { id: saved_id.clone() })?;
            if !saved.insert(in_guest.clone()) {
                return Err(AdoptionError::Twice { id: saved_id.clone() }.into());
            }
            if ids.insert(id.clone(), in_guest).is_some() {
                return Err(AdoptionError::Twice { id: id.clone() }.into());
            }
        }
        Ok(ids)
    }

    /// Freezes a container by its own cgroup. Its execs have lost their clients.
    async fn suspend(&self, container: &GuestContainer) -> Result<(), AgentError> {
        let execs: Vec<String> = container.lock_execs().keys().cloned().collect();
        for exec_id in execs {
            self.abandon_exec(&container.id, &exec_id)?;
        }
        let frozen = FrozenCgroups::freeze(vec![container.cgroup.clone()], FREEZE_TIMEOUT).await;
        let frozen = frozen.map_err(|source| AdoptionError::Freeze { id: container.id.clone(), source })?;
        container.suspend(frozen);
        Ok(())
    }
}
