//! Defines the errors of the VM of a machine pod.

use nacelle_base::task::TaskError;
use nacelle_base::{Classify, Kind};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Reasons that an operation on the VM fails.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The document from the daemon cannot be parsed.
    #[error("the machine's document cannot be read")]
    Document {
        /// The position and the reason.
        source: serde_json::Error,
    },
    /// A field of the document has a value that is not allowed.
    #[error("{field} is {value}: {rule}")]
    Field {
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
    #[error("the machine has no snapshot {name:?}")]
    NoSnapshot {
        /// The name.
        name: String,
    },
    /// A memory dump was not completed.
    #[error("the memory dump is given up: {why}")]
    Dump {
        /// The reason.
        why: &'static str,
    },
    /// The VM did not stay paused while its files were copied.
    #[error("the machine is not held: {why}")]
    Hold {
        /// The reason.
        why: &'static str,
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
    #[error("container {id}: the pod's container is its machine, and there is one already")]
    Second {
        /// The name of the existing container.
        id: String,
    },
    /// The operation is not possible in the VM's current state.
    #[error("cannot {what}: the machine {state}")]
    State {
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
        /// The operation: "open", "make".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file of the persistent state cannot be written or removed.
    #[error(transparent)]
    Mark(nacelle_base::files::FileError),
    /// Another process has locked the VM.
    #[error("the machine runs already: another process has locked {}", path.display())]
    Locked {
        /// The directory of the persistent VM.
        path: PathBuf,
    },
    /// A disk cannot be used.
    #[error("disk {name}: {rule}")]
    Disk {
        /// The disk's name.
        name: String,
        /// The rule that the disk violates.
        rule: &'static str,
    },
    /// A directory of the node cannot be shared with the guest.
    #[error("file system {name}: its directory cannot be shared with the machine")]
    Share {
        /// The name of the share.
        name: String,
        /// The reason.
        source: io::Error,
    },
    /// The disk is in use by another VM.
    #[error(
        "disk {name}: {path} is in use by another machine: one at a time may write to it, and while it does no other may read it, \
         but where all say that it is shareable; stop that one first"
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
    #[error("cannot get {what}")]
    Resources {
        /// The resource.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// QEMU cannot be started.
    #[error(transparent)]
    Engine(#[from] nacelle_engine::EngineError),
    /// The answer did not arrive in time.
    #[error("no answer of {whom} to {command} within {limit:?}")]
    TooSlow {
        /// "QEMU", "the guest agent".
        whom: &'static str,
        /// The command.
        command: String,
        /// The time limit.
        limit: Duration,
    },
    /// The connection is closed.
    #[error("{whom} does not answer")]
    Gone {
        /// "QEMU", "the guest agent".
        whom: &'static str,
    },
    /// The answer is malformed.
    #[error("{whom} answers {command} with something else: {what}")]
    Garbled {
        /// "QEMU", "the guest agent".
        whom: &'static str,
        /// The command.
        command: String,
        /// The fault of the answer.
        what: &'static str,
    },
    /// The command was rejected.
    #[error("{whom} refuses {command}: {words:?}")]
    Refused {
        /// "QEMU", "the guest agent".
        whom: &'static str,
        /// The command.
        command: String,
        /// The peer's error text, truncated.
        words: String,
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
    fn kind(&self) -> Kind {
        match self {
            KeeperError::Document { .. } | KeeperError::Field { .. } | KeeperError::Disk { .. } => Kind::Invalid,
            KeeperError::NoSnapshot { .. } | KeeperError::NoContainer { .. } | KeeperError::NoExec { .. } => {
                Kind::NotFound
            }
            KeeperError::Mark(error) => error.kind(),
            KeeperError::Locked { .. }
            | KeeperError::InUse { .. }
            | KeeperError::Second { .. }
            | KeeperError::Dump { .. }
            | KeeperError::Hold { .. }
            | KeeperError::State { .. } => Kind::Conflict,
            KeeperError::Unsupported { .. } => Kind::Unsupported,
            KeeperError::File { source, .. } | KeeperError::Share { source, .. } => source.kind().into(),
            KeeperError::Task(error) => error.kind(),
            KeeperError::Resources { .. } => Kind::Exhausted,
            KeeperError::Engine(error) => error.kind(),
            KeeperError::TooSlow { .. } => Kind::Timeout,
            KeeperError::Gone { .. } => Kind::Unavailable,
            KeeperError::Garbled { .. } | KeeperError::Refused { .. } => Kind::Internal,
        }
    }
}
