//! Checks the rules of file systems, inputs, watchdogs and the console.

use crate::cause::{Causes, Rule};
use crate::names::{NameRules, check_names, is_dns_label};
use crate::spec::{Devices, InstanceSpec};

const AT: &str = "spec.domain.devices";
/// The maximum length of the tag of a virtio-fs device.
const MAX_TAG: usize = 36;
const FILESYSTEMS: NameRules = NameRules {
    required: Rule("filesystem-name-missing"),
    well_formed: Rule("filesystem-name"),
    unique: Rule("filesystem-name-twice"),
};
const INPUTS: NameRules = NameRules {
    required: Rule("input-name-missing"),
    well_formed: Rule("input-name"),
    unique: Rule("input-name-twice"),
};

/// Checks all of these devices.
pub fn check(spec: &InstanceSpec, causes: &mut Causes) {
    filesystems(spec, causes);
    let devices = &spec.domain.devices;
    inputs(devices, causes);
    if let Some(watchdog) = &devices.watchdog {
        if watchdog.name.is_empty() {
            causes.required(Rule("watchdog-name"), format!("{AT}.watchdog.name"), "must have a name");
        }
        if watchdog.i6300esb.is_none() {
            causes.required(Rule("watchdog-card"), format!("{AT}.watchdog.i6300esb"), "is the only supported device");
        }
    }
    if devices.log_serial_console == Some(true) && devices.autoattach_serial_console == Some(false) {
        let message = "there is no console to log: autoattachSerialConsole is false";
        causes.invalid(Rule("console-log"), format!("{AT}.logSerialConsole"), true, message);
    }
    if devices.autoattach_pod_interface == Some(false) && spec.networks.iter().any(|network| network.pod.is_some()) {
        let message = "spec.networks names the pod's network";
        causes.invalid(Rule("pod-interface"), format!("{AT}.autoattachPodInterface"), false, message);
    }
}

fn filesystems(spec: &InstanceSpec, causes: &mut Causes) {
    let list = &spec.domain.devices.filesystems;
    let at = format!("{AT}.filesystems");
    check_names(list.iter().map(|one| one.name.as_str()), &at, &FILESYSTEMS, causes);
    for (index, filesystem) in list.iter().enumerate() {
        let at = format!("{at}[{index}]");
        if filesystem.virtiofs.is_none() {
            causes.required(Rule("filesystem-virtiofs"), format!("{at}.virtiofs"), "is the only supported method");
        }
        let name = &filesystem.name;
        if !is_dns_label(name) {
            continue;
        }
        if name.len() > MAX_TAG {
            let message = format!("must have at most {MAX_TAG} characters: it is the tag that the guest mounts");
            causes.invalid(Rule("filesystem-tag"), format!("{at}.name"), name, message);
        }
        let Some(volume) = spec.volumes.iter().find(|volume| volume.name == *name) else {
            let message = "spec.volumes has no volume of this name";
            causes.invalid(Rule("filesystem-volume"), format!("{at}.name"), name, message);
            continue;
        };
        let shared = ["persistentVolumeClaim", "configMap", "secret", "downwardAPI"];
        let sources = volume.sources();
        if !sources.is_empty() && !sources.iter().any(|source| shared.contains(source)) {
            let message = format!("its volume is no directory: only {} are", shared.join(", "));
            causes.invalid(Rule("filesystem-source"), format!("{at}.name"), name, message);
        }
        if spec.domain.devices.disks.iter().any(|disk| disk.name == *name) {
            let message = format!("{AT}.disks has the same volume: it is a disk or a file system");
            causes.invalid(Rule("filesystem-and-disk"), format!("{at}.name"), name, message);
        }
    }
}

fn inputs(devices: &Devices, causes: &mut Causes) {
    let at = format!("{AT}.inputs");
    check_names(devices.inputs.iter().map(|input| input.name.as_str()), &at, &INPUTS, causes);
    for (index, input) in devices.inputs.iter().enumerate() {
        if input.kind.is_none() {
            causes.required(Rule("input-type"), format!("{at}[{index}].type"), "must be tablet or keyboard");
        }
    }
    if !devices.inputs.is_empty() && devices.autoattach_graphics_device == Some(false) {
        let message = "input devices need a display, and autoattachGraphicsDevice is false";
        causes.forbidden(Rule("input-screen"), at, message);
    }
}
