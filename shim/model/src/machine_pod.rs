//! Defines the machine of a machine pod before its disks are resolved.

use crate::machine::{CloudInit, MachineDocument};
use serde::{Deserialize, Serialize};

/// The machine of a machine pod whose disks are not resolved yet.
pub type MachinePod = MachineDocument<RequestedDiskSource>;

/// The contents of a disk as the specification requests them, before images and volumes are resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestedDiskSource {
    /// A disk in an image.
    Image {
        /// The image as the specification names it.
        image: String,
        /// The path of the disk in the image; empty for the only file in `/disk`.
        path: String,
    },
    /// Zeros.
    Empty {
        /// The size in bytes.
        bytes: u64,
    },
    /// A claim: a block device of the container, or a mount with a file in it.
    Claim {
        /// The name of the claim.
        claim: String,
    },
    /// A file of the node that is mounted into the container.
    HostDisk {
        /// The path of the file.
        path: String,
        /// The size in bytes of a file to create; `None` if the file exists.
        create: Option<u64>,
    },
    /// Files that kubelet wrote into a mount.
    Files {
        /// The source for messages: "configMap settings".
        what: String,
        /// The label of the disk.
        label: String,
        /// Files that must exist.
        expected: Vec<String>,
    },
    /// Data for cloud-init.
    CloudInit(CloudInit),
    /// Data for cloud-init, parts of which are in Secrets.
    CloudInitOf {
        /// The data outside of Secrets.
        data: CloudInit,
        /// The Secret with user data.
        user: Option<String>,
        /// The Secret with network data.
        network: Option<String>,
        /// Secrets with public SSH keys.
        keys: Vec<String>,
    },
}
