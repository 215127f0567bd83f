//! Determines the devices of a container in a VM. Character devices are those that the guest's kernel has as well; block devices of the
//! node are opened here, because a pod process sees none. Opening is all that this does with a block device; it never reads or
//! writes one.

use super::find_node;
use crate::lifecycle::context::error::LifecycleError;
use crate::oci::DeviceNode;
use nacelle_model::container::ContainerConfig;
use nacelle_model::device::{DeviceAttributes, DeviceFileKind, DeviceRequest};
use nacelle_proto::pod as proto;
use nix::sys::stat::{major, minor};
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;

/// Character devices of the guest's kernel (guest/kernel) that need no hardware and have the same number on every Linux: null, zero,
/// full, random, urandom, tty, net/tun and fuse.
const OF_GUEST: [(u64, u64); 8] = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), TUN, FUSE];
const TUN: (u64, u64) = (10, 200);
const FUSE: (u64, u64) = (10, 229);
/// Paths that mean a device of the guest even if the node, which may lack the kernel's module, has no such file.
const WELL_KNOWN: [(&str, (u64, u64)); 2] = [("/dev/fuse", FUSE), ("/dev/net/tun", TUN)];
/// The number and the path of the device that starts VMs, which no guest has.
const KVM: ((u64, u64), &str) = ((10, 232), "/dev/kvm");

/// A block device of the node: the message to the pod process, and the open device.
pub(crate) type BlockDevice = (proto::BlockDevice, OwnedFd);

/// The devices of a container in a VM.
#[derive(Debug, Default)]
pub(crate) struct OfGuest {
    /// Device nodes of the guest's kernel.
    pub nodes: Vec<DeviceNode>,
    /// Block devices of the node.
    pub blocks: Vec<BlockDevice>,
}

/// Finds and opens the devices of a container in a VM.
pub(crate) fn of_guest(config: &ContainerConfig) -> Result<OfGuest, LifecycleError> {
    let mut found = OfGuest::default();
    for device in &config.devices {
        let path = || device.host_path.clone();
        let node = find_guest_node(device)?;
        let number = (node.major, node.minor);
        match node.kind {
            DeviceFileKind::Block => found.blocks.push(open_block(device)?),
            DeviceFileKind::Fifo => found.nodes.push(node),
            DeviceFileKind::Character if OF_GUEST.contains(&number) => found.nodes.push(node),
            DeviceFileKind::Character if number == KVM.0 => {
                return Err(LifecycleError::NoNestedVirtualization { path: path() });
            }
            DeviceFileKind::Character => return Err(LifecycleError::NotForMachines { path: path() }),
        }
    }
    Ok(found)
}

/// Returns the device file that a request means, of the guest if the node has none at that path.
fn find_guest_node(device: &DeviceRequest) -> Result<DeviceNode, LifecycleError> {
    let path = device.host_path.as_str();
    let error = match find_node(device) {
        Err(error @ LifecycleError::NoDevice { .. }) => error,
        other => return other,
    };
    match fs::metadata(path) {
        Ok(file) if file.is_dir() => return Err(LifecycleError::NotForMachines { path: path.to_owned() }),
        Ok(_) => return Err(error),
        Err(_) if path == KVM.1 => return Err(LifecycleError::NoNestedVirtualization { path: path.to_owned() }),
        Err(_) => {}
    }
    let (_, number) = WELL_KNOWN.into_iter().find(|(known, _)| *known == path).ok_or(error)?;
    let (kind, number) = (Some(DeviceFileKind::Character), Some(number));
    find_node(&DeviceRequest { attributes: DeviceAttributes { kind, number, ..device.attributes }, ..device.clone() })
}

/// Opens a block device of the node with the requested permissions. Symbolic links are followed.
pub(crate) fn open_block(device: &DeviceRequest) -> Result<BlockDevice, LifecycleError> {
    let path = || device.host_path.clone();
    let metadata = fs::metadata(&device.host_path).map_err(|_missing| LifecycleError::NoDevice { path: path() })?;
    if !metadata.file_type().is_block_device() {
        let device = metadata.is_dir() || metadata.file_type().is_char_device();
        let path = path();
        return Err(if device { LifecycleError::NotForMachines { path } } else { LifecycleError::NoDevice { path } });
    }
    let writable = device.permissions.contains('w');
    let way = if writable { "read and write" } else { "read" };
    let closed = |source: io::Error| LifecycleError::DeviceClosed { path: path(), way, source: Arc::new(source) };
    let mut file = File::options().read(true).write(writable).open(&device.host_path).map_err(closed)?;
    // The open file counts: the name may lead to another device by now.
    let metadata = file.metadata().map_err(closed)?;
    if !metadata.file_type().is_block_device() {
        return Err(LifecycleError::NoDevice { path: path() });
    }
    let key = format!("{}:{}", major(metadata.rdev()), minor(metadata.rdev()));
    let DeviceAttributes { number, mode, uid, gid, .. } = device.attributes;
    if let Some(expected) = number.map(|(major, minor)| format!("{major}:{minor}")).filter(|number| *number != key) {
        return Err(LifecycleError::DeviceMismatch { path: path(), expected, found: key });
    }
    // Some kernels open a read-only device for writing and then fail each write.
    let read_only = fs::read_to_string(format!("/sys/dev/block/{key}/ro")).is_ok_and(|text| text.trim() == "1");
    if writable && read_only {
        return Err(closed(io::ErrorKind::ReadOnlyFilesystem.into()));
    }
    if file.seek(SeekFrom::End(0)).map_err(closed)? == 0 {
        return Err(LifecycleError::DeviceEmpty { path: path() });
    }
    let message = proto::BlockDevice {
        key,
        path: path(),
        writable,
        container_path: device.container_path.clone(),
        access: device.permissions.clone(),
        mode: mode.unwrap_or(metadata.mode() & 0o777),
        uid: uid.unwrap_or(metadata.uid()),
        gid: gid.unwrap_or(metadata.gid()),
        is_empty_dir: false,
    };
    Ok((message, file.into()))
}
