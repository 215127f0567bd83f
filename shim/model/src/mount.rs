//! Defines the mounts of a container: images and files or directories of the node.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A mount option that restricts a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountOption {
    /// Set-user-id bits have no effect.
    Nosuid,
    /// Device nodes cannot be opened.
    Nodev,
    /// Programs cannot be executed.
    Noexec,
    /// Reading a file does not update its access time.
    Noatime,
}

impl MountOption {
    /// All options that a request may contain.
    pub const ALL: [MountOption; 4] =
        [MountOption::Nosuid, MountOption::Nodev, MountOption::Noexec, MountOption::Noatime];

    /// Returns the name of the option in CRI, in OCI and in mount(8).
    pub fn word(self) -> &'static str {
        match self {
            MountOption::Nosuid => "nosuid",
            MountOption::Nodev => "nodev",
            MountOption::Noexec => "noexec",
            MountOption::Noatime => "noatime",
        }
    }
}

/// The part of a requested mount that only ContainerStatus needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRequest {
    /// The mount target in the container, which names the mount.
    pub container_path: String,
    /// The request asked for an SELinux label of the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub selinux_relabel: bool,
}

/// An image that is mounted read-only into a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolume {
    /// The image as kubelet wrote it: an id or a reference.
    pub image: String,
    /// The image as the user wrote it.
    pub user_image: String,
    /// The directory of the image that is mounted; empty for the whole image.
    pub sub_path: String,
    /// The mount target in the container: absolute, without `..`.
    pub container_path: String,
    /// Whether the request asked for a recursive read-only mount; an image volume always is one.
    pub recursive_read_only: bool,
    /// Further mount options.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub options: BTreeSet<MountOption>,
}

/// Whether mounts that the node makes below a volume after the container started become visible to it, and the reverse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Propagation {
    /// Neither side sees later mounts of the other.
    #[default]
    Private,
    /// The container sees later mounts of the node.
    FromNode,
    /// Both sides see later mounts of the other.
    BothWays,
}

/// A file or directory of the node that is mounted into a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeVolume {
    /// The path on the node: absolute, without `..`. A directory is made there if nothing exists.
    pub host_path: String,
    /// The mount target in the container: absolute, without `..`.
    pub container_path: String,
    /// The container cannot write to the volume itself; it can write to mounts below it.
    pub readonly: bool,
    /// The container cannot write to mounts below the volume either.
    pub recursive_read_only: bool,
    /// The propagation of later mounts.
    pub propagation: Propagation,
    /// File owners are translated to ids of the pod's user namespace.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub id_mapped: bool,
    /// Further mount options.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub options: BTreeSet<MountOption>,
}
