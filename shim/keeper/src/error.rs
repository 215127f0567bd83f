//! Defines the errors of the VM of a machine pod.

use nacelle_base::task::TaskError;
use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Reasons that an operation on the VM fails.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The document from the daemon cannot be parsed.
    #[error("cannot parse the VM document from the daemon")]
    InvalidDocument {
        /// The position and the reason.
        source: serde_json::Error,
    },
    /// A field of the document has a value that is not allowed.
    #[error("{field} is {value}: {rule}")]
    InvalidField {
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// The values that are allowed.
        rule: &'static str,
    },
    /// The name is not that of the pod's container.
    #[error("there is no container {id}")]
    NoContainer {
        /// The name.
        id: String,
    },
    /// There is no snapshot of this name.
    #[error("the VM has no snapshot {name:?}")]
    NoSnapshot {
        /// The name.
        name: String,
    },
    /// A memory dump was not completed.
    #[error("the memory dump was aborted: {reason}")]
    Dump {
        /// The reason.
        reason: &'static str,
    },
    /// The VM did not stay paused while its files were copied.
    #[error("cannot keep the VM paused: {reason}")]
    Quiesce {
        /// The reason.
        reason: &'static str,
    },
    /// There is no command of this name.
    #[error("there is no command {exec} in container {id}")]
    NoExec {
        /// The container.
        id: String,
        /// The command's name.
        exec: String,
    },
    /// The pod already has a VM.
    #[error("cannot create another container: a machine pod has only one, and container {id} exists")]
    AlreadyExists {
        /// The name of the existing container.
        id: String,
    },
    /// The operation is not possible in the VM's current state.
    #[error("cannot {what}: the VM {state}")]
    WrongState {
        /// The operation.
        what: &'static str,
        /// The state: "runs", "has ended", "has not started".
        state: &'static str,
    },
    /// The operation is not supported for a VM.
    #[error("a machine pod cannot {what}: {hint}")]
    Unsupported {
        /// The operation.
        what: &'static str,
        /// What the user can do instead.
        hint: &'static str,
    },
    /// An operation on a file of the node failed.
    #[error("cannot {what} {}", path.display())]
    File {
        /// The operation: "open", "create".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file of the persistent state cannot be written or removed.
    #[error(transparent)]
    StateFile(nacelle_base::files::FileError),
    /// Another process has locked the VM.
    #[error("the VM is already running: another process has locked {}; stop that one first", path.display())]
    Locked {
        /// The directory of the persistent VM.
        path: PathBuf,
    },
    /// A disk cannot be used.
    #[error("cannot use disk {name}: {rule}")]
    Disk {
        /// The disk's name.
        name: String,
        /// The rule that the disk violates.
        rule: &'static str,
    },
    /// A directory of the node cannot be shared with the guest.
    #[error("cannot share the directory of file system {name} with the VM")]
    Share {
        /// The name of the share.
        name: String,
        /// The reason.
        source: io::Error,
    },
    /// The disk is in use by another VM.
    #[error(
        "cannot use disk {name}: {path} is in use by another VM: a disk has one writer or several readers, unless all VMs mark it as \
         shareable; stop the other VM first"
    )]
    InUse {
        /// The disk's name.
        name: String,
        /// The path on the node.
        path: String,
    },
    /// Work on a thread of the runtime did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A resource of the process cannot be obtained.
    #[error("cannot {what}")]
    Resource {
        /// The resource.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// QEMU cannot be started.
    #[error(transparent)]
    Engine(#[from] nacelle_engine::EngineError),
    /// The answer did not arrive in time.
    #[error("{peer} did not complete {command} within {limit:?}")]
    Timeout {
        /// "QEMU", "the guest agent".
        peer: &'static str,
        /// The command.
        command: String,
        /// The time limit.
        limit: Duration,
    },
    /// The connection is closed.
    #[error("the connection to {peer} is closed")]
    Disconnected {
        /// "QEMU", "the guest agent".
        peer: &'static str,
    },
    /// The answer is malformed.
    #[error("the reply of {peer} to {command} is malformed: {what}")]
    MalformedReply {
        /// "QEMU", "the guest agent".
        peer: &'static str,
        /// The command.
        command: String,
        /// The fault of the answer.
        what: &'static str,
    },
    /// The command was rejected.
    #[error("{peer} rejected {command}: {message:?}")]
    Rejected {
        /// "QEMU", "the guest agent".
        peer: &'static str,
        /// The command.
        command: String,
        /// The peer's error text, truncated.
        message: String,
    },
}

impl KeeperError {
    /// Returns the conversion of an I/O error of an operation on a file.
    pub(crate) fn file(what: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> KeeperError + use<> {
        let path = path.to_owned();
        move |source| KeeperError::File { what, path, source }
    }
}

impl Classify for KeeperError {
    fn kind(&self) -> FailureKind {
        match self {
            KeeperError::InvalidDocument { .. } | KeeperError::InvalidField { .. } | KeeperError::Disk { .. } => {
                FailureKind::Invalid
            }
            KeeperError::NoSnapshot { .. } | KeeperError::NoContainer { .. } | KeeperError::NoExec { .. } => {
                FailureKind::NotFound
            }
            KeeperError::StateFile(error) => error.kind(),
            KeeperError::Locked { .. }
            | KeeperError::InUse { .. }
            | KeeperError::AlreadyExists { .. }
            | KeeperError::Dump { .. }
            | KeeperError::Quiesce { .. }
            | KeeperError::WrongState { .. } => FailureKind::Conflict,
            KeeperError::Unsupported { .. } => FailureKind::Unsupported,
            KeeperError::File { source, .. } | KeeperError::Share { source, .. } => source.kind().into(),
            KeeperError::Task(error) => error.kind(),
            KeeperError::Resource { .. } => FailureKind::Exhausted,
            KeeperError::Engine(error) => error.kind(),
            KeeperError::Timeout { .. } => FailureKind::Timeout,
            KeeperError::Disconnected { .. } => FailureKind::Unavailable,
            KeeperError::MalformedReply { .. } | KeeperError::Rejected { .. } => FailureKind::Internal,
        }
    }
}
