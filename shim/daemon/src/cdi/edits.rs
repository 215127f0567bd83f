//! Turns the edits of specifications into changes of a container's request. An edit that cannot be made is refused, and none is
//! ignored.

use super::spec::{CdiDeviceNode, ContainerEdits, SpecMount, cut};
use super::{CdiEdits, CdiError, CdiMount};
use nacelle_model::device::{DeviceAttributes, DeviceFileKind, DeviceRequest};
use nacelle_model::mount::Propagation;
use std::path::Path;

/// The largest major and minor number of a device on Linux.
const MAX_NUMBER: (u64, u64) = (0xfff, 0xf_ffff);
/// The mode of a device file without one.
const DEFAULT_MODE: u32 = 0o666;
/// Permissions of a device that a container cannot open.
const NO_PERMISSIONS: &str = "none";

/// Adds edits of the device `name` in the file `path`.
pub(super) fn apply_edits(
    edits: &mut CdiEdits,
    requested: &ContainerEdits,
    name: &str,
    path: &Path,
) -> Result<(), CdiError> {
    let unsupported = |what: String| CdiError::Unsupported { name: name.to_owned(), path: path.to_owned(), what };
    let rule = |rule: String| CdiError::Rule { name: name.to_owned(), path: path.to_owned(), rule };
    if let Some(what) = find_unsupported(requested) {
        return Err(unsupported(what));
    }
    for line in &requested.env {
        let pair = line.split_once('=').filter(|(key, _)| !key.is_empty());
        let (key, value) = pair.ok_or_else(|| rule(format!("{:?} is not NAME=VALUE", cut(line))))?;
        edits.env.push((key.to_owned(), value.to_owned()));
    }
    for node in &requested.device_nodes {
        edits.devices.push(device(node).map_err(rule)?);
    }
    for mount in &requested.mounts {
        if !matches!(mount.kind.as_str(), "" | "bind" | "none") {
            return Err(unsupported(format!(
                "a mount of type {:?} at {:?}",
                cut(&mount.kind),
                cut(&mount.container_path)
            )));
        }
        edits.mounts.push(bind_mount(mount));
    }
    // Group 0 is what an absent group is in Go.
    edits.groups.extend(requested.additional_gids.iter().filter(|group| **group != 0));
    Ok(())
}

/// Returns the first edit that is not supported.
fn find_unsupported(requested: &ContainerEdits) -> Option<String> {
    if let Some(hook) = requested.hooks.first() {
        return Some(format!("the {} hook {:?}", cut(&hook.hook_name), cut(&hook.path)));
    }
    if let Some(device) = requested.net_devices.first() {
        return Some(format!("the network interface {:?} of the node (netDevices)", cut(&device.host_interface_name)));
    }
    requested.intel_rdt.as_ref().map(|_| "cache and memory bandwidth allocation (intelRdt)".to_owned())
}

/// Returns the request for a device node, or the rule that the node breaks.
fn device(node: &CdiDeviceNode) -> Result<DeviceRequest, String> {
    let kind = match node.kind.as_str() {
        "" => None,
        "b" => Some(DeviceFileKind::Block),
        "c" | "u" => Some(DeviceFileKind::Character),
        "p" => Some(DeviceFileKind::Fifo),
        other => {
            return Err(format!(
                "the device {:?} has the type {:?}: b, c, u or p is needed",
                cut(&node.path),
                cut(other)
            ));
        }
    };
    let numbers = u64::try_from(node.major).ok().zip(u64::try_from(node.minor).ok());
    let numbers = numbers.filter(|(major, minor)| *major <= MAX_NUMBER.0 && *minor <= MAX_NUMBER.1);
    let Some(numbers) = numbers else {
        let (path, major, minor) = (cut(&node.path), node.major, node.minor);
        return Err(format!("the device {path:?} has the number {major}:{minor}, which no device has"));
    };
    let permissions = match node.permissions.as_str() {
        "" => "rwm",
        NO_PERMISSIONS => "",
        permissions => permissions,
    };
    Ok(DeviceRequest {
        container_path: node.path.clone(),
        host_path: if node.host_path.is_empty() { &node.path } else { &node.host_path }.clone(),
        permissions: permissions.to_owned(),
        attributes: DeviceAttributes {
            kind,
            // The number 0 is what an absent number is in Go.
            number: (numbers.0 != 0).then_some(numbers),
            // As other runtimes give it: the container's user need not be that of the node's file.
            mode: Some(node.file_mode.map_or(DEFAULT_MODE, |mode| mode & 0o777)),
            uid: node.uid,
            gid: node.gid,
        },
    })
}

fn bind_mount(mount: &SpecMount) -> CdiMount {
    let mut propagation = Propagation::Private;
    let mut options = Vec::new();
    for option in &mount.options {
        match option.as_str() {
            // Every volume has these.
            "bind" | "rbind" | "rw" => {}
            "private" | "rprivate" => propagation = Propagation::Private,
            "slave" | "rslave" => propagation = Propagation::FromNode,
            "shared" | "rshared" => propagation = Propagation::BothWays,
            _ => options.push(option.clone()),
        }
    }
    CdiMount { host_path: mount.host_path.clone(), container_path: mount.container_path.clone(), options, propagation }
}
