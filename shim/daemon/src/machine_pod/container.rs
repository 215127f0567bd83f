//! Owns: what the container of a machine pod may say. It has no programs of its own: what is for these is refused, but for what
//! kubelet gives every container. Pure.

use super::MachinePod;
use super::files::ANNOTATIONS;
use super::volumes::{names_device, names_mount};
use crate::nouns::ContainerConfig;
use nacelle_base::{Classify, Kind};

/// Mounts that kubelet gives every container; a machine does without (docs/vm.md).
const KUBELETS: [&str; 4] =
    ["/etc/hosts", "/etc/hostname", "/dev/termination-log", "/var/run/secrets/kubernetes.io/serviceaccount"];

/// Something that only containers can have.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value:?}: the container of a machine pod is its machine, {hint}")]
pub struct NotForMachines {
    field: &'static str,
    value: String,
    hint: &'static str,
}

impl Classify for NotForMachines {
    fn kind(&self) -> Kind {
        Kind::Invalid
    }
}

/// Whether this can be the container of a machine pod.
pub fn check_container(machine: &MachinePod, config: &ContainerConfig) -> Result<(), NotForMachines> {
    let refuse = |field, value: &str, hint| Err(NotForMachines { field, value: value.to_owned(), hint });
    if let Some(word) = config.command.first().or(config.args.first()) {
        return refuse("config.command, args", word, "whose system says what runs in it: leave them out");
    }
    if config.privileged {
        return refuse("config.linux.security_context.privileged", "true", "which has all rights in itself");
    }
    let known = |path: &str| KUBELETS.contains(&path) || path == ANNOTATIONS || names_mount(machine, path);
    if let Some(volume) = config.node_volumes.iter().find(|volume| !known(&volume.container_path)) {
        let hint = "whose volumes are disks: this is none of the specification's; take the mount out";
        return refuse("config.mounts.container_path", &volume.container_path, hint);
    }
    if let Some(volume) = config.volumes.first() {
        return refuse("config.mounts.image", &volume.image, "whose disks come from the container's own image");
    }
    if let Some(device) = config.devices.iter().find(|device| !names_device(machine, &device.container_path)) {
        let hint = "whose devices are disks: this is none of the specification's; take it out";
        return refuse("config.devices.container_path", &device.container_path, hint);
    }
    Ok(())
}
