//! Checks the container of a machine pod. It runs no programs: settings for programs are rejected, except those that kubelet
//! gives to every container. Pure.

use super::files::ANNOTATIONS;
use super::passed::is_vfio;
use super::volumes::{names_device, names_image, names_mount};
use nacelle_base::cpulist;
use nacelle_base::{Classify, Kind};
use nacelle_model::container::ContainerConfig;
use nacelle_model::machine::Board;
use nacelle_model::machine_pod::MachinePod;

/// Mounts that kubelet adds to every container; a machine ignores them (docs/user/vm/index.md).
const KUBELETS: [&str; 4] =
    ["/etc/hosts", "/etc/hostname", "/dev/termination-log", "/var/run/secrets/kubernetes.io/serviceaccount"];

/// A setting that only containers support.
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

/// Returns the CPUs of the node to which the machine's vCPUs are pinned, from the container's CPU list; empty if they are not
/// pinned.
pub fn pins(machine: &MachinePod, config: &ContainerConfig) -> Result<Vec<u32>, NotForMachines> {
    if machine.processors.pins.is_none() {
        return Ok(Vec::new());
    }
    let count = usize::try_from(machine.processors.count()).unwrap_or(usize::MAX);
    let list = &config.resources.cpuset_cpus;
    let pins: Vec<u32> = cpulist::parse(list).unwrap_or_default().into_iter().take(count).collect();
    if pins.len() == count {
        return Ok(pins);
    }
    Err(NotForMachines {
        field: "config.linux.resources.cpuset_cpus",
        value: list.clone(),
        hint: "each of whose processors has one of the node's to itself (dedicatedCpuPlacement): as many are needed, as kubelet's static CPU manager \
               gives them to pods that are Guaranteed and ask for whole ones",
    })
}

/// Checks that this can be the container of a machine pod.
pub fn check_container(machine: &MachinePod, config: &ContainerConfig) -> Result<(), NotForMachines> {
    pins(machine, config)?;
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
    if let Some(volume) = config.volumes.iter().find(|volume| !names_image(machine, &volume.container_path)) {
        let hint = "which has no disk in this image volume: containerDisk volumes are at /run/nacelle/vm/NAME, a kernel at /run/nacelle/vm/kernel-boot";
        return refuse("config.mounts.container_path", &volume.container_path, hint);
    }
    if let Some(volume) = config.volumes.iter().find(|volume| !volume.sub_path.is_empty()) {
        let hint = "whose disk is named by containerDisk.path: leave it out";
        return refuse("config.mounts.image_sub_path", &volume.sub_path, hint);
    }
    let (passed, disks): (Vec<_>, Vec<_>) = config.devices.iter().partition(|device| is_vfio(device));
    if let Some(device) = passed.first().filter(|_| machine.board == Board::Microvm) {
        let hint = "whose board microvm has no PCI: say another domain.machine.type, or leave the device out";
        return refuse("config.devices.host_path", &device.host_path, hint);
    }
    if let Some(device) = disks.iter().find(|device| !names_device(machine, &device.container_path)) {
        let hint =
            "whose devices are disks, and PCI devices by /dev/vfio: this is none of the specification's; take it out";
        return refuse("config.devices.container_path", &device.container_path, hint);
    }
    Ok(())
}
