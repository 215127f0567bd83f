//! Owns: why the machine of a machine pod cannot be made, started or asked.

use nacelle_base::task::TaskError;
use nacelle_base::{Classify, Kind};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why something cannot be done with the machine.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The daemon's document is none.
    #[error("the machine's document cannot be read")]
    Document {
        /// Where and why.
        source: serde_json::Error,
    },
    /// The document says something that cannot be.
    #[error("{field} is {value}: {rule}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it says.
        value: String,
        /// What is expected.
        rule: &'static str,
    },
    /// A name that is not that of the pod's container.
    #[error("there is no container {id}")]
    NoContainer {
        /// The name.
        id: String,
    },
    /// There is none of this name.
    #[error("the machine has no snapshot {name:?}")]
    NoSnapshot {
        /// The name.
        name: String,
    },
    /// A dump of memory that did not come to its end.
    #[error("the memory dump is given up: {why}")]
    Dump {
        /// What happened.
        why: &'static str,
    },
    /// It does not stand still while its files are copied.
    #[error("the machine is not held: {why}")]
    Hold {
        /// What happened.
        why: &'static str,
    },
    /// Nobody knows this command.
    #[error("there is no command {exec} in container {id}")]
    NoExec {
        /// The container.
        id: String,
        /// The command's name.
        exec: String,
    },
    /// The pod's container is its machine.
    #[error("container {id}: the pod's container is its machine, and there is one already")]
    Second {
        /// The name of the other.
        id: String,
    },
    /// It cannot be done with a machine as it is now.
    #[error("cannot {what}: the machine {state}")]
    State {
        /// What was asked.
        what: &'static str,
        /// "runs", "has ended", "has not started".
        state: &'static str,
    },
    /// A container of another kind could do it.
    #[error("a machine pod cannot {what}: {hint}")]
    Unsupported {
        /// What was asked.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A file of the node.
    #[error("cannot {what} {}", path.display())]
    File {
        /// "open", "make".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What a kept disk is of.
    #[error(transparent)]
    Mark(nacelle_base::files::FileError),
    /// Another process has the machine.
    #[error("the machine runs already: another process has locked {}", path.display())]
    Locked {
        /// What it keeps.
        path: PathBuf,
    },
    /// A disk that the machine cannot have.
    #[error("disk {name}: {rule}")]
    Disk {
        /// Its name.
        name: String,
        /// What is wrong with it.
        rule: &'static str,
    },
    /// A folder of the node that cannot be shared with the guest.
    #[error("file system {name}: its folder cannot be shared with the machine")]
    Share {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Another machine has it.
    #[error(
        "disk {name}: {path} is in use by another machine: one at a time may write to it, and while it does no other may read it, \
         but where all say that it is shareable; stop that one first"
    )]
    InUse {
        /// The disk's name.
        name: String,
        /// On the node.
        path: String,
    },
    /// Work on a thread of the runtime did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A resource of the process.
    #[error("cannot get {what}")]
    Resources {
        /// Which.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// QEMU cannot be started.
    #[error(transparent)]
    Engine(#[from] nacelle_engine::EngineError),
    /// The answer did not come.
    #[error("no answer of {whom} to {command} within {limit:?}")]
    TooSlow {
        /// "QEMU", "the guest agent".
        whom: &'static str,
        /// What was asked.
        command: String,
        /// How long was waited.
        limit: Duration,
    },
    /// Nobody answers.
    #[error("{whom} does not answer")]
    Gone {
        /// "QEMU", "the guest agent".
        whom: &'static str,
    },
    /// The answer is none.
    #[error("{whom} answers {command} with something else: {what}")]
    Garbled {
        /// "QEMU", "the guest agent".
        whom: &'static str,
        /// What was asked.
        command: String,
        /// What is wrong with the answer.
        what: &'static str,
    },
    /// It was refused.
    #[error("{whom} refuses {command}: {words:?}")]
    Refused {
        /// "QEMU", "the guest agent".
        whom: &'static str,
        /// What was asked.
        command: String,
        /// Its words, cut.
        words: String,
    },
}

impl KeeperError {
    /// What could not be done with a file.
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
