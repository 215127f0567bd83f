//! Defines a container as its validated request describes it.

use crate::StringMap;
use crate::device::DeviceRequest;
use crate::digest::ImageId;
use crate::mount::{ImageVolume, MountRequest, NodeVolume};
use crate::resources::Resources;
use crate::security::{Capabilities, PidMode, RunAs, SeccompPolicy};
use serde::{Deserialize, Serialize};

/// A container as its request describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerConfig {
    /// The container's name, unique in the pod together with `attempt`.
    pub name: String,
    /// The number of earlier attempts of kubelet to create this container.
    pub attempt: u32,
    /// The image as kubelet wrote it: an id or a reference.
    pub image: String,
    /// The image as the user wrote it.
    pub user_image: String,
    /// The command; if not empty, it replaces the image's entry point.
    pub command: Vec<String>,
    /// The arguments; if not empty, they replace those of the image.
    pub args: Vec<String>,
    /// The working directory; if not empty, it replaces that of the image.
    pub working_dir: String,
    /// Environment variables, added to those of the image.
    pub envs: Vec<(String, String)>,
    /// Labels, returned unchanged.
    pub labels: StringMap,
    /// Annotations, returned unchanged.
    pub annotations: StringMap,
    /// The log file as kubelet wrote it, relative to the pod's log directory.
    pub log_path: String,
    /// Standard input stays open.
    pub stdin: bool,
    /// Standard input is closed after the first client detaches.
    pub stdin_once: bool,
    /// The container has a terminal.
    pub tty: bool,
    /// The number of the stop signal; `None` for the signal that the image names, or SIGTERM.
    pub stop_signal: Option<u32>,
    /// Resource limits.
    pub resources: Resources,
    /// The container is privileged (in the guest).
    pub privileged: bool,
    /// Capabilities to add and to drop.
    pub capabilities: Capabilities,
    /// The PID namespace.
    pub pid: PidMode,
    /// The user and groups.
    pub run_as: RunAs,
    /// The root file system is read-only.
    pub readonly_rootfs: bool,
    /// The `no_new_privs` flag is set: set-user-id programs give no privileges.
    pub no_new_privs: bool,
    /// Paths that appear empty.
    pub masked_paths: Vec<String>,
    /// Paths that are read-only.
    pub readonly_paths: Vec<String>,
    /// The seccomp profile.
    pub seccomp: SeccompPolicy,
    /// The name of the AppArmor profile of the node's kernel that confines it; `None` for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apparmor: Option<String>,
    /// The name of the stop signal in CRI, if the number has several ("SIGNAL_SIGIOT"); empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stop_signal_name: String,
    /// All mounts in the order of the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<MountRequest>,
    /// Images that are mounted into the container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<ImageVolume>,
    /// Files and directories of the node that are mounted into the container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_volumes: Vec<NodeVolume>,
    /// Devices that the container requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceRequest>,
}

/// The image of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerImage {
    /// The id of the image.
    pub id: ImageId,
    /// A reference by digest if the store knew one, otherwise the id.
    pub reference: String,
}
