//! Defines the errors of engines and machines.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nacelle_base::{Classify, FailureKind};
use nacelle_vmm::block::BlockError;
use nacelle_vmm::net::NetError;
use nacelle_vmm::vhost_user::VhostUserServerError;

use crate::machine::StepFailed;
use crate::qemu::QmpError;

/// An error of a connection between host and guest. `Stopped` means that the machine has ended.
pub use nacelle_vmm::vsock::VsockError as LinkError;

/// A machine could not be started, stopped or paused.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file, directory or socket of the machine cannot be used.
    #[error("cannot {what} {path}", path = path.display())]
    File {
        /// The operation: "open", "listen on".
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A disk could not be created.
    #[error("cannot create disk {serial}")]
    Disk {
        /// The serial number of the disk.
        serial: String,
        /// The cause.
        source: BlockError,
    },
    /// The vsock device could not be created.
    #[error("cannot create the vsock device of guest {cid}")]
    Vsock {
        /// The guest's context id.
        cid: u32,
        /// The cause.
        source: LinkError,
    },
    /// A network interface could not be created.
    #[error("cannot create network interface {index}")]
    Nic {
        /// The index of the interface.
        index: usize,
        /// The cause.
        source: NetError,
    },
    /// A device could not be served to the engine's process.
    #[error("cannot serve device {device}")]
    Serve {
        /// The name of the device.
        device: String,
        /// The cause.
        source: VhostUserServerError,
    },
    /// A thread, pipe or socket pair could not be created.
    #[error("cannot create {what}")]
    Resources {
        /// The name of the resource.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The engine's program could not be started.
    #[error("cannot start {program}", program = program.display())]
    Spawn {
        /// The path of the program.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Nacelle's own VMM could not perform an operation on the VM.
    #[error("cannot {what} the VM")]
    Machine {
        /// The operation: "create", "pause".
        what: &'static str,
        /// The cause.
        source: nacelle_vmm::machine::Error,
    },
    /// A snapshot is invalid, or cannot be written.
    #[error("cannot {what} the snapshot")]
    Snapshot {
        /// The operation: "read", "write".
        what: &'static str,
        /// The cause.
        source: nacelle_vmm::snapshot::SnapshotError,
    },
    /// The engine's process rejected a command or did not reply.
    #[error("cannot {what} the VM")]
    Control {
        /// The command: "pause".
        what: &'static str,
        /// The cause.
        source: QmpError,
    },
    /// The node's kernel could not release the memory.
    #[error("cannot release unused memory of the VM to the node")]
    ReleaseMemory {
        /// The cause.
        source: io::Error,
    },
    /// The machine has ended, so the operation is impossible.
    #[error("cannot {what} the VM: it has ended")]
    Ended {
        /// The operation.
        what: &'static str,
    },
    /// The machine was to be saved while it runs.
    #[error("the VM is paused: resume it, or save it as it is")]
    IsPaused,
    /// The caller's own step failed while the machine was saved.
    #[error("cannot save the running VM")]
    Step {
        /// The cause, which only the caller knows.
        source: StepFailed,
    },
    /// The machine was killed and has not ended.
    #[error("the VM's process {pid} has not ended within {limit:?} after SIGKILL")]
    NotEnding {
        /// The pid of the process.
        pid: u32,
        /// The limit of the wait.
        limit: Duration,
    },
    /// The fake engine was scripted to fail.
    #[cfg(feature = "fake")]
    #[error("cannot start the VM: the test's script requires a failure")]
    Scripted,
}

impl Classify for EngineError {
    fn kind(&self) -> FailureKind {
        match self {
            EngineError::File { source, .. } => match source.kind().into() {
                // The name is the engine's or the node's: a missing file is not the object that the client of the CRI named.
                FailureKind::NotFound | FailureKind::AlreadyExists => FailureKind::Internal,
                kind => kind,
            },
            EngineError::Disk { source, .. } => source.kind(),
            EngineError::Vsock { source, .. } => source.kind(),
            EngineError::Nic { source, .. } => source.kind(),
            EngineError::Serve { source, .. } => source.kind(),
            EngineError::Machine { source, .. } => source.kind(),
            EngineError::Snapshot { source, .. } => source.kind(),
            EngineError::Resources { .. } => FailureKind::Exhausted,
            EngineError::Control { source, .. } => source.kind(),
            EngineError::ReleaseMemory { .. } | EngineError::Step { .. } => FailureKind::Internal,
            EngineError::Ended { .. } | EngineError::IsPaused => FailureKind::Conflict,
            EngineError::NotEnding { .. } => FailureKind::Timeout,
            EngineError::Spawn { .. } => FailureKind::Unavailable,
            #[cfg(feature = "fake")]
            EngineError::Scripted => FailureKind::Unavailable,
        }
    }
}
