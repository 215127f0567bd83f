//! Keeps containers with CAP_SYS_PTRACE from tracing the first process of a new container while that has rights of the agent.
//!
//! Such containers are frozen until the new process has the container's root and rights. Only containers in the same PID
//! namespace can see the process.

use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::{RwLockReadGuard, RwLockWriteGuard};

use super::error::AgentError;
use super::pod::AgentPod;
use super::spec::PidNamespace;
use crate::cgroup;

/// The longest time for freezing the containers that may trace.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);

/// While it exists, no process that may trace the new process runs.
pub(super) struct TraceGuard<'a> {
    // Declared first: the containers are thawed before the next creation can freeze them.
    _frozen: Option<cgroup::FrozenCgroups>,
    _lock: TraceLock<'a>,
}

/// Containers are created concurrently only where no container that sees them may trace.
#[expect(dead_code, reason = "the guards are held, not read")]
enum TraceLock<'a> {
    Shared(RwLockReadGuard<'a, ()>),
    Exclusive(RwLockWriteGuard<'a, ()>),
}

impl AgentPod {
    /// Returns the cgroups of the containers that may trace the processes of this PID namespace.
    pub(super) fn find_tracers(&self, namespace: &PidNamespace) -> Vec<PathBuf> {
        let state = self.lock_state();
        let tracers = state
            .containers
            .values()
            .filter(|container| container.shares_pid_namespace(namespace) && container.may_trace());
        tracers.map(|container| container.cgroup.clone()).collect()
    }

    /// Freezes the containers that may trace the processes of this PID namespace. `None` if the namespace needs no guard.
    pub(super) async fn freeze_tracers(
        &self,
        id: &str,
        namespace: &PidNamespace,
    ) -> Result<Option<TraceGuard<'_>>, AgentError> {
        if matches!(namespace, PidNamespace::Own | PidNamespace::Node) {
            return Ok(None);
        }
        let shared = self.trace_lock.read().await;
        if self.find_tracers(namespace).is_empty() {
            return Ok(Some(TraceGuard { _lock: TraceLock::Shared(shared), _frozen: None }));
        }
        drop(shared);
        let lock = TraceLock::Exclusive(self.trace_lock.write().await);
        let cgroups = self.find_tracers(namespace);
        let what = "freeze the containers with CAP_SYS_PTRACE that would see the first process";
        let frozen = cgroup::FrozenCgroups::freeze(cgroups, FREEZE_TIMEOUT).await.map_err(AgentError::io(what, id))?;
        Ok(Some(TraceGuard { _lock: lock, _frozen: Some(frozen) }))
    }
}
