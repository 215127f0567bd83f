//! Defines the errors of restores.

use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::text::clip;
use nacelle_base::files::FileError;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, FailureKind};
use nacelle_model::checkpoint::CheckpointManifestError;
use nacelle_model::digest::ImageId;
use serde_json::Value;
use std::path::PathBuf;

/// A pod cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum PodRestoreError {
    /// A step that all pods have.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// The directory does not exist.
    #[error("cannot restore a pod from {}: it does not exist", path.display())]
    NoDirectory {
        /// The path of the directory.
        path: PathBuf,
    },
    /// There is no complete checkpoint at the path.
    #[error("cannot restore a pod from {}: {why}", path.display())]
    Source {
        /// The path of the directory.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
    /// A file of the checkpoint cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The manifest cannot be read.
    #[error(transparent)]
    Manifest(#[from] CheckpointManifestError),
    /// A file of the checkpoint has another length than the manifest says.
    #[error(
        "cannot restore the pod: the file {name} of the checkpoint has {found} bytes, and its manifest says {expected}"
    )]
    Length {
        /// The file's name.
        name: &'static str,
        /// Its length in bytes.
        found: u64,
        /// The length in the manifest.
        expected: u64,
    },
    /// The request, or this node, does not fit the checkpoint.
    #[error("cannot restore the pod: {0}")]
    Incompatible(Incompatibility),
    /// The request names a container twice.
    #[error("container_configs names the container {name:?} twice")]
    Duplicate {
        /// The container's name.
        name: String,
    },
    /// The restore was stopped; nothing of the pod remains.
    #[error("cannot restore the pod: {why}")]
    Stopped {
        /// The reason.
        why: &'static str,
        /// The time limit of the request has passed.
        is_deadline: bool,
    },
    /// The task has failed.
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// What differs between a checkpoint and the request or the node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatibility {
    /// A setting.
    #[error("{what} is {here} now, and {saved} in the checkpoint")]
    Setting {
        /// The setting, with the container if it belongs to one.
        what: String,
        /// The value in the checkpoint.
        saved: String,
        /// The value of the request or the node.
        here: String,
    },
    /// The CPUs of this node lack a feature.
    #[error("the CPUs of this node lack the feature {feature}, which the checkpoint uses")]
    CpuFeature {
        /// The name of the feature as in /proc/cpuinfo.
        feature: String,
    },
    /// A container of the checkpoint is not in the request.
    #[error("container_configs lacks the container {name:?} of the checkpoint")]
    MissingContainer {
        /// The container's name.
        name: String,
    },
    /// A container of the request is not in the checkpoint.
    #[error("the checkpoint has no container {name:?}")]
    OtherContainer {
        /// The container's name.
        name: String,
    },
    /// Two containers of the checkpoint have the same name.
    #[error("the checkpoint has two containers {name:?}, which a request cannot tell apart")]
    SameName {
        /// The name.
        name: String,
    },
    /// An image of the checkpoint has no place on the image disk, or an invalid one.
    #[error("image {image} {why} on the image disk of the checkpoint")]
    ImagePlacement {
        /// The id of the image.
        image: ImageId,
        /// The reason.
        why: &'static str,
    },
    /// Mounts share one volume now and did not in the checkpoint, or the reverse.
    #[error(
        "container {name:?} has a volume at {path} that other mounts share now and not in the checkpoint, or the reverse; mount the \
         volumes as in the checkpoint"
    )]
    SharedVolume {
        /// The container's name.
        name: String,
        /// The path in the container.
        path: String,
    },
    /// A container has another volume.
    #[error("container {name:?} has a volume at {path} {}", if *is_saved { "in the checkpoint only" } else { "that is not in the checkpoint" })]
    Volume {
        /// The container's name.
        name: String,
        /// The path in the container.
        path: String,
        /// The checkpoint has the volume, and the request does not.
        is_saved: bool,
    },
    /// The engine has no checkpoints.
    #[error(
        "the engine of handler {handler} cannot continue a saved VM; use a handler with engine kvm and transparent memory"
    )]
    Engine {
        /// The handler's name.
        handler: String,
    },
}

impl Incompatibility {
    /// A setting of a kind that is compared as JSON.
    pub(super) fn of_values(what: String, saved: &Value, here: &Value) -> Incompatibility {
        Incompatibility::Setting { what, saved: clip(&saved.to_string()), here: clip(&here.to_string()) }
    }
}

impl From<Incompatibility> for PodRestoreError {
    fn from(what: Incompatibility) -> PodRestoreError {
        PodRestoreError::Incompatible(what)
    }
}

impl Classify for PodRestoreError {
    fn kind(&self) -> FailureKind {
        match self {
            PodRestoreError::Lifecycle(error) => error.kind(),
            PodRestoreError::File(error) => error.kind(),
            PodRestoreError::NoDirectory { .. } => FailureKind::NotFound,
            PodRestoreError::Duplicate { .. } => FailureKind::Invalid,
            PodRestoreError::Source { .. }
            | PodRestoreError::Manifest(_)
            | PodRestoreError::Length { .. }
            | PodRestoreError::Incompatible(_) => FailureKind::Conflict,
            PodRestoreError::Stopped { is_deadline: true, .. } => FailureKind::Timeout,
            PodRestoreError::Stopped { .. } => FailureKind::Unavailable,
            PodRestoreError::Task(error) => error.kind(),
        }
    }
}
