//! Defines the error of every operation on the pod and its containers, and maps each variant to a kind (gRPC code).

use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::hold::HoldError;
use super::restore::AdoptionError;
use super::{anonymous_volumes, image_volumes, limits, spec, user};
use crate::copied_in::CopiedInVolumeError;
use crate::empty_dirs::EmptyDirError;
use crate::huge_pages::HugePagesError;
use crate::image::DiskError;
use crate::memory::MemoryResizeError;
use crate::processors::OnlineCpusError;
use crate::rootfs::{RootError, RootPathError};
use crate::sockets::SocketVolumeError;
use crate::zygote::ZygoteError;

/// Reasons an operation on the pod or one of its containers fails.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum AgentError {
    #[error("invalid id {id:?}: 1 to 128 letters, digits, '_', '-' and '.' are allowed, not starting with '.'")]
    Id { id: String },
    #[error("there is no container {id}")]
    NoContainer { id: String },
    #[error("container {id} has no process {exec_id}")]
    NoExec { id: String, exec_id: String },
    #[error("command {exec_id} of container {id} was killed before it started")]
    Killed { id: String, exec_id: String },
    #[error("container {id} is not running")]
    NotRunning { id: String },
    #[error("invalid signal {signal}")]
    Signal { signal: u32 },
    #[error("an exec needs a program")]
    NoProgram,
    #[error("cannot run a command in the guest: the pod has no guest; its processes are on the node")]
    NoGuest,
    #[error("container {id} has no terminal to resize")]
    NoTerminal { id: String },
    #[error("container {id} did not end within {seconds} s of being killed")]
    StillAlive { id: String, seconds: u64 },
    #[error("cannot find the user of container {id}")]
    User { id: String, source: user::UserError },
    #[error("container {id} cannot run as this user")]
    Numbers { id: String, source: user::UserIdError },
    #[error("cannot use the specification of container {id}")]
    Spec { id: String, source: spec::OciSpecError },
    #[error("cannot change the limits of container {id}")]
    Limits { id: String, source: limits::LimitError },
    #[error("cannot give container {id} its huge pages")]
    HugePages { id: String, source: HugePagesError },
    #[error("cannot prepare the root of container {id}")]
    Root { id: String, source: RootError },
    #[error("cannot prepare the mounts of container {id}")]
    Mount { id: String, source: RootPathError },
    #[error("the image of container {id} cannot be used as the specification asks")]
    Target { id: String, source: RootPathError },
    #[error("cannot mount a volume of container {id}")]
    Volume { id: String, source: image_volumes::ImageVolumeError },
    #[error("cannot make the volumes that the image of container {id} declares")]
    AnonymousVolume { id: String, source: anonymous_volumes::AnonymousVolumeError },
    #[error("cannot start a process of container {id}")]
    Zygote { id: String, source: ZygoteError },
    #[error("cannot {what} of container {id}")]
    Io { what: &'static str, id: String, source: io::Error },
    #[error("cannot {what} {} of container {id}", path.display())]
    File { what: &'static str, path: PathBuf, id: String, source: io::Error },
    #[error(transparent)]
    CopiedInVolume(#[from] CopiedInVolumeError),
    #[error(transparent)]
    SocketVolume(#[from] SocketVolumeError),
    #[error(transparent)]
    EmptyDir(#[from] EmptyDirError),
    #[error(transparent)]
    Memory(#[from] MemoryResizeError),
    #[error(transparent)]
    OnlineCpus(#[from] OnlineCpusError),
    #[error("cannot use the disk")]
    Disk {
        #[from]
        source: DiskError,
    },
    #[error(transparent)]
    Hold(#[from] Arc<HoldError>),
    #[error(transparent)]
    Restore(#[from] AdoptionError),
    #[error("a task of the agent was aborted")]
    Task {
        #[from]
        source: tokio::task::JoinError,
    },
}

impl AgentError {
    /// Returns a function for `map_err` that makes an I/O error into "cannot `what` of container `id`".
    pub(super) fn io(what: &'static str, id: &str) -> impl Fn(io::Error) -> AgentError {
        move |source| AgentError::Io { what, id: id.to_owned(), source }
    }

    /// Returns a function for `map_err` that makes an I/O error into "cannot `what` `path` of container `id`".
    pub(super) fn file(what: &'static str, path: &Path, id: &str) -> impl Fn(io::Error) -> AgentError {
        move |source| AgentError::File { what, path: path.to_owned(), id: id.to_owned(), source }
    }
}

impl Classify for AgentError {
    fn kind(&self) -> FailureKind {
        match self {
            AgentError::Id { .. }
            | AgentError::Signal { .. }
            | AgentError::NoProgram
            | AgentError::User { .. }
            | AgentError::Numbers { .. } => FailureKind::Invalid,
            AgentError::NoContainer { .. } | AgentError::NoExec { .. } => FailureKind::NotFound,
            AgentError::NotRunning { .. }
            | AgentError::Killed { .. }
            | AgentError::NoTerminal { .. }
            | AgentError::NoGuest => FailureKind::Conflict,
            AgentError::Spec { source: spec::OciSpecError::Unsupported { .. }, .. } => FailureKind::Unsupported,
            AgentError::Spec { .. } => FailureKind::Invalid,
            AgentError::StillAlive { .. } => FailureKind::Timeout,
            AgentError::Root { source, .. } => match FailureKind::from(source.source.kind()) {
                FailureKind::Exhausted => FailureKind::Exhausted,
                _ => FailureKind::Internal,
            },
            AgentError::Mount { source, .. } => source.kind(),
            AgentError::Target { source, .. } => source.kind(),
            AgentError::Volume { source, .. } => source.kind(),
            AgentError::AnonymousVolume { source, .. } => source.kind(),
            AgentError::Limits { source, .. } => source.kind(),
            AgentError::HugePages { source, .. } => source.kind(),
            AgentError::Zygote { source, .. } => source.kind(),
            AgentError::Io { .. } | AgentError::File { .. } | AgentError::Task { .. } => FailureKind::Internal,
            AgentError::CopiedInVolume(source) => source.kind(),
            AgentError::SocketVolume(source) => source.kind(),
            AgentError::Memory(source) => source.kind(),
            AgentError::OnlineCpus(source) => source.kind(),
            AgentError::EmptyDir(source) => source.kind(),
            AgentError::Disk { source } => source.kind(),
            AgentError::Hold(source) => source.kind(),
            AgentError::Restore(source) => source.kind(),
        }
    }
}
