//! Defines the errors of workers themselves, in contrast to errors of the content that they decode, and the errors of unpacking a layer
//! with workers.

use crate::budget::BudgetError;
use crate::layer::ingest::LayerError;
use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::PathBuf;

/// Reasons that a layer is not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The source failed: the download, or the file.
    #[error("cannot read the layer")]
    Source(#[source] io::Error),
    /// The layer is rejected, by a worker or by the limits that the daemon enforces.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A worker failed.
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

impl From<BudgetError> for UnpackError {
    fn from(error: BudgetError) -> Self {
        UnpackError::Layer(error.into())
    }
}

impl Classify for UnpackError {
    fn kind(&self) -> FailureKind {
        match self {
            UnpackError::Source(error) => FailureKind::from(error.kind()),
            UnpackError::Layer(error) => error.kind(),
            UnpackError::Worker(error) => error.kind(),
        }
    }
}

/// Reasons that a worker did not do its job.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The program could not be started.
    #[error("cannot start the image worker {program}", program = program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A system call by which the daemon controls or feeds a worker failed.
    #[error("cannot {what} the image worker")]
    Control {
        /// The action: "connect", "limit", "feed".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A signal ended the worker: SIGSYS if it made a system call that its jail forbids.
    #[error("the image worker ended by signal {signal} ({name}) while it {task}")]
    Signal {
        /// The number of the signal.
        signal: i32,
        /// The name of the signal.
        name: &'static str,
        /// What the worker did: "decompressed a layer".
        task: &'static str,
    },
    /// The kernel or an administrator killed the worker.
    #[error(
        "the image worker was killed (SIGKILL) while it {task}: the node ran out of memory, or the worker used its {seconds} seconds of CPU \
         time; try again, or check the image"
    )]
    Killed {
        /// The limit of CPU time in seconds.
        seconds: u64,
        /// What the worker did.
        task: &'static str,
    },
    /// The worker ended without a result.
    #[error("the image worker ended with status {status} and without a result while it {task}")]
    NoResult {
        /// The exit status, -1 if it is unknown.
        status: i32,
        /// What the worker did.
        task: &'static str,
    },
    /// The worker reported that it cannot work: its jail could not be set up, or it panicked.
    #[error("the image worker failed while it {task}: {message}")]
    Failed {
        /// What the worker did.
        task: &'static str,
        /// The worker's own message.
        message: String,
    },
    /// The worker neither read nor wrote nor computed.
    #[error("the image worker made no progress for {seconds} seconds while it {task}")]
    Stalled {
        /// The limit in seconds.
        seconds: u64,
        /// What the worker did.
        task: &'static str,
    },
    /// The worker violated the protocol, or reported something that is not so.
    #[error("the image worker violated the protocol while it {task}: {why}")]
    Protocol {
        /// What the worker did.
        task: &'static str,
        /// The rule that it violated.
        why: &'static str,
    },
    /// A message of the worker is too long or is not one of the protocol: for example, that it cannot allocate memory.
    #[error("the image worker sent an unknown message while it {task}: {text:?}")]
    UnknownMessage {
        /// What the worker did.
        task: &'static str,
        /// The beginning of the message.
        text: String,
    },
    /// The program is of another version than the daemon.
    #[error(
        "the image worker has protocol version {found} and not {expected}: restart the daemon after an update of its programs"
    )]
    Version {
        /// The version of the worker.
        found: u32,
        /// The version of the daemon.
        expected: u32,
    },
}

impl Classify for WorkerError {
    fn kind(&self) -> FailureKind {
        match self {
            WorkerError::Killed { .. } => FailureKind::Exhausted,
            _ => FailureKind::Internal,
        }
    }
}
