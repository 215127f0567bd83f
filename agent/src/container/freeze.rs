//! Freezes all containers of a pod at a moment when no operation changes them, and gets their output to the host before the VM is saved.
//!
//! Only the cgroup above the containers is frozen. A container that was frozen on its own is therefore still frozen when this cgroup is
//! thawed.

use nacelle_proto::agent::HoldResponse;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard};
use tokio::time::Instant;

use super::hold::HoldError;
use super::pod::AgentPod;
use super::record::GuestContainer;
use crate::cgroup;

/// The time in which the operations that run must end.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(10);
/// The time in which all processes must be frozen.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time for which frozen containers wait until their output has been read.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two looks at the output.
const DRAIN_INTERVAL: Duration = Duration::from_millis(1);
/// The longest time for which frozen containers wait until the dirty pages of the scratch disk are written.
const SYNC_TIMEOUT: Duration = Duration::from_secs(2);

/// Until this is dropped, no process of a container runs and no operation changes the pod.
#[derive(Debug)]
pub(super) struct FrozenPod {
    // Declared first: the containers are thawed before an operation begins.
    _containers: cgroup::FrozenCgroups,
    _operations: OwnedRwLockWriteGuard<()>,
}

impl AgentPod {
    /// Waits until the pod is not held, and delays a later hold until the guard is dropped. An operation must not call this twice: a hold that
    /// waits in between would block it forever.
    pub async fn begin_operation(&self) -> OwnedRwLockReadGuard<()> {
        Arc::clone(&self.operations).read_owned().await
    }

    /// Freezes the containers when no operation changes the pod. Output that is not read within `DRAIN_TIMEOUT`, and pages that are not
    /// written, are no failure: a saved VM has both in its memory. Undoes everything if it fails or is dropped.
    pub(super) async fn freeze(self: Arc<Self>) -> Result<(HoldResponse, FrozenPod), HoldError> {
        let operations = tokio::time::timeout(OPERATION_TIMEOUT, Arc::clone(&self.operations).write_owned()).await;
        let operations = operations.map_err(|_late| HoldError::Operation { seconds: OPERATION_TIMEOUT.as_secs() })?;
        if cgroup::is_populated(&cgroup::guest_shells_path()) {
            return Err(HoldError::GuestShell);
        }
        let frozen = cgroup::FrozenCgroups::freeze(vec![cgroup::pod_path()], FREEZE_TIMEOUT).await;
        let containers = frozen.map_err(|source| match source.kind() {
            io::ErrorKind::TimedOut => HoldError::FreezeTimeout { seconds: FREEZE_TIMEOUT.as_secs() },
            _ => HoldError::Freeze { path: cgroup::pod_path(), source },
        })?;
        drain_output(&self.running_containers()).await;
        self.try_sync_scratch().await;
        // A frozen container may have been killed meanwhile.
        let running = self.running_containers();
        let unread = running.iter().filter(|container| container.init.stdio.count_unread_output() > 0);
        let response = HoldResponse {
            undrained: unread.map(|container| self.ids.on_host(container.id.clone())).collect(),
            running: running.iter().map(|container| self.ids.on_host(container.id.clone())).collect(),
        };
        Ok((response, FrozenPod { _containers: containers, _operations: operations }))
    }

    /// Returns the containers whose program was started and has not ended, in the order of their ids.
    fn running_containers(&self) -> Vec<Arc<GuestContainer>> {
        let state = self.lock_state();
        let all = state.containers.values();
        let mut running: Vec<_> = all.filter(|container| container.is_running()).cloned().collect();
        running.sort_by(|a, b| a.id.cmp(&b.id));
        running
    }

    /// Writes the dirty pages of the scratch disk. Logs a failure.
    async fn try_sync_scratch(self: &Arc<Self>) {
        let pod = Arc::clone(self);
        let sync = tokio::task::spawn_blocking(move || pod.disks.sync_scratch());
        match tokio::time::timeout(SYNC_TIMEOUT, sync).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(%error, "cannot write the scratch disk while the pod is held"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot write the scratch disk while the pod is held"),
            Err(_late) => tracing::info!("the scratch disk still has dirty pages while the pod is held"),
        }
    }
}

/// Waits until a connection has taken all output of the first processes, at most `DRAIN_TIMEOUT`. Execs are not waited for: their clients
/// read as slowly as they like.
async fn drain_output(containers: &[Arc<GuestContainer>]) {
    let deadline = Instant::now() + DRAIN_TIMEOUT;
    while containers.iter().any(|container| container.init.stdio.count_unread_output() > 0) && Instant::now() < deadline
    {
        tokio::time::sleep(DRAIN_INTERVAL).await;
    }
}
