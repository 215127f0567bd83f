//! Defines what the agent keeps of a container that exists, and of the execs in it.

use libcontainer::oci_spec::runtime::{Capability, LinuxSeccomp, Process as SpecProcess};
use nacelle_proto::common::CreateContainerResponse;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{OnceCell, Semaphore};

use super::process::ContainerProcess;
use super::spec::PidNamespace;
use crate::cgroup::FrozenCgroups;

/// A container that was created and not yet removed.
#[derive(Debug)]
pub struct GuestContainer {
    /// The id with which it was created, which its cgroup and its directories have.
    pub(super) id: String,
    /// The adjusted `process` of the specification, from which execs are derived.
    pub(super) process: SpecProcess,
    pub(super) seccomp: Option<LinuxSeccomp>,
    /// Whether the container has a cgroup namespace of its own.
    pub(super) has_cgroup_namespace: bool,
    pub(super) pid_namespace: PidNamespace,
    pub(super) cgroup: PathBuf,
    /// The mount point of the container's image.
    pub(super) image: PathBuf,
    /// The answer to the request that created the container, repeated for a repeated request.
    pub(super) created: CreateContainerResponse,
    pub(super) init: Arc<ContainerProcess>,
    pub(super) started: AtomicBool,
    /// Its frozen cgroup, from the restore of its VM until it is started again.
    pub(super) suspended: Mutex<Option<FrozenCgroups>>,
    pub(super) execs: Mutex<Execs>,
    /// A permit for each exec whose streams may be read without a client.
    pub(super) abandoned_execs: Arc<Semaphore>,
}

/// The execs of a container by their ids.
pub(super) type Execs = HashMap<String, Arc<ExecEntry>>;

/// An exec, from the first request that names it.
#[derive(Debug)]
pub(super) struct ExecEntry {
    /// Grows with each entry of the pod, so that the smallest is the oldest.
    pub sequence: u64,
    /// The process, once the zygote has made it.
    pub process: OnceCell<Arc<ContainerProcess>>,
    /// Whether SIGKILL was requested, perhaps before the process was made.
    pub killed: AtomicBool,
    /// Whether the exec runs without a client.
    pub abandoned: AtomicBool,
}

impl ExecEntry {
    /// An exec without a process.
    pub fn new(sequence: u64) -> ExecEntry {
        ExecEntry {
            sequence,
            process: OnceCell::new(),
            killed: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Whether no process of the exec runs or will run.
    pub fn has_ended(&self) -> bool {
        self.process.get().map_or(self.killed.load(Ordering::SeqCst), |process| process.exit().is_some())
    }
}

impl GuestContainer {
    pub(super) fn lock_execs(&self) -> MutexGuard<'_, Execs> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_suspended(&self) -> MutexGuard<'_, Option<FrozenCgroups>> {
        self.suspended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the container's processes frozen until it is started.
    pub(super) fn suspend(&self, frozen: FrozenCgroups) {
        *self.lock_suspended() = Some(frozen);
    }

    /// Lets the processes of a suspended container run.
    pub(super) fn resume(&self) {
        drop(self.lock_suspended().take());
    }

    /// Whether the container waits for its start since its VM was restored.
    pub(super) fn is_suspended(&self) -> bool {
        self.lock_suspended().is_some()
    }

    /// Whether its program was started, has not ended, and is not suspended.
    pub(super) fn is_running(&self) -> bool {
        self.started.load(Ordering::Acquire) && self.init.exit().is_none() && !self.is_suspended()
    }

    /// Whether the container's processes are in this PID namespace.
    pub(super) fn shares_pid_namespace(&self, namespace: &PidNamespace) -> bool {
        match namespace {
            PidNamespace::Of(pid) if self.init.pid == *pid => true,
            PidNamespace::Own => false,
            _ => self.pid_namespace == *namespace,
        }
    }

    /// Returns the PID namespace of the container's processes in the form in which another container joins it.
    pub(super) fn joinable_pid_namespace(&self) -> PidNamespace {
        match &self.pid_namespace {
            PidNamespace::Own => PidNamespace::Of(self.init.pid),
            shared => shared.clone(),
        }
    }

    /// Whether the container's processes have the right to trace (ptrace(2)) all processes that they see.
    pub(super) fn has_trace_rights(&self) -> bool {
        let bounding = self.process.capabilities().as_ref().and_then(|sets| sets.bounding().as_ref());
        bounding.is_none_or(|set| set.contains(&Capability::SysPtrace))
    }

    /// Whether the container's processes run and have that right. Suspended ones must not be frozen, and then thawed, by others.
    pub(super) fn may_trace(&self) -> bool {
        self.init.exit().is_none() && !self.is_suspended() && self.has_trace_rights()
    }
}
