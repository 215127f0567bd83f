//! Defines the errors of the client. Texts of a pod process are not trusted: they are shortened and made printable.

use crate::codes;
use crate::error::PodError;
use crate::identity::IdentityError;
use crate::protocol::PodProtocolError;
use crate::record::{OUT_OF_MEMORY, SavedStateError};
use crate::spec::PodSpecError;
use crate::text::printable;
use nacelle_base::files::FileError;
use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// The maximum number of characters of an error of the process that are passed on. The process is the nearest to the guest
/// and the least trusted.
pub(super) const MAX_TEXT: usize = 4096;

/// A pod process could not be started, found or used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The pod's specification is invalid.
    #[error(transparent)]
    Spec(#[from] PodSpecError),
    /// The identity of the pod process is unknown.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The record of the pod process cannot be read.
    #[error(transparent)]
    Record(#[from] SavedStateError),
    /// A file in the run directory cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The program could not be started.
    #[error("cannot start the pod process {}", program.display())]
    Start {
        /// The path of the program.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process could not be moved into its cgroup.
    #[error("cannot move the pod process into the cgroup {}", cgroup.display())]
    Cgroup {
        /// The cgroup's path.
        cgroup: PathBuf,
        /// The kind of the failure.
        kind: FailureKind,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The daemon could not record the process, so it must not begin.
    #[error("cannot record the pod process {pid}")]
    NotRecorded {
        /// The pid of the process.
        pid: i32,
        /// The kind of the failure.
        kind: FailureKind,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The process ended before its first reply.
    #[error("the pod process ended with {status} before its first reply; see its log {}{tail}", log.display())]
    EndedBeforeReply {
        /// The exit status.
        status: ExitStatus,
        /// The log file of the process.
        log: PathBuf,
        /// ": " and the last lines of the log, or that it is empty.
        tail: String,
    },
    /// The process has ended since it was started.
    #[error("{why}")]
    Ended {
        /// How it ended: "the pod process died of signal 9".
        why: String,
    },
    /// The node's kernel killed the process, or another one of its cgroup, for lack of memory.
    #[error("{OUT_OF_MEMORY} ({why})")]
    OutOfMemory {
        /// How it ended.
        why: String,
    },
    /// The process that builds a template failed.
    #[error("the process that builds a template ended with {status}; its log ends with: {tail}")]
    NotBuilt {
        /// The exit status.
        status: ExitStatus,
        /// The last lines of the log.
        tail: String,
    },
    /// No process serves this run directory.
    #[error("no pod process serves {}", dir.display())]
    NotRunning {
        /// The run directory.
        dir: PathBuf,
    },
    /// The process runs, but its socket does not accept a connection.
    #[error("cannot connect to the pod process through {}", socket.display())]
    Connect {
        /// The path of the socket.
        socket: PathBuf,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// A stream of the process cannot be opened.
    #[error("cannot open a stream of the pod process {pod}")]
    Stream {
        /// The pid of the pod process.
        pod: i32,
        /// The cause.
        source: Box<PodError>,
    },
    /// The process has another version, which does not know the request.
    #[error(transparent)]
    Protocol(#[from] PodProtocolError),
    /// The process exceeded a time limit.
    #[error("the pod process did not {what} within {limit:?}")]
    Timeout {
        /// The action: "reply", "end".
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The caller has stopped a request before it was sent.
    #[error("the request was stopped before the pod process received it")]
    Stopped,
    /// The process replied with an error, whose text is not trusted.
    #[error("{message}")]
    Rejected {
        /// The kind of the failure.
        kind: FailureKind,
        /// The error message of the process.
        message: String,
    },
}

impl Classify for ClientError {
    fn kind(&self) -> FailureKind {
        match self {
            ClientError::Spec(error) => error.kind(),
            ClientError::Identity(error) => error.kind(),
            ClientError::Record(error) => error.kind(),
            ClientError::File(error) => error.kind(),
            ClientError::Protocol(error) => error.kind(),
            ClientError::Start { .. } | ClientError::EndedBeforeReply { .. } | ClientError::NotBuilt { .. } => {
                FailureKind::Internal
            }
            ClientError::NotRunning { .. } | ClientError::Connect { .. } | ClientError::Ended { .. } => {
                FailureKind::Unavailable
            }
            ClientError::OutOfMemory { .. } => FailureKind::Exhausted,
            ClientError::Stopped => FailureKind::Conflict,
            ClientError::Stream { source, .. } => source.kind(),
            ClientError::Timeout { .. } => FailureKind::Timeout,
            ClientError::Cgroup { kind, .. }
            | ClientError::NotRecorded { kind, .. }
            | ClientError::Rejected { kind, .. } => *kind,
        }
    }
}

impl From<tonic::Status> for ClientError {
    fn from(status: tonic::Status) -> Self {
        ClientError::Rejected { kind: codes::kind(&status), message: printable(status.message(), MAX_TEXT) }
    }
}
