//! Defines what this crate needs from the daemon: views of the machine pods, notifications of their changes, commands in their
//! containers, and locks on persistent VMs. The daemon implements [`PodRuntime`]; tests implement it with a fake.

#[cfg(test)]
pub(crate) mod testing;

use crate::vms::{VmLock, Vms};
use nacelle_base::{Classify, ContainerId, FailureKind, PodId};
use nacelle_model::pod::PodConfig;
use nacelle_model::record::{ContainerRecord, PodRecord, VmRecord};
use nacelle_model::state::{ContainerState, PodState};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;

/// A machine pod and its containers, as the daemon last published them.
#[derive(Clone, Debug)]
pub struct MachinePodView {
    /// The pod.
    pub pod: PodRecord,
    /// The pod's containers.
    pub containers: BTreeMap<ContainerId, ContainerRecord>,
}

impl MachinePodView {
    /// Returns the container that is the VM, if it runs.
    pub fn running_container(&self) -> Option<&ContainerRecord> {
        self.containers.values().find(|container| container.state == ContainerState::Running)
    }

    /// Returns the namespace and name under which clients address the VM: those of the persistent VM, otherwise the pod's.
    pub fn vm_name(&self) -> Option<(&str, &str)> {
        let config: &PodConfig = &self.pod.config;
        match config.kind.persistent_vm() {
            Some(id) => id.split_once('/'),
            None => Some((&config.name.namespace, &config.name.name)),
        }
    }

    /// Returns whether the pod holds this persistent VM.
    pub fn holds_vm(&self, vm: &str) -> bool {
        holds_vm(&self.pod, vm)
    }
}

/// Returns whether a pod holds this persistent VM. It does so until its VM is known to have stopped.
pub fn holds_vm(pod: &PodRecord, vm: &str) -> bool {
    pod.config.kind.persistent_vm() == Some(vm) && pod.state != PodState::Stopped
}

/// The result of a command that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// The exit code.
    pub exit_code: i32,
}

/// A running command with its output streams. Dropping `exit_code` kills the command.
pub struct ExecStreams {
    /// Standard output.
    pub stdout: UnixStream,
    /// Standard error.
    pub stderr: UnixStream,
    /// Completes with the exit code when the command ends.
    pub exit_code: Pin<Box<dyn Future<Output = Result<i32, PodRuntimeError>> + Send>>,
}

/// An error of the daemon's pod runtime. Its text and its causes are those of the original error.
#[derive(Debug)]
pub struct PodRuntimeError {
    kind: FailureKind,
    error: Box<dyn Error + Send + Sync>,
}

impl PodRuntimeError {
    /// Wraps the runtime's own error.
    pub fn new<E: Error + Classify + Send + Sync + 'static>(error: E) -> PodRuntimeError {
        PodRuntimeError { kind: error.kind(), error: Box::new(error) }
    }
}

impl fmt::Display for PodRuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for PodRuntimeError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl Classify for PodRuntimeError {
    fn kind(&self) -> FailureKind {
        self.kind
    }
}

/// The pods of the node, as this crate uses them.
#[tonic::async_trait]
pub trait PodRuntime: Send + Sync + 'static {
    /// Returns all machine pods.
    fn machine_pods(&self) -> Vec<MachinePodView>;

    /// Returns a receiver that is notified after each change of a pod or a container. It is closed when the daemon shuts down.
    fn changes(&self) -> watch::Receiver<()>;

    /// Returns the persistent VMs.
    fn vms(&self) -> &Vms;

    /// Returns the image store.
    fn images(&self) -> &nacelle_image::ImageStore;

    /// Returns the directory of the daemon's own files for this pod.
    fn pod_directory(&self, pod: &PodId) -> PathBuf;

    /// Returns whether the handler exists and its `allowed_annotations` contain this annotation.
    fn allows_annotation(&self, handler: &str, annotation: &str) -> bool;

    /// Locks a persistent VM that no pod holds. It does not change until the returned guard is dropped. `operation` is for the
    /// errors of other callers: "exported".
    fn lock_vm(&self, vm: &str, operation: &'static str) -> Result<(VmRecord, VmLock), PodRuntimeError>;

    /// Runs a command in a running container to its end.
    async fn exec(
        &self,
        container: &ContainerId,
        args: Vec<String>,
        timeout: Duration,
    ) -> Result<ExecOutput, PodRuntimeError>;

    /// Starts a command in a running container and opens its output streams.
    async fn start_exec(&self, container: &ContainerId, args: Vec<String>) -> Result<ExecStreams, PodRuntimeError>;

    /// Opens the serial console of the VM in a running container, as input and output.
    async fn open_console(&self, container: &ContainerId) -> Result<(UnixStream, UnixStream), PodRuntimeError>;

    /// Connects to a TCP port of a ready pod, from inside the pod.
    async fn connect_tcp(&self, pod: &PodId, port: u16) -> Result<UnixStream, PodRuntimeError>;
}
