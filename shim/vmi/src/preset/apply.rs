//! Merges presets, an instance type and a preference into a specification. Presets and instance types must not conflict with it,
//! and an error names both sources; a preference only sets fields that are not set.

use super::{Catalogue, PreferenceSpec, Topology};
use crate::annotations::PodSettings;
use crate::cause::{Causes, Rule};
use crate::spec::{Disk, Firmware, InstanceSpec};
use crate::tree::{ROOT, Tree};
use crate::version::{typed, written};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What was applied from the catalogue, and the fields that it set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Applied {
    /// The paths of fields and their sources, where the source is not the document.
    pub fields: BTreeMap<String, String>,
    /// The name of the instance type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instancetype: Option<String>,
    /// The name of the preference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference: Option<String>,
    /// The names of the presets, in their order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub presets: Vec<String>,
}

/// Merges into the tree what the settings name.
pub fn apply(
    mut tree: Tree,
    settings: &PodSettings,
    catalogue: &Catalogue,
    causes: &mut Causes,
) -> (InstanceSpec, Applied) {
    for name in &settings.presets {
        match catalogue.presets.get(name) {
            Some(preset) => {
                if let Value::Object(domain) = written(&preset.domain) {
                    tree.merge(&domain, &["domain"], &format!("preset {name}"), Rule("preset-conflict"), causes);
                }
            }
            None => unknown("presets", "preset", name, catalogue.presets.keys(), causes),
        }
    }
    let preference = settings.preference.as_ref().and_then(|name| {
        let found = catalogue.preferences.get(name);
        if found.is_none() {
            unknown("preference", "preference", name, catalogue.preferences.keys(), causes);
        }
        found.map(|spec| (name, spec))
    });
    if let Some(name) = &settings.instancetype {
        match catalogue.instancetypes.get(name) {
            Some(_) => {
                let topology = preference.and_then(|(_, spec)| spec.cpu.preferred_cpu_topology);
                size(&mut tree, name, topology.unwrap_or(Topology::Sockets), catalogue, causes);
            }
            None => unknown("instancetype", "instance type", name, catalogue.instancetypes.keys(), causes),
        }
    }
    let Tree { value, mut from } = tree;
    // The shape was checked where each source was parsed.
    let (mut spec, wrong) = typed::<InstanceSpec>(Value::Object(value), ROOT);
    causes.extend(wrong);
    if let Some((name, preference)) = preference {
        prefer(&mut spec, preference, &format!("preference {name}"), &mut from);
        demand(&spec, preference, name, causes);
    }
    let applied = Applied {
        fields: from,
        instancetype: settings.instancetype.clone(),
        preference: settings.preference.clone(),
        presets: settings.presets.clone(),
    };
    (spec, applied)
}

fn unknown<'a>(field: &str, what: &str, name: &str, known: impl Iterator<Item = &'a String>, causes: &mut Causes) {
    const MOST: usize = 20;
    let known: Vec<&str> = known.map(String::as_str).take(MOST).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    let message = format!("there is no {what} of this name on this node; there are: {known}");
    causes.invalid(Rule("preset-unknown"), format!("spec.{field}"), name, message);
}

/// Sets the size of an instance type. The specification must not set one itself.
fn size(tree: &mut Tree, name: &str, topology: Topology, catalogue: &Catalogue, causes: &mut Causes) {
    let Some(kind) = catalogue.instancetypes.get(name) else { return };
    let from = format!("instance type {name}");
    let rule = Rule("instancetype-conflict");
    let cpu = &kind.cpu;
    let memory = &kind.memory;
    let mut fields: Vec<(&[&str], Value)> = Vec::new();
    if let Some(guest) = cpu.guest {
        let mut free = true;
        for part in ["cores", "sockets", "threads"] {
            let path = ["domain", "cpu", part];
            if let Some(said) = tree.get(&path).cloned() {
                let at = format!("spec.domain.cpu.{part}");
                let other = tree.source(&at);
                let message = format!("{other} says it, and {from} says how many processors there are ({guest})");
                causes.conflict(rule, at, said, message);
                free = false;
            }
        }
        let path: &[&str] = match topology {
            Topology::Cores => &["domain", "cpu", "cores"],
            Topology::Sockets => &["domain", "cpu", "sockets"],
            Topology::Threads => &["domain", "cpu", "threads"],
        };
        if free {
            fields.push((path, json!(guest)));
        }
    }
    if !cpu.model.is_empty() {
        fields.push((&["domain", "cpu", "model"], json!(cpu.model)));
    }
    if let Some(dedicated) = cpu.dedicated_cpu_placement {
        fields.push((&["domain", "cpu", "dedicatedCpuPlacement"], json!(dedicated)));
    }
    if let Some(most) = cpu.max_sockets {
        fields.push((&["domain", "cpu", "maxSockets"], json!(most)));
    }
    if let Some(guest) = &memory.guest {
        fields.push((&["domain", "memory", "guest"], json!(guest)));
    }
    if let Some(most) = &memory.max_guest {
        fields.push((&["domain", "memory", "maxGuest"], json!(most)));
    }
    if let Some(pages) = &memory.hugepages {
        fields.push((&["domain", "memory", "hugepages"], json!(pages)));
    }
    for (path, value) in fields {
        tree.set(path, value, &from, rule, causes);
    }
}

