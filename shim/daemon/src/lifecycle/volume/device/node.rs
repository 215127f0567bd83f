//! Determines the devices of a container without a guest.

use super::{find_node, identify};
use crate::lifecycle::context::error::LifecycleError;
use crate::oci::DeviceNode;
use nacelle_model::container::ContainerConfig;
use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The largest number of devices of one container.
const MOST: usize = 4096;
/// The largest depth of subdirectories below a requested path.
const DEPTH: usize = 8;
/// Paths in /dev that each container has for itself.
const OWN: [&str; 6] = ["/dev/pts", "/dev/shm", "/dev/fd", "/dev/mqueue", "/dev/console", "/dev/ptmx"];

/// Returns the devices of a container without a guest: the requested ones and, if `privileged` names a directory (/dev), all
/// devices in it.
pub(crate) fn of_node(config: &ContainerConfig, privileged: Option<&Path>) -> Result<Vec<DeviceNode>, LifecycleError> {
    let mut found = BTreeMap::new();
    if let Some(directory) = privileged {
        walk(directory, Path::new("/dev"), "rwm", DEPTH, &mut found);
        found.retain(|path, _| !OWN.iter().any(|own| path.starts_with(own)));
    }
    for device in &config.devices {
        let (directory, at) = (Path::new(&device.host_path), Path::new(&device.container_path));
        let mut of_this = BTreeMap::new();
        // The properties of a CDI specification are those of one device.
        if device.attributes.is_empty() && directory.is_dir() {
            walk(directory, at, &device.permissions, DEPTH, &mut of_this);
        } else {
            of_this.insert(at.to_owned(), find_node(device)?);
        }
        if of_this.is_empty() {
            return Err(LifecycleError::NoDevice { path: device.host_path.clone() });
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
    let (kind, (major, minor)) = identify(metadata)?;
    Some(DeviceNode {
        path: at.to_str()?.to_owned(),
        kind,
        major,
        minor,
        mode: metadata.mode() & 0o777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        access: access.to_owned(),
    })
}
