//! Holds what all containers of the pod share, and the tables of containers and processes.
//!
//! `Pod` is shared between tasks. Its tables are behind one lock, which is never held while waiting.

use nacelle_proto::agent::{ContainerState, RestoreRequest};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::OnceCell;

use super::error::AgentError;
use super::hold::HoldTable;
use super::host_ids::HostIds;
use super::process::ContainerProcess;
use super::record::GuestContainer;
use crate::copied_in::CopiedInVolumes;
use crate::empty_dirs::EmptyDirVolumes;
use crate::huge_pages::{HugePageLimits, HugePages};
use crate::image::GuestDisks;
use crate::sockets::GuestSockets;
use crate::stats::Layers;
use crate::userns::UserNs;
use crate::zygote::Zygote;

/// The tables of a pod.
#[derive(Default)]
pub(super) struct AgentPodState {
    pub containers: HashMap<String, Arc<GuestContainer>>,
    /// The lock of each container on which an operation runs or waits, by id.
    pub container_locks: HashMap<String, Arc<tokio::sync::Mutex<()>>>,
    /// Running processes by their PIDs.
    pub processes: HashMap<i32, Arc<ContainerProcess>>,
    /// Wait statuses of processes that ended before they were registered, by their PIDs. Empty unless `spawning`.
    pub unclaimed_exits: HashMap<i32, i32>,
    /// The number of `SpawnGuard`s that exist.
    pub spawning: usize,
    /// The number of calls of `exec_entry`.
    pub exec_sequence: u64,
}

/// The pod that this agent runs.
pub struct AgentPod {
    pub(super) zygote: Zygote,
    /// The image, scratch and volume disks.
    pub disks: GuestDisks,
    /// Sizes of the containers' writable layers.
    pub layers: Arc<Layers>,
    /// Copied-in volumes (configMap, secret, projected, downwardAPI).
    pub volumes: CopiedInVolumes,
    /// emptyDir volumes in memory or on disks of the VM.
    pub empty_dirs: EmptyDirVolumes,
    /// Sockets of the node.
    pub sockets: GuestSockets,
    pub(super) huge_pages: HugePages,
    pub(super) shared_pid: bool,
    pub(super) node_pid: bool,
    pub(super) users: Option<UserNs>,
    /// The PID of the process that holds the shared PID namespace, once a container has needed it.
    pub(super) pause: OnceCell<i32>,
    /// Keeps a container with CAP_SYS_PTRACE from tracing a process that still has rights of the agent.
    ///
    /// Held for writing while a container is created that a frozen tracer would see, and while a container that may trace
    /// starts. Held for reading while an exec is made: its container must not be frozen then.
    pub(super) trace_lock: tokio::sync::RwLock<()>,
    /// Held for reading by each operation that changes the pod, and for writing while the pod is held.
    pub(super) operations: Arc<tokio::sync::RwLock<()>>,
    pub(super) holds: HoldTable,
    /// The last request by which the VM became that of another pod.
    pub(super) restored: tokio::sync::Mutex<Option<RestoreRequest>>,
    /// The ids by which the host knows the containers.
    pub ids: HostIds,
    state: Mutex<AgentPodState>,
}

impl AgentPod {
    /// A pod without containers. `shared_pid`: all containers share one PID namespace; `node_pid`: that of the node.
    /// `users`: the pod's user namespace; `None` if containers are in the agent's.
    pub fn new(
        zygote: Zygote,
        disks: GuestDisks,
        huge_pages: HugePages,
        shared_pid: bool,
        node_pid: bool,
        users: Option<UserNs>,
    ) -> Arc<AgentPod> {
        Arc::new(AgentPod {
            zygote,
            disks,
            layers: Arc::default(),
            volumes: CopiedInVolumes::default(),
            empty_dirs: EmptyDirVolumes::default(),
            sockets: GuestSockets::default(),
            huge_pages,
            shared_pid,
            node_pid,
            users,
            pause: OnceCell::new(),
            trace_lock: tokio::sync::RwLock::default(),
            operations: Arc::default(),
            holds: HoldTable::default(),
            restored: tokio::sync::Mutex::default(),
            ids: HostIds::default(),
            state: Mutex::default(),
        })
    }

    pub(super) fn lock_state(&self) -> MutexGuard<'_, AgentPodState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn find_container(&self, id: &str) -> Result<Arc<GuestContainer>, AgentError> {
        let container = self.lock_state().containers.get(id).cloned();
        container.ok_or_else(|| AgentError::NoContainer { id: id.to_owned() })
    }

    /// Returns the exec `exec_id` of a container, or with an empty `exec_id` the container's first process.
    pub fn find_process(&self, id: &str, exec_id: &str) -> Result<Arc<ContainerProcess>, AgentError> {
        let container = self.find_container(id)?;
        if exec_id.is_empty() {
            return Ok(Arc::clone(&container.init));
        }
        let found = container.lock_execs().get(exec_id).and_then(|entry| entry.process.get()).cloned();
        found.ok_or_else(|| AgentError::NoExec { id: id.to_owned(), exec_id: exec_id.to_owned() })
    }

    /// Returns the ids of all containers, in no order.
    pub(super) fn container_ids(&self) -> Vec<String> {
        self.lock_state().containers.keys().cloned().collect()
    }

    /// Returns the states of all containers, in no order.
    pub fn list_containers(&self) -> Vec<ContainerState> {
        let state = self.lock_state();
        let describe = |container: &Arc<GuestContainer>| ContainerState {
            id: container.id.clone(),
            started: container.started.load(Ordering::Acquire),
            exit: container.init.exit(),
        };
        state.containers.values().map(describe).collect()
    }

    /// Makes the kernel reserve the huge pages that these limits of a container allow. Returns the limits that undo the change.
    ///
    /// Containers that have ended lose their huge pages first, so that they keep them no longer than until the next one needs
    /// some. Blocks.
    pub(super) fn reserve_huge_pages(&self, id: &str, limits: &HugePageLimits) -> Result<HugePageLimits, AgentError> {
        if limits.is_empty() {
            return Ok(HugePageLimits::new());
        }
        let failed = |source| AgentError::HugePages { id: id.to_owned(), source };
        for ended in self.list_containers().into_iter().filter(|container| container.exit.is_some()) {
            self.huge_pages.release(&ended.id).map_err(failed)?;
        }
        self.huge_pages.set_limits(id, limits).map_err(failed)
    }
}

/// Checks an id of a container or an exec, which becomes the name of directories and of a cgroup.
pub(super) fn check_id(id: &str) -> Result<(), AgentError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if (1..=128).contains(&id.len()) && !id.starts_with('.') && id.chars().all(plain) {
        Ok(())
    } else {
        Err(AgentError::Id { id: id.chars().take(140).collect() })
    }
}
