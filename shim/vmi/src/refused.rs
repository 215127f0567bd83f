//! Lists the fields, values, annotations and kinds of KubeVirt that have no meaning here, each with the reason.

/// The fields and the reasons. `[]` stands for any index of a list.
pub const FIELDS: &[(&str, &str)] = &[
    // Fields of the pod.
    ("spec.affinity", "scheduling belongs to the pod; set spec.affinity of the pod"),
    ("spec.nodeSelector", "scheduling belongs to the pod; set spec.nodeSelector of the pod"),
    ("spec.tolerations", "scheduling belongs to the pod; set spec.tolerations of the pod"),
    ("spec.topologySpreadConstraints", "scheduling belongs to the pod; set spec.topologySpreadConstraints of the pod"),
    ("spec.schedulerName", "scheduling belongs to the pod; set spec.schedulerName of the pod"),
    ("spec.priorityClassName", "the priority belongs to the pod; set spec.priorityClassName of the pod"),
    ("spec.hostname", "the host name belongs to the pod; set spec.hostname of the pod"),
    ("spec.subdomain", "the subdomain belongs to the pod; set spec.subdomain of the pod"),
    ("spec.dnsPolicy", "DNS belongs to the pod; set spec.dnsPolicy of the pod"),
    ("spec.dnsConfig", "DNS belongs to the pod; set spec.dnsConfig of the pod"),
    (
        "spec.resourceClaims",
        "resource claims are not supported: request PCI devices (VFIO) as resources of the container",
    ),
    ("spec.utilityVolumes", "memory dumps and backups are commands, not volumes"),
    // CPUs and memory.
    ("spec.domain.cpu.numa", "the node's NUMA topology is not exposed to VMs"),
    ("spec.domain.cpu.realtime", "vCPUs have no real-time priority"),
    ("spec.domain.cpu.isolateEmulatorThread", "the pod process has no dedicated CPU"),
    ("spec.domain.memory.reservedOverhead", "the RuntimeClass defines the overhead: overhead.podFixed"),
    ("spec.domain.memory.fileBacked", "the memory of a VM is memory of the node, not a file"),
    ("spec.domain.resources.overcommitGuestOverhead", "the RuntimeClass defines the overhead: overhead.podFixed"),
    (
        "spec.domain.resources.claims",
        "resource claims are not supported: request PCI devices (VFIO) as resources of the container",
    ),
    // The VM.
    ("spec.domain.launchSecurity", "the memory of VMs is not encrypted"),
    ("spec.domain.firmware.acpi", "custom ACPI tables are not supported"),
    (
        "spec.domain.firmware.kernelBoot.container.imagePullSecret",
        "kubelet pulls images, with the pod's imagePullSecrets",
    ),
    (
        "spec.domain.firmware.kernelBoot.container.imagePullPolicy",
        "kubelet pulls images, with the container's imagePullPolicy",
    ),
    ("spec.domain.clock.timer.hyperv", "Hyper-V enlightenments are not supported"),
    ("spec.domain.features.hyperv", "Hyper-V enlightenments are not supported"),
    ("spec.domain.features.hypervPassthrough", "Hyper-V enlightenments are not supported"),
    ("spec.domain.ioThreads", "the number of threads follows from the disks"),
    // Devices.
    (
        "spec.domain.devices.gpus",
        "a VM has the PCI devices (VFIO) of its container: request them as resources of the container",
    ),
    (
        "spec.domain.devices.hostDevices",
        "a VM has the PCI devices (VFIO) of its container: request them as resources of the container",
    ),
    ("spec.domain.devices.clientPassthrough", "USB devices are not redirected"),
    ("spec.domain.devices.downwardMetrics", "metrics of the node are not exposed to VMs"),
    ("spec.domain.devices.panicDevices", "the console shows a guest's panic"),
    ("spec.domain.devices.sound", "VMs have no sound device"),
    ("spec.domain.devices.tpm", "VMs have no TPM"),
    ("spec.domain.devices.video", "autoattachGraphicsDevice enables the display; its device follows from the firmware"),
    ("spec.domain.devices.useVirtioTransitional", "devices are virtio 1"),
    ("spec.domain.devices.disks[].changedBlockTracking", "there are no incremental backups"),
    ("spec.domain.devices.disks[].disk.pciAddress", "bus addresses cannot be chosen"),
    ("spec.domain.devices.disks[].disk.rotationRate", "the medium of a disk is not reported to guests"),
    ("spec.domain.devices.disks[].lun.reservation", "SCSI reservations are not passed on"),
    ("spec.domain.devices.disks[].floppy", "there are no floppy disks"),
    ("spec.domain.devices.disks[].blockSize.custom.discardGranularity", "it follows from the volume"),
    ("spec.domain.devices.interfaces[].binding", "CNI connects the pod: there are no binding plugins"),
    ("spec.domain.devices.interfaces[].slirp", "CNI connects the pod; use bridge or masquerade"),
    ("spec.domain.devices.interfaces[].passt", "CNI connects the pod; use bridge or masquerade"),
    ("spec.domain.devices.interfaces[].passtBinding", "CNI connects the pod; use bridge or masquerade"),
    ("spec.domain.devices.interfaces[].macvtap", "CNI connects the pod; use bridge or masquerade"),
    (
        "spec.domain.devices.interfaces[].sriov",
        "a VM has the PCI devices (VFIO) of its container: request them as resources of the container",
    ),
    ("spec.domain.devices.interfaces[].pciAddress", "bus addresses cannot be chosen"),
    ("spec.domain.devices.interfaces[].acpiIndex", "bus addresses cannot be chosen"),
    ("spec.domain.devices.interfaces[].dhcpOptions.bootFileName", "VMs do not boot from the network"),
    ("spec.domain.devices.interfaces[].dhcpOptions.tftpServerName", "VMs do not boot from the network"),
    ("spec.domain.devices.interfaces[].dhcpOptions.privateOptions", "DHCP passes only NTP servers to the guest"),
    ("spec.domain.devices.watchdog.diag288", "it exists on s390x only"),
    // Volumes and networks.
    ("spec.volumes[].dataVolume", "there is no importer: name the claim that it fills, as persistentVolumeClaim"),
    ("spec.volumes[].ephemeral", "a claim is writable or read-only: persistentVolumeClaim with readOnly"),
    ("spec.volumes[].sysprep", "a configMap or secret with the label that the installer looks for does the same"),
    ("spec.volumes[].serviceAccount", "a secret, or a file system over the pod's projected token, does the same"),
    ("spec.volumes[].downwardMetrics", "metrics of the node are not exposed to VMs"),
    ("spec.volumes[].memoryDump", "memory dumps are a command, not a volume"),
    ("spec.volumes[].containerPath", "a file system over a volume of the pod does the same"),
    ("spec.volumes[].persistentVolumeClaim.hotpluggable", "disks of the specification are there from the start"),
    ("spec.volumes[].containerDisk.imagePullSecret", "kubelet pulls images, with the pod's imagePullSecrets"),
    ("spec.volumes[].containerDisk.imagePullPolicy", "kubelet pulls images, with the container's imagePullPolicy"),
    ("spec.volumes[].hostDisk.shared", "a file of the node belongs to that node"),
    ("spec.networks[].pod.vmNetworkCIDR", "CNI gives the pod its address"),
    ("spec.networks[].pod.vmIPv6NetworkCIDR", "CNI gives the pod its address"),
    (
        "spec.networks[].resourceClaim",
        "resource claims are not supported: request PCI devices (VFIO) as resources of the container",
    ),
    // Presets.
    ("spec.selector", "a VM names its presets in vm.nacelle.dev/presets"),
    // Persistent VMs.
    ("spec.running", "use runStrategy: Always for true, Halted for false"),
    ("spec.dataVolumeTemplates", "there is no importer: create the claim, and name it as persistentVolumeClaim"),
    ("spec.updateVolumesStrategy", "volumes are not migrated while a VM runs"),
    ("spec.liveUpdateFeatures", "maxSockets and maxGuest set the maximum size of a VM"),
];

