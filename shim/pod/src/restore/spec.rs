//! Defines what the specification of a pod says about the checkpoint from which it continues.

use crate::images::Placement;
use nacelle_base::ContainerId;
use nacelle_proto::agent as proto;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The checkpoint from which a pod continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointBase {
    /// The absolute path of the directory with its files. They must not change as long as the pod lives, but may be removed.
    pub directory: PathBuf,
    /// The memory in MiB with which the kernel was started. The rest of the pod's memory was added at its start.
    pub booted_mib: u32,
    /// The bytes of the reserve that are in use.
    pub reserve_used_bytes: u64,
    /// The containers of this pod that continue.
    pub containers: Vec<CheckpointedContainer>,
    /// The images on the image disk.
    pub images: Vec<CheckpointImage>,
}

/// A container that continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointedContainer {
    /// The id of the container that was saved.
    pub saved_id: ContainerId,
    /// The id of the container in this pod.
    pub id: ContainerId,
}

impl From<&CheckpointedContainer> for proto::RestoredContainer {
    fn from(container: &CheckpointedContainer) -> Self {
        proto::RestoredContainer { saved_id: container.saved_id.to_string(), id: container.id.to_string() }
    }
}

/// An image on the image disk of the saved VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointImage {
    /// The key of the image, as in CreateContainerRequest.
    pub key: String,
    /// The number of the partition, 1 to 255.
    pub partition: u32,
    /// The position on the disk in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
    /// A container that continues uses it.
    pub is_used: bool,
}

impl From<&CheckpointImage> for Placement {
    fn from(image: &CheckpointImage) -> Placement {
        Placement { partition: image.partition, offset: image.offset, length: image.length }
    }
}
