//! Lists the fields of a specification that machine pods support. All others are rejected by name.

use serde_json::Value;

/// Paths of fields; `[]` stands for any entry of a list, and `*` at the end for everything below.
const FIELDS: &[&str] = &[
    "architecture",
    "startStrategy",
    // Accepted because a machine ends with its pod; the rules reject the other strategies.
    "evictionStrategy",
    "terminationGracePeriodSeconds",
    "domain.cpu.cores",
    "domain.cpu.sockets",
    "domain.cpu.threads",
    "domain.cpu.model",
    "domain.cpu.dedicatedCpuPlacement",
    "domain.cpu.features[].name",
    "domain.cpu.features[].policy",
    "domain.memory.guest",
    "domain.memory.hugepages.pageSize",
    "domain.machine.type",
    "domain.firmware.uuid",
    "domain.firmware.serial",
    "domain.firmware.kernelBoot.kernelArgs",
    "domain.firmware.kernelBoot.container.image",
    "domain.firmware.kernelBoot.container.kernelPath",
    "domain.firmware.kernelBoot.container.initrdPath",
    "domain.firmware.bootloader.bios",
    "domain.firmware.bootloader.efi.secureBoot",
    "domain.firmware.bootloader.efi.persistent",
    "domain.chassis.*",
    "domain.clock.utc",
    "domain.clock.utc.offsetSeconds",
    "domain.clock.timer.hpet.present",
    "domain.clock.timer.kvm.present",
    "domain.clock.timer.pit.present",
    "domain.clock.timer.pit.tickPolicy",
    "domain.clock.timer.rtc.present",
    "domain.clock.timer.rtc.tickPolicy",
    "domain.clock.timer.rtc.track",
    "domain.rebootPolicy",
    "domain.ioThreadsPolicy",
    "domain.resources.*",
    "domain.features.acpi.enabled",
    "domain.features.apic",
    "domain.features.apic.enabled",
    "domain.features.smm.enabled",
    "domain.devices.rng",
    "domain.devices.blockMultiQueue",
    "domain.devices.watchdog.name",
    "domain.devices.watchdog.i6300esb.action",
    "domain.devices.inputs[].*",
    "domain.devices.autoattachGraphicsDevice",
    "domain.devices.autoattachSerialConsole",
    "domain.devices.logSerialConsole",
    "domain.devices.autoattachMemBalloon",
    "domain.devices.autoattachPodInterface",
    "domain.devices.autoattachInputDevice",
    "domain.devices.disks[].name",
    "domain.devices.disks[].disk.bus",
    "domain.devices.disks[].disk.readonly",
    "domain.devices.disks[].cdrom.bus",
    "domain.devices.disks[].cdrom.readonly",
    "domain.devices.disks[].cdrom.tray",
    "domain.devices.disks[].bootOrder",
    "domain.devices.disks[].serial",
    "domain.devices.disks[].cache",
    "domain.devices.disks[].dedicatedIOThread",
    "domain.devices.disks[].shareable",
    "domain.devices.disks[].blockSize.custom.logical",
    "domain.devices.disks[].blockSize.custom.physical",
    "domain.devices.networkInterfaceMultiqueue",
    "domain.devices.filesystems[].name",
    "domain.devices.filesystems[].virtiofs",
    "domain.devices.interfaces[].name",
    "domain.devices.interfaces[].model",
    "domain.devices.interfaces[].bridge",
    "domain.devices.interfaces[].macAddress",
    "domain.devices.interfaces[].bootOrder",
    "networks[].name",
    "networks[].pod",
    "networks[].multus.networkName",
    "networks[].multus.default",
    "volumes[].name",
    "volumes[].containerDisk.image",
    "volumes[].containerDisk.path",
    "volumes[].emptyDisk.capacity",
    "volumes[].persistentVolumeClaim.claimName",
    "volumes[].persistentVolumeClaim.readOnly",
    "volumes[].hostDisk.path",
    "volumes[].hostDisk.type",
    "volumes[].hostDisk.capacity",
    "volumes[].configMap.name",
    "volumes[].configMap.optional",
    "volumes[].configMap.volumeLabel",
    "volumes[].secret.secretName",
    "volumes[].secret.optional",
    "volumes[].secret.volumeLabel",
    "volumes[].downwardAPI.volumeLabel",
    "volumes[].downwardAPI.fields[].path",
    "volumes[].downwardAPI.fields[].fieldRef.fieldPath",
    "accessCredentials[].sshPublicKey.source.secret.secretName",
    "accessCredentials[].sshPublicKey.propagationMethod.noCloud",
    "accessCredentials[].sshPublicKey.propagationMethod.configDrive",
    "accessCredentials[].sshPublicKey.propagationMethod.qemuGuestAgent.users[]",
    "accessCredentials[].userPassword.source.secret.secretName",
    "accessCredentials[].userPassword.propagationMethod.qemuGuestAgent",
    "volumes[].cloudInitNoCloud.userData",
    "volumes[].cloudInitNoCloud.userDataBase64",
    "volumes[].cloudInitNoCloud.networkData",
    "volumes[].cloudInitNoCloud.networkDataBase64",
    "volumes[].cloudInitNoCloud.secretRef.name",
    "volumes[].cloudInitNoCloud.networkDataSecretRef.name",
    "volumes[].cloudInitConfigDrive.userData",
    "volumes[].cloudInitConfigDrive.userDataBase64",
    "volumes[].cloudInitConfigDrive.networkData",
    "volumes[].cloudInitConfigDrive.networkDataBase64",
    "volumes[].cloudInitConfigDrive.secretRef.name",
    "volumes[].cloudInitConfigDrive.networkDataSecretRef.name",
];

