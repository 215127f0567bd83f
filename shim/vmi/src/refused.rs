//! Lists the fields, values, annotations and kinds of KubeVirt that have no meaning here, each with the reason.

/// The fields and the reasons. `[]` stands for any index of a list.
pub const FIELDS: &[(&str, &str)] = &[
    // Fields of the pod.
    ("spec.affinity", "the pod says where it may run: spec.affinity of the pod"),
    ("spec.nodeSelector", "the pod says where it may run: spec.nodeSelector of the pod"),
    ("spec.tolerations", "the pod says where it may run: spec.tolerations of the pod"),
    ("spec.topologySpreadConstraints", "the pod says where it may run: spec.topologySpreadConstraints of the pod"),
    ("spec.schedulerName", "the pod says who schedules it: spec.schedulerName of the pod"),
    ("spec.priorityClassName", "the pod says its priority: spec.priorityClassName of the pod"),
    ("spec.hostname", "the pod says its name: spec.hostname of the pod"),
    ("spec.subdomain", "the pod says its name: spec.subdomain of the pod"),
    ("spec.dnsPolicy", "the pod says how names are found: spec.dnsPolicy of the pod"),
    ("spec.dnsConfig", "the pod says how names are found: spec.dnsConfig of the pod"),
    ("spec.resourceClaims", "devices of the node are not passed through to machines"),
    ("spec.utilityVolumes", "memory dumps and backups are commands here, not volumes"),
    // CPUs and memory.
    ("spec.domain.cpu.numa", "the node's memory nodes are not shown to machines"),
    ("spec.domain.cpu.realtime", "virtual processors have no real-time priority"),
    ("spec.domain.cpu.isolateEmulatorThread", "the pod process has no processor of its own"),
    ("spec.domain.memory.reservedOverhead", "the RuntimeClass says what a machine costs: overhead.podFixed"),
    ("spec.domain.memory.fileBacked", "a machine's memory lies in memory of the node"),
    ("spec.domain.resources.overcommitGuestOverhead", "the RuntimeClass says what a machine costs: overhead.podFixed"),
    ("spec.domain.resources.claims", "devices of the node are not passed through to machines"),
    // The VM.
    ("spec.domain.launchSecurity", "memory of machines is not encrypted"),
    ("spec.domain.firmware.acpi", "tables of other vendors are not shown to machines"),
    (
        "spec.domain.firmware.kernelBoot.container.imagePullSecret",
        "kubelet pulls images, with the pod's imagePullSecrets",
    ),
    (
        "spec.domain.firmware.kernelBoot.container.imagePullPolicy",
        "kubelet pulls images, with the container's imagePullPolicy",
    ),
    ("spec.domain.clock.timer.hyperv", "machines do not show themselves as Hyper-V"),
    ("spec.domain.features.hyperv", "machines do not show themselves as Hyper-V"),
    ("spec.domain.features.hypervPassthrough", "machines do not show themselves as Hyper-V"),
    ("spec.domain.ioThreads", "the number of threads follows from the disks"),
    // Devices.
    (
        "spec.domain.devices.gpus",
        "a machine has the PCI devices (VFIO) of its container: ask for them as resources of the container",
    ),
    (
        "spec.domain.devices.hostDevices",
        "a machine has the PCI devices (VFIO) of its container: ask for them as resources of the container",
    ),
    ("spec.domain.devices.clientPassthrough", "USB devices are not redirected"),
    ("spec.domain.devices.downwardMetrics", "machines are not told of the node's load"),
    ("spec.domain.devices.panicDevices", "the console tells of a guest's panic"),
    ("spec.domain.devices.sound", "machines have no sound"),
    ("spec.domain.devices.tpm", "machines have no TPM"),
    (
        "spec.domain.devices.video",
        "autoattachGraphicsDevice says whether there is a screen; its card follows from the firmware",
    ),
    ("spec.domain.devices.useVirtioTransitional", "devices are virtio 1"),
    ("spec.domain.devices.disks[].changedBlockTracking", "there are no incremental backups"),
    ("spec.domain.devices.disks[].disk.pciAddress", "places on the bus are not chosen"),
    ("spec.domain.devices.disks[].disk.rotationRate", "guests are not told what a disk is made of"),
    ("spec.domain.devices.disks[].lun.reservation", "SCSI reservations are not passed on"),
    ("spec.domain.devices.disks[].floppy", "there are no floppy disks"),
    ("spec.domain.devices.disks[].blockSize.custom.discardGranularity", "it follows from the volume"),
    ("spec.domain.devices.interfaces[].binding", "CNI connects the pod: there are no binding plugins"),
    ("spec.domain.devices.interfaces[].slirp", "CNI connects the pod; bridge and masquerade are there"),
    ("spec.domain.devices.interfaces[].passt", "CNI connects the pod; bridge and masquerade are there"),
    ("spec.domain.devices.interfaces[].passtBinding", "CNI connects the pod; bridge and masquerade are there"),
    ("spec.domain.devices.interfaces[].macvtap", "CNI connects the pod; bridge and masquerade are there"),
    (
        "spec.domain.devices.interfaces[].sriov",
        "a machine has the PCI devices (VFIO) of its container: ask for them as resources of the container",
    ),
    ("spec.domain.devices.interfaces[].pciAddress", "places on the bus are not chosen"),
    ("spec.domain.devices.interfaces[].acpiIndex", "places on the bus are not chosen"),
    ("spec.domain.devices.interfaces[].dhcpOptions.bootFileName", "machines do not boot from the network"),
    ("spec.domain.devices.interfaces[].dhcpOptions.tftpServerName", "machines do not boot from the network"),
    ("spec.domain.devices.interfaces[].dhcpOptions.privateOptions", "only time servers are told by DHCP"),
    ("spec.domain.devices.watchdog.diag288", "it exists on s390x only"),
    // Volumes and networks.
    ("spec.volumes[].dataVolume", "there is no importer: name the claim that it fills, as persistentVolumeClaim"),
    ("spec.volumes[].ephemeral", "a claim is written to or read-only: persistentVolumeClaim with readOnly"),
    ("spec.volumes[].sysprep", "a configMap or secret with the label that the installer looks for does the same"),
    ("spec.volumes[].serviceAccount", "a secret, or a file system over the pod's projected token, does the same"),
    ("spec.volumes[].downwardMetrics", "machines are not told of the node's load"),
    ("spec.volumes[].memoryDump", "memory dumps are a command here, not a volume"),
    ("spec.volumes[].containerPath", "a file system over a volume of the pod does the same"),
    ("spec.volumes[].persistentVolumeClaim.hotpluggable", "disks of the specification are there from the start"),
    ("spec.volumes[].containerDisk.imagePullSecret", "kubelet pulls images, with the pod's imagePullSecrets"),
    ("spec.volumes[].containerDisk.imagePullPolicy", "kubelet pulls images, with the container's imagePullPolicy"),
    ("spec.volumes[].hostDisk.shared", "a file of the node belongs to that node"),
    ("spec.networks[].pod.vmNetworkCIDR", "CNI gives the pod its address"),
    ("spec.networks[].pod.vmIPv6NetworkCIDR", "CNI gives the pod its address"),
    ("spec.networks[].resourceClaim", "devices of the node are not passed through to machines"),
    // Presets.
    ("spec.selector", "a machine names its presets: vm.nacelle.dev/presets"),
    // Persistent VMs.
    ("spec.running", "runStrategy says it: Always for true, Halted for false"),
    ("spec.dataVolumeTemplates", "there is no importer: make the claim, and name it as persistentVolumeClaim"),
    ("spec.updateVolumesStrategy", "volumes are not moved while a machine runs"),
    ("spec.liveUpdateFeatures", "a machine's maximum is said by maxSockets and maxGuest"),
];

