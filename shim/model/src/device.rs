//! Defines the devices that a container requests.

use serde::{Deserialize, Serialize};

/// A device of the node that a container requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRequest {
    /// The path in the container: below /dev, without `..`.
    pub container_path: String,
    /// The path on the node: absolute, without `..`. A directory stands for the devices in it.
    pub host_path: String,
    /// A subset of "r", "w" and "m" (mknod). Empty for a device file that the container sees and cannot open.
    pub permissions: String,
    /// The properties that do not come from the node's device.
    #[serde(default, skip_serializing_if = "DeviceAttributes::is_empty")]
    pub attributes: DeviceAttributes,
}

/// The kind of a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceFileKind {
    /// A block device.
    Block,
    /// A character device.
    Character,
    /// A named pipe, new in each container.
    Fifo,
}

/// Properties of a container's device file that the request sets. The others are those of the node's device. CDI specifications set
/// them; devices of CRI have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceAttributes {
    /// The kind. With `number`, the node needs no such device file.
    pub kind: Option<DeviceFileKind>,
    /// The major and the minor number.
    pub number: Option<(u64, u64)>,
    /// The file's permissions.
    pub mode: Option<u32>,
    /// The owner's user id.
    pub uid: Option<u32>,
    /// The owner's group id.
    pub gid: Option<u32>,
}

impl DeviceAttributes {
    /// Returns whether everything comes from the node's device.
    pub fn is_empty(&self) -> bool {
        *self == DeviceAttributes::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_an_earlier_release_has_no_attributes() {
        let text = r#"{"container_path":"/dev/a","host_path":"/dev/b","permissions":"rw"}"#;
        let mut device: DeviceRequest = serde_json::from_str(text).unwrap();
        assert!(device.attributes.is_empty());
        assert_eq!(serde_json::to_string(&device).unwrap(), text);
        device.attributes = DeviceAttributes {
            kind: Some(DeviceFileKind::Character),
            number: Some((10, 229)),
            mode: Some(0o640),
            uid: Some(1),
            gid: None,
        };
        let written = serde_json::to_string(&device).unwrap();
        assert_eq!(serde_json::from_str::<DeviceRequest>(&written).unwrap(), device);
    }
}