/// Returns the unsupported fields of a document, by their paths in it.
pub fn find_unsupported(document: &Value) -> Vec<String> {
    let mut found = Vec::new();
    walk(document, String::new(), String::new(), &mut found);
    found
}

/// Returns whether the field with this path is supported, with everything below it.
pub fn is_supported(path: &str) -> bool {
    FIELDS.iter().any(|field| match field.strip_suffix(".*") {
        Some(above) => path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '['])),
        None => *field == path,
    })
}

/// Walks the document. `actual_path` is the path with list indices, `path` the same in the notation of [`FIELDS`].
fn walk(value: &Value, actual_path: String, path: String, found: &mut Vec<String>) {
    if is_supported(&path) {
        return;
    }
    let below = |key: &str, above: &str| if above.is_empty() { key.to_owned() } else { format!("{above}.{key}") };
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                walk(value, below(key, &actual_path), below(key, &path), found);
            }
        }
        Value::Array(entries) => {
            for (n, value) in entries.iter().enumerate() {
                walk(value, format!("{actual_path}[{n}]"), format!("{path}[]"), found);
            }
        }
        // An empty object above supported fields has no meaning.
        Value::Object(_) if FIELDS.iter().any(|field| field.starts_with(&format!("{path}."))) => {}
        Value::Null => {}
        _ => found.push(actual_path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unsupported_fields_are_named() {
        let document = json!({
            "domain": {
                "cpu": { "cores": 2, "maxSockets": 2 },
                "chassis": { "sku": "a" },
                "devices": {
                    "disks": [{ "name": "a", "disk": {} }, { "name": "b", "lun": { "bus": "scsi" }, "tag": "b" }],
                    "rng": {},
                },
            },
            "volumes": [{ "name": "a", "persistentVolumeClaim": { "claimName": "c", "hotpluggable": true } }],
            "livenessProbe": { "exec": { "command": ["a"] } },
        });
        let expected = [
            "domain.cpu.maxSockets",
            "domain.devices.disks[1].lun.bus",
            "domain.devices.disks[1].tag",
            "livenessProbe.exec.command[0]",
            "volumes[0].persistentVolumeClaim.hotpluggable",
        ];
        assert_eq!(find_unsupported(&document), expected);
    }
}
