//! Defines the errors of checkpoints, and their kinds for the caller.

use super::progress::StopCause;
use super::refusal::CheckpointRefusal;
use crate::lifecycle::context::error::LifecycleError;
use nacelle_base::files::FileError;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, ContainerId, FailureKind, PodId};
use nacelle_model::checkpoint::CheckpointManifestError;
use nacelle_pod::client::ClientError;
use std::path::PathBuf;

/// Why a pod was not saved.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The pod or a container does not exist, or is in another state.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// A container is named twice.
    #[error("container_ids has {id} twice")]
    Duplicate {
        /// The container's id.
        id: ContainerId,
    },
    /// A container of another pod is named.
    #[error("container_ids has {id}, which belongs to pod {other}")]
    OtherPod {
        /// The container's id.
        id: ContainerId,
        /// The id of its pod.
        other: PodId,
    },
    /// The pod cannot be saved.
    #[error("cannot save pod {pod}: {why}")]
    Refused {
        /// The pod's id.
        pod: PodId,
        /// The reason.
        why: CheckpointRefusal,
    },
    /// Another checkpoint of the pod is in progress.
    #[error("cannot save pod {pod}: another checkpoint of it is in progress; wait for its end")]
    InProgress {
        /// The pod's id.
        pod: PodId,
    },
    /// The directory cannot have a checkpoint.
    #[error("output_path is {path:?}: {why}")]
    Output {
        /// The path.
        path: PathBuf,
        /// The reason.
        why: OutputProblem,
    },
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The pod process failed or rejected the request.
    #[error(transparent)]
    Pod(#[from] ClientError),
    /// The checkpoint was stopped.
    #[error("cannot save pod {pod}: {cause}")]
    Stopped {
        /// The pod's id.
        pod: PodId,
        /// The reason.
        cause: StopCause,
    },
    /// A process could still change a file.
    #[error("cannot complete the checkpoint: its file {name} is still open for writing; the pod process must close it")]
    StillOpen {
        /// The file's name.
        name: &'static str,
    },
    /// A file has a length that it cannot have.
    #[error("cannot complete the checkpoint: its file {name} has {found} bytes, expected {expected}")]
    Length {
        /// The file's name.
        name: &'static str,
        /// Its length in bytes.
        found: u64,
        /// What it may have: "1024", "1 to 1024".
        expected: String,
    },
    /// The reply of the pod process is invalid.
    #[error("cannot complete the checkpoint: the pod process replied with {what}")]
    Reply {
        /// The invalid value.
        what: String,
    },
    /// The manifest cannot be encoded.
    #[error(transparent)]
    Manifest(#[from] CheckpointManifestError),
    /// The task has failed.
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Why a directory cannot have a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutputProblem {
    /// The directory does not exist.
    #[error("it does not exist; create an empty directory")]
    Missing,
    /// The path leads to something else.
    #[error("it is not a directory (a symbolic link to one is not followed)")]
    NotADirectory,
    /// The directory has entries.
    #[error("it is not empty; remove what is in it, or use another directory")]
    NotEmpty,
    /// The file system is in memory.
    #[error("it is in memory (tmpfs), which would count as memory of the pod; use a directory on a disk")]
    InMemory,
}

impl Classify for CheckpointError {
    fn kind(&self) -> FailureKind {
        match self {
            CheckpointError::Lifecycle(error) => error.kind(),
            CheckpointError::Duplicate { .. }
            | CheckpointError::OtherPod { .. }
            | CheckpointError::Output { why: OutputProblem::Missing | OutputProblem::NotADirectory, .. } => {
                FailureKind::Invalid
            }
            CheckpointError::Refused { .. }
            | CheckpointError::InProgress { .. }
            | CheckpointError::Output { why: OutputProblem::NotEmpty | OutputProblem::InMemory, .. } => {
                FailureKind::Conflict
            }
            CheckpointError::File(error) => error.kind(),
            CheckpointError::Pod(error) => error.kind(),
            CheckpointError::Stopped { cause: StopCause::Deadline, .. } => FailureKind::Timeout,
            CheckpointError::Stopped { cause: StopCause::Cancelled, .. } => FailureKind::Unavailable,
            CheckpointError::StillOpen { .. }
            | CheckpointError::Length { .. }
            | CheckpointError::Reply { .. }
            | CheckpointError::Manifest(_) => FailureKind::Internal,
            CheckpointError::Task(error) => error.kind(),
        }
    }
}
