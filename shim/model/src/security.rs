//! Defines under which identity and with which rights a container runs.

use crate::seccomp::SeccompProfile;
use serde::{Deserialize, Serialize};

/// The user and groups that the request asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// A user id or a user name; `None` for the user that the image names.
    pub user: Option<String>,
    /// The primary group id.
    pub group: Option<u32>,
    /// Supplementary group ids.
    pub supplemental: Vec<u32>,
    /// The image's /etc/group adds no groups (`SupplementalGroupsPolicy: Strict`).
    pub strict: bool,
}

/// The user of a container, resolved against the passwd and group files of its image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerUser {
    /// The user id.
    pub uid: u32,
    /// The primary group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
}

/// The seccomp profile of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeccompPolicy {
    /// All system calls are allowed.
    #[default]
    Unconfined,
    /// The default profile of Nacelle applies.
    RuntimeDefault,
    /// A profile that was a file of the node when the container was created applies.
    Localhost(Box<SeccompProfile>),
}

/// Capabilities that are added to and dropped from the default set; names without "CAP_", "ALL" stands for all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Capabilities to add.
    pub add: Vec<String>,
    /// Capabilities to drop.
    pub drop: Vec<String>,
    /// Ambient capabilities: programs of users other than root keep them.
    pub ambient: Vec<String>,
}

/// The PID namespace of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PidMode {
    /// The container uses the pod's PID namespace or one of its own, as the pod's configuration requires.
    Pod,
    /// The container has a PID namespace of its own.
    Own,
    /// The container uses the PID namespace of the container with this id.
    Of(String),
}
