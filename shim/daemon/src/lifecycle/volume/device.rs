//! Determines the device nodes of a container: those of the node as they are at its creation, those that every guest's kernel
//! has, and the node's block devices, which are opened here because a pod process sees none. Opening is all that it does with a
//! block device; it never reads or writes one.

use crate::lifecycle::context::error::LifecycleError;
use crate::oci::DeviceNode;
use nacelle_model::container::ContainerConfig;
use nacelle_model::device::DeviceRequest;
use nacelle_proto::pod as proto;
use nix::sys::stat::{major, minor};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest number of devices of one container.
const MOST: usize = 4096;
/// The largest depth of subdirectories below a requested path.
const DEPTH: usize = 8;
/// Paths in /dev that each container has for itself.
const OWN: [&str; 6] = ["/dev/pts", "/dev/shm", "/dev/fd", "/dev/mqueue", "/dev/console", "/dev/ptmx"];
/// Device nodes of the guest's kernel (guest/kernel) that need no hardware: path, major, minor.
const OF_GUEST: [(&str, u64, u64); 2] = [("/dev/fuse", 10, 229), ("/dev/net/tun", 10, 200)];

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
        match OF_GUEST.into_iter().find(|(path, ..)| *path == device.host_path) {
            Some((_, major, minor)) => {
                let (path, access) = (device.container_path.clone(), device.permissions.clone());
                let node = DeviceNode { path, block: false, major, minor, mode: 0o666, uid: 0, gid: 0, access };
                found.nodes.push(node);
            }
            None => found.blocks.push(block(device)?),
        }
    }
    Ok(found)
}

/// Opens a block device of the node with the requested permissions. Symbolic links are followed.
pub(crate) fn block(device: &DeviceRequest) -> Result<BlockDevice, LifecycleError> {
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
        mode: metadata.mode() & 0o777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        is_empty_dir: false,
    };
    Ok((message, file.into()))
}

/// Returns the devices of a container without a guest: the requested ones and, if `privileged` names a directory (/dev), all
/// devices in it.
pub(crate) fn of_node(config: &ContainerConfig, privileged: Option<&Path>) -> Result<Vec<DeviceNode>, LifecycleError> {
    let mut found = BTreeMap::new();
    if let Some(directory) = privileged {
        walk(directory, Path::new("/dev"), "rwm", DEPTH, &mut found);
        found.retain(|path, _| !OWN.iter().any(|own| path.starts_with(own)));
    }
    for device in &config.devices {
        let none = || LifecycleError::NoDevice { path: device.host_path.clone() };
        let metadata = fs::metadata(&device.host_path).map_err(|_missing| none())?;
        let (at, access) = (Path::new(&device.container_path), device.permissions.as_str());
        let mut of_this = BTreeMap::new();
        if metadata.is_dir() {
            walk(Path::new(&device.host_path), at, access, DEPTH, &mut of_this);
        } else if let Some(node) = node(&metadata, at, access) {
            of_this.insert(at.to_owned(), node);
        }
        if of_this.is_empty() {
            return Err(none());
        }
        found.extend(of_this);
    }
    if found.len() > MOST {
        return Err(LifecycleError::TooManyDevices { most: MOST });
    }
    Ok(found.into_values().collect())
}

/// Collects the devices in a directory; symbolic links and unreadable entries are skipped.
fn walk(directory: &Path, at: &Path, access: &str, depth: usize, found: &mut BTreeMap<PathBuf, DeviceNode>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let (Ok(metadata), at) = (entry.metadata(), at.join(entry.file_name())) else { continue };
        if metadata.is_dir() && depth > 0 {
            walk(&entry.path(), &at, access, depth - 1, found);
        } else if let Some(node) = node(&metadata, &at, access)
            && found.len() <= MOST
        {
            found.insert(at, node);
        }
    }
}

/// Returns `None` if this is not a device, or its name is not UTF-8.
fn node(metadata: &Metadata, at: &Path, access: &str) -> Option<DeviceNode> {
    let kind = metadata.file_type();
    (kind.is_block_device() || kind.is_char_device()).then_some(())?;
    Some(DeviceNode {
        path: at.to_str()?.to_owned(),
        block: kind.is_block_device(),
        major: major(metadata.rdev()),
        minor: minor(metadata.rdev()),
        mode: metadata.mode() & 0o777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        access: access.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    fn config(devices: &[(&str, &str)]) -> ContainerConfig {
        let mut config = (*nacelle_model::testing::container(1, 1).config).clone();
        let device = |(host_path, container_path): &(&str, &str)| DeviceRequest {
            host_path: (*host_path).into(),
            container_path: (*container_path).into(),
            permissions: "rw".into(),
        };
        config.devices = devices.iter().map(device).collect();
        config
    }

    #[test]
    fn devices_of_the_node_are_found_with_numbers_and_modes() {
        let [zero] = of_node(&config(&[("/dev/zero", "/dev/nothing")]), None).unwrap().try_into().unwrap();
        assert_eq!((zero.path.as_str(), zero.block, zero.major, zero.minor), ("/dev/nothing", false, 1, 5));
        assert_eq!((zero.mode & 0o600, zero.access.as_str()), (0o600, "rw"));
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        std::os::unix::fs::symlink("/dev/full", directory.path().join("link")).unwrap();
        fs::write(directory.path().join("file"), "").unwrap();
        let [full] = of_node(&config(&[(&path("link"), "/dev/x/y")]), None).unwrap().try_into().unwrap();
        assert_eq!((full.path.as_str(), full.minor), ("/dev/x/y", 7));
        for none in [path("none"), path("file"), path("")] {
            let error = of_node(&config(&[(&none, "/dev/x")]), None).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid);
            assert!(error.to_string().contains(&none), "{error}");
        }
        // A privileged container gets no links, files or paths of its own; a requested device takes precedence.
        assert_eq!(of_node(&config(&[]), Some(directory.path())).unwrap(), []);
        let all = of_node(&config(&[("/dev/zero", "/dev/null")]), Some("/dev".as_ref())).unwrap();
        let null = all.iter().find(|node| node.path == "/dev/null").unwrap();
        assert_eq!((null.minor, null.access.as_str()), (5, "rw"));
        assert!(all.iter().any(|node| node.path == "/dev/full" && node.access == "rwm"));
        assert!(all.iter().all(|node| !node.path.starts_with("/dev/pts") && node.path != "/dev/ptmx"));
    }

    #[test]
    fn a_guest_has_devices_of_its_own() {
        let found = of_guest(&config(&[("/dev/net/tun", "/dev/tun")])).unwrap();
        let [tun] = found.nodes.try_into().unwrap();
        assert_eq!((tun.path.as_str(), tun.major, tun.minor), ("/dev/tun", 10, 200));
        assert!(found.blocks.is_empty());
    }

    #[test]
    fn of_the_node_only_block_devices_reach_a_guest() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("link")).unwrap();
        for (host, kind) in [
            ("/dev/kmsg".to_owned(), FailureKind::Unsupported),
            (path("link"), FailureKind::Unsupported),
            (path(""), FailureKind::Unsupported),
            (path("file"), FailureKind::Invalid),
            (path("none"), FailureKind::Invalid),
        ] {
            let error = of_guest(&config(&[(&host, "/dev/x")])).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(&host), "{error}");
        }
    }
}
