//! Checks the container of a machine pod. It runs no programs: settings for programs are rejected, except those that kubelet
//! gives to every container. Pure.

use super::files::ANNOTATIONS_PATH;
use super::passthrough::is_vfio;
use super::volumes::{is_disk_device, is_machine_image_volume, is_machine_mount};
use nacelle_base::cpulist;
use nacelle_base::{Classify, FailureKind};
use nacelle_model::container::ContainerConfig;
use nacelle_model::machine::Board;
use nacelle_model::machine_pod::MachinePod;

/// Mounts that kubelet adds to every container; a machine ignores them (docs/user/vm/index.md).
const KUBELET_MOUNTS: [&str; 4] =
    ["/etc/hosts", "/etc/hostname", "/dev/termination-log", "/var/run/secrets/kubernetes.io/serviceaccount"];

/// A setting that only containers support.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value:?}: the container of a machine pod is its VM, {hint}")]
pub struct UnsupportedContainerField {
    field: &'static str,
    value: String,
    hint: &'static str,
}

impl Classify for UnsupportedContainerField {
    fn kind(&self) -> FailureKind {
        FailureKind::Invalid
    }
}

/// Returns the CPUs of the node to which the machine's vCPUs are pinned, from the container's CPU list; empty if they are not
/// pinned.
pub fn pinned_cpus(machine: &MachinePod, config: &ContainerConfig) -> Result<Vec<u32>, UnsupportedContainerField> {
    if machine.processors.pins.is_none() {
        return Ok(Vec::new());
    }
    let count = usize::try_from(machine.processors.count()).unwrap_or(usize::MAX);
    let list = &config.resources.cpuset_cpus;
    let pins: Vec<u32> = cpulist::parse(list).unwrap_or_default().into_iter().take(count).collect();
    if pins.len() == count {
        return Ok(pins);
    }
    Err(UnsupportedContainerField {
        field: "config.linux.resources.cpuset_cpus",
        value: list.clone(),
        hint: "and each of its vCPUs needs a dedicated CPU of the node (dedicatedCpuPlacement): use kubelet's static CPU manager, the QoS class \
               Guaranteed and a whole number of CPUs",
    })
}

/// Checks that this can be the container of a machine pod.
pub fn check_container(machine: &MachinePod, config: &ContainerConfig) -> Result<(), UnsupportedContainerField> {
    pinned_cpus(machine, config)?;
    let reject = |field, value: &str, hint| Err(UnsupportedContainerField { field, value: value.to_owned(), hint });
    if let Some(word) = config.command.first().or(config.args.first()) {
        return reject("config.command, args", word, "whose guest system determines what it runs: remove them");
    }
    if config.privileged {
        return reject(
            "config.linux.security_context.privileged",
            "true",
            "in which privileges have no meaning: remove it",
        );
    }
    let is_known =
        |path: &str| KUBELET_MOUNTS.contains(&path) || path == ANNOTATIONS_PATH || is_machine_mount(machine, path);
    if let Some(volume) = config.node_volumes.iter().find(|volume| !is_known(&volume.container_path)) {
        let hint = "whose volumes are disks, and the specification has no disk at this path: remove the mount";
        return reject("config.mounts.container_path", &volume.container_path, hint);
    }
    if let Some(volume) = config.volumes.iter().find(|volume| !is_machine_image_volume(machine, &volume.container_path))
    {
        let hint = "which has no disk in this image volume: containerDisk volumes are at /run/nacelle/vm/NAME, a kernel at /run/nacelle/vm/kernel-boot";
        return reject("config.mounts.container_path", &volume.container_path, hint);
    }
    if let Some(volume) = config.volumes.iter().find(|volume| !volume.sub_path.is_empty()) {
        let hint = "whose disk is selected by containerDisk.path: remove it";
        return reject("config.mounts.image_sub_path", &volume.sub_path, hint);
    }
    let (vfio, disks): (Vec<_>, Vec<_>) = config.devices.iter().partition(|device| is_vfio(device));
    if let Some(device) = vfio.first().filter(|_| machine.board == Board::Microvm) {
        let hint = "whose board microvm has no PCI: use another domain.machine.type, or remove the device";
        return reject("config.devices.host_path", &device.host_path, hint);
    }
    if let Some(device) = disks.iter().find(|device| !is_disk_device(machine, &device.container_path)) {
        let hint = "whose devices are disks and PCI devices (/dev/vfio), and the specification has no disk at this path: remove the device";
        return reject("config.devices.container_path", &device.container_path, hint);
    }
    Ok(())
}
