//! Defines the devices that a container requests.

use serde::{Deserialize, Serialize};

/// A device of the node that a container requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRequest {
    /// The path in the container: below /dev, without `..`.
    pub container_path: String,
    /// The path on the node: absolute, without `..`. A directory stands for the devices in it.
    pub host_path: String,
    /// A subset of "r", "w" and "m" (mknod).
    pub permissions: String,
}