/// The values and the reasons: the end of a field's path, the value.
pub const WORDS: &[(&str, &str, &str)] = &[
    (".ioThreadsPolicy", "supplementalPool", "the number of threads follows from the disks"),
    (".runStrategy", "WaitAsReceiver", "machines are not migrated while they run"),
    (".state", "absent", "an interface that is not there is not named"),
];

/// The kinds of documents and the reasons.
pub const KINDS: &[(&str, &str)] = &[
    (
        "VirtualMachinePool",
        "a StatefulSet's pods have names and claims of their own; machines with names have a Deployment each",
    ),
    ("VirtualMachineInstanceMigration", "machines are not migrated while they run"),
    ("MigrationPolicy", "machines are not migrated while they run"),
    ("VirtualMachineSnapshot", "a command takes it: nacelle vm snapshot"),
    ("VirtualMachineRestore", "a command does it: nacelle vm restore"),
    ("VirtualMachineClone", "a command does it: nacelle vm clone"),
    ("VirtualMachineExport", "a command does it: nacelle vm export"),
    ("DataVolume", "there is no importer: make the claim, and fill it"),
    ("Template", "it has parameters: fill it in first (oc process), and convert what comes of it"),
    ("VirtualMachineTemplate", "it has parameters: fill it in first, and convert what comes of it"),
];

/// The annotations of VMs and the reasons.
pub const ANNOTATIONS: &[(&str, &str)] = &[
    ("hooks.kubevirt.io/hookSidecars", "no program changes a machine's definition: say it in the specification"),
    ("kubevirt.io/ignitiondata", "there is no data for Ignition: cloud-init has userData"),
    ("kubevirt.io/placePCIDevicesOnRootComplex", "places on the bus are not chosen"),
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