/// Sets the fields of a preference that are not set.
fn prefer(spec: &mut InstanceSpec, preference: &PreferenceSpec, from: &str, fields: &mut BTreeMap<String, String>) {
    let mut said = |field: String| drop(fields.insert(field, from.to_owned()));
    let devices = &preference.devices;
    for (index, disk) in spec.domain.devices.disks.iter_mut().enumerate() {
        let at = format!("spec.domain.devices.disks[{index}]");
        if disk.cache.is_none() && devices.preferred_disk_cache.is_some() {
            disk.cache = devices.preferred_disk_cache;
            said(format!("{at}.cache"));
        }
        if plug(disk, preference) {
            said(at);
        }
    }
    for (index, interface) in spec.domain.devices.interfaces.iter_mut().enumerate() {
        if interface.model.is_none() && devices.preferred_interface_model.is_some() {
            interface.model = devices.preferred_interface_model;
            said(format!("spec.domain.devices.interfaces[{index}].model"));
        }
    }
    let screen = &mut spec.domain.devices.autoattach_graphics_device;
    if screen.is_none() && devices.preferred_autoattach_graphics_device.is_some() {
        *screen = devices.preferred_autoattach_graphics_device;
        said("spec.domain.devices.autoattachGraphicsDevice".to_owned());
    }
    if let Some(efi) = &preference.firmware.preferred_efi {
        let firmware = spec.domain.firmware.get_or_insert_with(Firmware::default);
        if firmware.bootloader.is_none() && firmware.kernel_boot.is_none() {
            firmware.bootloader = Some(crate::spec::Bootloader { bios: None, efi: Some(efi.clone()) });
            said("spec.domain.firmware.bootloader".to_owned());
        }
    }
    let board = &preference.machine.preferred_machine_type;
    if !board.is_empty() && spec.domain.machine.is_none() {
        spec.domain.machine = Some(crate::spec::Board { kind: board.clone() });
        said("spec.domain.machine".to_owned());
    }
    let grace = preference.preferred_termination_grace_period_seconds;
    if spec.termination_grace_period_seconds.is_none() && grace.is_some() {
        spec.termination_grace_period_seconds = grace;
        said("spec.terminationGracePeriodSeconds".to_owned());
    }
}

/// Sets the bus of a disk from the preference. Returns whether it did.
fn plug(disk: &mut Disk, preference: &PreferenceSpec) -> bool {
    if disk.bus().is_some() {
        return false;
    }
    let devices = &preference.devices;
    match (&mut disk.cdrom, &mut disk.lun) {
        (Some(cdrom), _) => cdrom.bus = devices.preferred_cdrom_bus,
        (None, Some(_)) => return false,
        (None, None) => match devices.preferred_disk_bus {
            Some(bus) => disk.disk.get_or_insert_with(Default::default).bus = Some(bus),
            None => return false,
        },
    }
    disk.bus().is_some()
}

/// Checks the requirements of a preference.
fn demand(spec: &InstanceSpec, preference: &PreferenceSpec, name: &str, causes: &mut Causes) {
    let rule = Rule("preference-requirement");
    if let Some(least) = preference.requirements.cpu.guest {
        let count = spec.domain.cpu.as_ref().map_or(Some(1), crate::spec::Cpu::count);
        if count.is_some_and(|count| count < least) {
            let message = format!("preference {name} demands at least {least} virtual processors");
            causes.invalid(rule, "spec.domain.cpu", count, message);
        }
    }
    let guest = spec.domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
    if let (Some(least), Some(guest)) = (&preference.requirements.memory.guest, guest)
        && guest.bytes() < least.bytes()
    {
        causes.invalid(rule, "spec.domain.memory.guest", guest, format!("preference {name} demands at least {least}"));
    }
}