/// The values and the reasons: the end of a field's path, the value.
pub const WORDS: &[(&str, &str, &str)] = &[
    (".ioThreadsPolicy", "supplementalPool", "the number of threads follows from the disks"),
    (".runStrategy", "WaitAsReceiver", "VMs are not live-migrated"),
    (".state", "absent", "an absent interface must not be listed"),
];

/// The kinds of documents and the reasons.
pub const KINDS: &[(&str, &str)] = &[
    (
        "VirtualMachinePool",
        "a StatefulSet's pods have names and claims of their own; machines with names have a Deployment each",
    ),
    ("VirtualMachineInstanceMigration", "VMs are not live-migrated"),
    ("MigrationPolicy", "VMs are not live-migrated"),
    ("VirtualMachineSnapshot", "a command takes it: nacelle vm snapshot"),
    ("VirtualMachineRestore", "a command does it: nacelle vm restore"),
    ("VirtualMachineClone", "a command does it: nacelle vm clone"),
    ("VirtualMachineExport", "a command does it: nacelle vm export"),
    ("DataVolume", "there is no importer: create the claim, and fill it"),
    ("Template", "it has parameters: process it first (oc process), and convert the result"),
    ("VirtualMachineTemplate", "it has parameters: process it first, and convert the result"),
];

