//! Determines the device nodes of a container: those of the node as they are at its creation, and in a VM those that every guest's
//! kernel has, and the node's block devices.

mod guest;
mod node;

pub(crate) use guest::{BlockDevice, of_guest, open_block};
pub(crate) use node::of_node;

use crate::lifecycle::context::error::LifecycleError;
use crate::oci::DeviceNode;
use nacelle_model::device::{DeviceAttributes, DeviceFileKind, DeviceRequest};
use nix::sys::stat::{major, minor};
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// The permissions of a device file if neither the request nor the node has any.
const DEFAULT_MODE: u32 = 0o666;

/// Returns the device file that a request means: the node's, with what the request sets instead. Symbolic links are followed. A
/// request with kind and number needs no device of the node.
fn find_node(device: &DeviceRequest) -> Result<DeviceNode, LifecycleError> {
    let path = || device.host_path.clone();
    let DeviceAttributes { kind, number, mode, uid, gid } = device.attributes;
    let file = fs::metadata(&device.host_path).ok().filter(|file| !file.is_dir() && !file.is_file());
    let (kind, (major, minor)) = match (kind, number, file.as_ref().and_then(identify)) {
        (Some(DeviceFileKind::Fifo), ..) => (DeviceFileKind::Fifo, (0, 0)),
        (Some(kind), Some(number), _) => (kind, number),
        (Some(expected), None, Some((found, _))) if expected != found => {
            let (expected, found) = (kind_name(expected).to_owned(), kind_name(found).to_owned());
            return Err(LifecycleError::DeviceMismatch { path: path(), expected, found });
        }
        (_, _, Some((kind, of_node))) => (kind, number.unwrap_or(of_node)),
        (_, _, None) => return Err(LifecycleError::NoDevice { path: path() }),
    };
    Ok(DeviceNode {
        path: device.container_path.clone(),
        kind,
        major,
        minor,
        mode: mode.or(file.as_ref().map(|file| file.mode() & 0o777)).unwrap_or(DEFAULT_MODE),
        uid: uid.or(file.as_ref().map(Metadata::uid)).unwrap_or(0),
        gid: gid.or(file.as_ref().map(Metadata::gid)).unwrap_or(0),
        access: device.permissions.clone(),
    })
}

/// Returns kind and number of a device file; `None` if it is none.
fn identify(file: &Metadata) -> Option<(DeviceFileKind, (u64, u64))> {
    let kind = file.file_type();
    (kind.is_block_device() || kind.is_char_device()).then(|| {
        let kind = if kind.is_block_device() { DeviceFileKind::Block } else { DeviceFileKind::Character };
        (kind, (major(file.rdev()), minor(file.rdev())))
    })
}

fn kind_name(kind: DeviceFileKind) -> &'static str {
    match kind {
        DeviceFileKind::Block => "a block device",
        DeviceFileKind::Character => "a character device",
        DeviceFileKind::Fifo => "a named pipe",
    }
}

#[cfg(test)]
mod tests;
