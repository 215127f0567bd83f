//! Defines the errors of a pod process, and [`Failure`], the cloneable form in which several waiters receive one error.

use crate::device_table::DeviceError;
use crate::guest_values::{Bounded, MemoryOutOfRange};
use crate::images::PlacementError;
use crate::record::{Phase, SavedStateError};
use crate::scratch::ScratchError;
use crate::spec::PodSpecError;
use crate::state::{ContainerEvent, ContainerState, InvalidTransition};
use nacelle_base::copied_in::CopyInFailure;
use nacelle_base::files::FileError;
use nacelle_base::task::TaskError;
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_engine::{BlockError, EngineError, LinkError, SnapshotError};
use nacelle_net::NetError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// An error of the pod process.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// The specification is invalid.
    #[error(transparent)]
    Spec(#[from] PodSpecError),
    /// The pod's use of its node's disk cannot be limited.
    #[error(transparent)]
    DiskLimits(#[from] nacelle_jail::disk_limits::DiskLimitError),
    /// The identity of the process that serves the pod is unknown, or is not this one.
    #[error(transparent)]
    Identity(#[from] crate::identity::IdentityError),
    /// The daemon has not started this process for this directory.
    #[error("cannot serve the pod in {}: its process.json names another process; only the daemon may start the process of a pod", dir.display())]
    ForeignProcess {
        /// The run directory.
        dir: PathBuf,
    },
    /// The record state.json cannot be read or written.
    #[error(transparent)]
    Record(#[from] SavedStateError),
    /// Another file in the run directory cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The process cannot enter its jail.
    #[error(transparent)]
    Jail(#[from] nacelle_jail::JailError),
    /// The file-server process for the volumes of the node did not start.
    #[error(transparent)]
    Share(#[from] nacelle_fs::ShareError),
    /// The scratch disk cannot be created.
    #[error("cannot create the scratch disk")]
    Scratch(#[from] ScratchError),
    /// A tap or the network namespace cannot be set up.
    #[error("cannot set up the pod's network")]
    Net(#[from] NetError),
    /// The engine rejects the VM's specification.
    #[error("cannot create the VM")]
    Machine(#[from] nacelle_engine::SpecError),
    /// The engine could not start or stop the VM.
    #[error("the engine failed")]
    Engine(#[from] EngineError),
    /// An image or a device cannot be placed on its disk.
    #[error("cannot place {key} on the VM's disk")]
    Place {
        /// The key of the image, or the device's path.
        key: String,
        /// The cause.
        source: BlockError,
    },
    /// An image cannot be placed.
    #[error(transparent)]
    Image(#[from] PlacementError),
    /// A container cannot have a device of the node.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A connection with the guest failed.
    #[error("cannot {what}")]
    Link {
        /// The action: "accept the connection of the guest's agent", "connect to the agent".
        what: &'static str,
        /// The cause.
        source: LinkError,
    },
    /// A stream with the guest broke.
    #[error("cannot {what}")]
    Stream {
        /// The action: "read the agent's hello".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The agent sent bytes that are not a message, or a message that is too long.
    #[error("the agent's {what} is not a valid message")]
    Malformed {
        /// The message: "hello", "report".
        what: &'static str,
    },
    /// The agent uses another protocol version.
    #[error("the agent uses protocol {got}; this program supports only protocol 1")]
    Protocol {
        /// The agent's version.
        got: u32,
    },
    /// The guest could not be configured. The text is the agent's.
    #[error("cannot configure the guest: {message}")]
    Guest {
        /// The agent's error message.
        message: Bounded<String>,
    },
    /// The agent replied to a request with an error. The text is the agent's.
    #[error("the agent cannot {what}: {message}")]
    Agent {
        /// The request, as an infinitive.
        what: &'static str,
        /// The kind that the agent reports.
        kind: FailureKind,
        /// The agent's error message.
        message: Bounded<String>,
    },
    /// A volume of the node could not be read to copy it into the guest.
    #[error("cannot read volume {path} to copy it into the guest: {text}")]
    VolumeUnreadable {
        /// The path on the node.
        path: String,
        /// The kind of the failure.
        why: CopyInFailure,
        /// The cause.
        text: String,
    },
    /// The sockets of a volume of the node could not be listed.
    #[error("cannot find the sockets of volume {path}: {text}")]
    SocketsUnreadable {
        /// The path on the node.
        path: String,
        /// The kind of the failure.
        why: CopyInFailure,
        /// The cause.
        text: String,
    },
    /// The guest rejected a copied-in volume or a socket volume.
    #[error("the guest rejected volume {path}")]
    VolumeRejected {
        /// The path on the node.
        path: String,
        /// The cause.
        source: Box<PodError>,
    },
    /// No file-server process is there to read a volume.
    #[error("cannot copy volume {path} into the guest: the file-server process has ended")]
    NoFileServer {
        /// The path on the node.
        path: String,
    },
    /// The VM has ended.
    #[error("the VM has ended: {why}")]
    Died {
        /// How the VM ended, and the end of its console.
        why: Bounded<String>,
    },
    /// A wait exceeded its limit.
    #[error("could not {what} within {limit:?}")]
    TooSlow {
        /// The action that was waited for.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The agent reports an impossible amount of memory.
    #[error(transparent)]
    MemoryOutOfRange(#[from] MemoryOutOfRange),
    /// A field of the request is invalid.
    #[error("{field} {value:?} is invalid: {rule}")]
    Field {
        /// The field's name.
        field: &'static str,
        /// The field's value.
        value: String,
        /// The rule for the value.
        rule: &'static str,
    },
    /// The pod's phase does not allow the request.
    #[error("the pod is {phase:?}{failure}")]
    Phase {
        /// The pod's phase.
        phase: Phase,
        /// ": " and the reason of the failure, or empty.
        failure: String,
    },
    /// The container does not exist.
    #[error("the pod has no container {id}")]
    NoContainer {
        /// The container's id.
        id: String,
    },
    /// A command cannot run in the guest: the pod has none, or it is that of a machine pod.
    #[error(
        "cannot run a command in the guest: {}",
        if *has_vm {
            "this is a machine pod, whose guest has its own console; use nacelle vm console, or exec"
        } else {
            "the pod has no guest; its processes are on the node"
        }
    )]
    NoContainerGuest {
        /// The pod has a VM.
        has_vm: bool,
    },
    /// The container's state does not allow the request.
    #[error("container {id} does not allow the request")]
    Container {
        /// The container's id.
        id: String,
        /// The state and the event.
        source: InvalidTransition<ContainerState, ContainerEvent>,
    },
    /// The pod is configured, or being configured, with another network.
    #[error("cannot configure the pod: it already has, or receives, another network")]
    OtherNetwork,
    /// A container has something that a checkpoint cannot hold.
    #[error("cannot save the pod: container {container} has {what}")]
    NotSavable {
        /// The id of the container.
        container: String,
        /// What it has, and on which path.
        what: String,
    },
    /// The VM cannot be saved while it runs.
    #[error(
        "cannot save the pod: its VM cannot be saved while it runs; that needs engine kvm, memory that is not in reserved huge pages, and a node whose /proc has pagemap"
    )]
    NoSavableVm,
    /// Another checkpoint is in progress.
    #[error("cannot save the pod: another checkpoint of it is in progress")]
    CheckpointInProgress,
    /// Other containers run than those that the request names.
    #[error("cannot save the pod: the request names the containers [{expected}], and [{running}] run")]
    OtherContainers {
        /// The ids that the request names.
        expected: String,
        /// The ids of the containers that run.
        running: String,
    },
    /// The files of a checkpoint were not offered.
    #[error("cannot save the pod: the daemon has not offered three files for the checkpoint {name:?}")]
    NoCheckpointFiles {
        /// The name of the offer.
        name: String,
    },
    /// The scratch disk cannot be copied.
    #[error("cannot save the pod's scratch disk")]
    CopyScratch {
        /// The cause.
        source: BlockError,
    },
    /// The checkpoint was stopped by its caller, or by the end of the pod.
    #[error("the checkpoint was stopped: its caller has gone, or the pod is ending")]
    CheckpointStopped,
    /// The state of a checkpoint cannot be read.
    #[error("cannot restore the pod: its checkpoint cannot be read")]
    Checkpoint(#[from] SnapshotError),
    /// The files of a checkpoint are not those that the specification describes.
    #[error(
        "cannot restore the pod: the checkpoint in {} has another VM or scratch disk than its manifest says; make a new checkpoint",
        directory.display()
    )]
    OtherCheckpoint {
        /// The directory of the checkpoint.
        directory: PathBuf,
    },
    /// The engine cannot continue a saved VM.
    #[error("cannot restore the pod: its engine cannot continue a saved VM; use a handler with engine kvm")]
    NoRestorer,
    /// Work on the blocking pool did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A thread could not be started, or a resource of the process is exhausted.
    #[error("cannot {what}")]
    Thread {
        /// The action: "start the async runtime".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The process is about to end.
    #[error("the pod process is ending")]
    Ending,
}

impl Classify for PodError {
    fn kind(&self) -> FailureKind {
        match self {
            PodError::Spec(error) => error.kind(),
            PodError::Identity(error) => error.kind(),
            PodError::Record(error) => error.kind(),
            PodError::File(error) => error.kind(),
            PodError::Jail(error) => error.kind(),
            PodError::DiskLimits(error) => error.kind(),
            PodError::Share(error) => error.kind(),
            PodError::Scratch(error) => error.kind(),
            PodError::Net(error) => error.kind(),
            PodError::Machine(error) => error.kind(),
            PodError::Engine(error) => error.kind(),
            PodError::Place { source, .. } | PodError::CopyScratch { source } => source.kind(),
            PodError::Image(error) => error.kind(),
            PodError::Device(error) => error.kind(),
            PodError::Link { source, .. } => source.kind(),
            PodError::Agent { kind, .. } => *kind,
            PodError::VolumeUnreadable { why, .. } | PodError::SocketsUnreadable { why, .. } => match why {
                CopyInFailure::Changed => FailureKind::Unavailable,
                CopyInFailure::LimitExceeded => FailureKind::Exhausted,
                CopyInFailure::UnsupportedEntry => FailureKind::Conflict,
                CopyInFailure::Missing => FailureKind::NotFound,
                CopyInFailure::Failed => FailureKind::Internal,
            },
            PodError::VolumeRejected { source, .. } => source.kind(),
            PodError::NoFileServer { .. } => FailureKind::Unavailable,
            PodError::TooSlow { .. } => FailureKind::Timeout,
            PodError::Field { .. } | PodError::MemoryOutOfRange(_) => FailureKind::Invalid,
            PodError::NoContainer { .. } => FailureKind::NotFound,
            PodError::Container { source, .. } => source.kind(),
            PodError::NoContainerGuest { .. }
            | PodError::Phase { .. }
            | PodError::OtherNetwork
            | PodError::NotSavable { .. }
            | PodError::NoSavableVm
            | PodError::CheckpointInProgress
            | PodError::OtherContainers { .. }
            | PodError::NoCheckpointFiles { .. }
            | PodError::Checkpoint(_)
            | PodError::OtherCheckpoint { .. }
            | PodError::NoRestorer
            | PodError::ForeignProcess { .. } => FailureKind::Conflict,
            PodError::Stream { .. } | PodError::Died { .. } | PodError::Ending | PodError::CheckpointStopped => {
                FailureKind::Unavailable
            }
            PodError::Task(error) => error.kind(),
            PodError::Thread { .. } => FailureKind::Exhausted,
            PodError::Malformed { .. } | PodError::Protocol { .. } | PodError::Guest { .. } => FailureKind::Internal,
        }
    }
}

/// An error in the form that every waiter receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind of the failure.
    pub kind: FailureKind,
    /// The error and its causes on one line.
    pub message: String,
}

impl From<PodError> for Failure {
    fn from(error: PodError) -> Self {
        Failure { kind: error.kind(), message: Chain(&error).to_string() }
    }
}

impl From<Failure> for tonic::Status {
    fn from(failure: Failure) -> Self {
        crate::codes::refuse(failure.kind, failure.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_has_all_causes() {
        let error = PodError::Container {
            id: "c".into(),
            source: InvalidTransition { state: ContainerState::Exited, event: ContainerEvent::Start },
        };
        let failure = Failure::from(error);
        assert_eq!(failure.message, "container c does not allow the request: Start is not possible in state Exited");
        assert_eq!(failure.kind, FailureKind::Conflict);
    }
}
