//! Defines the parameters of a new container and of an exec, as plain data.

use nacelle_proto::agent::{BlockDevice, EmptyDir, ImageVolume, PidMode};

/// The parameters of a new container.
#[derive(Debug)]
pub struct CreateOptions {
    /// The container's id.
    pub id: String,
    /// The OCI runtime specification as JSON.
    pub spec: Vec<u8>,
    /// The partition of the container's image.
    pub partition: u32,
    /// The user to look up in the image's /etc/passwd; empty: the user of the specification.
    pub user: String,
    /// Add the supplemental groups that the image's /etc/group gives the user.
    pub merge_groups: bool,
    /// Keep stdin open.
    pub stdin: bool,
    /// The container whose PID namespace the new one enters; empty: none.
    pub pid_of: String,
    /// The PID namespace if `pid_of` is empty.
    pub pid_mode: PidMode,
    /// Image volumes, in the order in which they are mounted.
    pub volumes: Vec<ImageVolume>,
    /// The paths of the volumes that the container's image declares.
    pub anonymous_volumes: Vec<String>,
    /// Block devices of the node.
    pub devices: Vec<BlockDevice>,
    /// emptyDir volumes in memory or on disks of the VM.
    pub empty_dirs: Vec<EmptyDir>,
}

/// The parameters of an exec.
#[derive(Debug)]
pub struct ExecOptions {
    /// The container's id.
    pub id: String,
    /// The exec's own id.
    pub exec_id: String,
    /// The program and its arguments.
    pub args: Vec<String>,
    /// Give the process a terminal.
    pub tty: bool,
    /// Keep stdin open.
    pub stdin: bool,
    /// The terminal's columns and rows; 0: unknown.
    pub size: (u16, u16),
}