/// The annotations of VMs and the reasons.
pub const ANNOTATIONS: &[(&str, &str)] = &[
    ("hooks.kubevirt.io/hookSidecars", "no hook changes the definition of a VM: put the change into the specification"),
    ("kubevirt.io/ignitiondata", "Ignition is not supported: use userData of cloud-init"),
    ("kubevirt.io/placePCIDevicesOnRootComplex", "bus addresses cannot be chosen"),
];

/// Returns the reason that a kind of document is rejected, if KubeVirt has that kind.
pub fn kind(kind: &str) -> Option<&'static str> {
    KINDS.iter().find(|(known, _)| *known == kind).map(|(_, reason)| *reason)
}

/// Returns the reason that a field is rejected, if KubeVirt has that field.
pub fn reason(at: &str) -> Option<&'static str> {
    let any = anywhere(at);
    FIELDS.iter().find(|(field, _)| *field == any).map(|(_, reason)| *reason)
}

/// Returns the reason that a value is rejected, if KubeVirt has that value.
pub fn word(at: &str, word: &str) -> Option<&'static str> {
    WORDS.iter().find(|(end, known, _)| at.ends_with(end) && *known == word).map(|(_, _, reason)| *reason)
}

/// Returns a path without list indexes, and without the template above a run.
fn anywhere(at: &str) -> String {
    let mut any = String::with_capacity(at.len());
    let mut inside = false;
    for c in at.chars() {
        match c {
            '[' => {
                inside = true;
                any.push('[');
            }
            ']' => {
                inside = false;
                any.push(']');
            }
            _ if inside => {}
            c => any.push(c),
        }
    }
    match any.strip_prefix("spec.template.spec.") {
        Some(run) => format!("spec.{run}"),
        None => any,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_lists_do_not_matter() {
        assert!(reason("spec.volumes[17].dataVolume").is_some());
        assert!(reason("spec.template.spec.volumes[0].dataVolume").is_some());
        assert_eq!(reason("spec.volumes[0].nonsense"), None);
        assert!(word("spec.domain.ioThreadsPolicy", "supplementalPool").is_some());
    }

    #[test]
    fn no_field_is_both_known_and_refused() {
        let schema = crate::schema::of::<crate::spec::InstanceSpec>();
        for (path, _) in FIELDS {
            let mut at = Some(&schema);
            for key in path.split('.').skip(1) {
                let (key, list) = key.strip_suffix("[]").map_or((key, false), |key| (key, true));
                at = at.and_then(|schema| schema["properties"].get(key));
                if list {
                    at = at.and_then(|schema| schema.get("items"));
                }
            }
            assert!(at.is_none(), "{path}");
        }
    }
}
