//! Checks the rules of disks and of the boot order.

use crate::cause::{Causes, Rule};
use crate::names::{NameRules, check_names, is_dns_label, is_printable};
use crate::spec::{Bus, Cache, CustomBlockSize, Disk, InstanceSpec, Io};
use std::collections::BTreeMap;

const AT: &str = "spec.domain.devices.disks";
/// The maximum number of disks of any board.
const MAX_DISKS: usize = 32;
const NAMES: NameRules =
    NameRules { required: Rule("disk-name-missing"), well_formed: Rule("disk-name"), unique: Rule("disk-name-twice") };

/// Checks all disks.
pub fn check(spec: &InstanceSpec, causes: &mut Causes) {
    let disks = &spec.domain.devices.disks;
    if disks.len() > MAX_DISKS {
        let message = format!("must have at most {MAX_DISKS} disks, and has {}", disks.len());
        causes.too_long(Rule("disks-most"), AT, message);
    }
    check_names(disks.iter().map(|disk| disk.name.as_str()), AT, &NAMES, causes);
    let mut serials: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, disk) in disks.iter().enumerate() {
        let at = format!("{AT}[{index}]");
        if is_dns_label(&disk.name) && !spec.volumes.iter().any(|volume| volume.name == disk.name) {
            let message = "spec.volumes has no volume of this name";
            causes.invalid(Rule("disk-volume"), format!("{at}.name"), &disk.name, message);
        }
        target(disk, &at, causes);
        kept(disk, &at, causes);
        if !disk.serial.is_empty()
            && let Some(first) = serials.insert(&disk.serial, index)
        {
            let message = format!("{AT}[{first}] has this serial number");
            causes.duplicate(Rule("disk-serial-twice"), format!("{at}.serial"), &disk.serial, message);
        }
    }
    order(spec, causes);
}

fn target(disk: &Disk, at: &str, causes: &mut Causes) {
    let kinds = [disk.disk.is_some(), disk.cdrom.is_some(), disk.lun.is_some()];
    if kinds.iter().filter(|there| **there).count() > 1 {
        causes.forbidden(Rule("disk-kinds"), at, "must be one of disk, cdrom and lun");
    }
    if let Some(cdrom) = &disk.cdrom {
        if cdrom.readonly == Some(false) {
            causes.invalid(Rule("cdrom-readonly"), format!("{at}.cdrom.readonly"), false, "a disc cannot be written");
        }
        if let Some(bus @ (Bus::Virtio | Bus::Usb)) = cdrom.bus {
            causes.unsupported(Rule("cdrom-bus"), format!("{at}.cdrom.bus"), bus, &["sata", "scsi"]);
        }
    }
    if let Some(lun) = &disk.lun
        && let Some(bus @ (Bus::Virtio | Bus::Usb | Bus::Sata)) = lun.bus
    {
        causes.unsupported(Rule("lun-bus"), format!("{at}.lun.bus"), bus, &["scsi"]);
    }
    if disk.dedicated_io_thread == Some(true) && disk.bus() != Some(Bus::Virtio) {
        let message = "only a disk on the bus virtio has a thread of its own";
        causes.invalid(Rule("disk-thread-bus"), format!("{at}.dedicatedIOThread"), true, message);
    }
}

fn kept(disk: &Disk, at: &str, causes: &mut Causes) {
    if disk.serial.len() > 20 || !disk.serial.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
        let message = "must be at most 20 letters, digits, '-', '_' and '.': virtio supports no more";
        causes.invalid(Rule("disk-serial"), format!("{at}.serial"), &disk.serial, message);
    }
    if disk.tag.len() > 64 || !is_printable(&disk.tag) {
        let message = "must be at most 64 printable ASCII characters";
        causes.invalid(Rule("disk-tag"), format!("{at}.tag"), &disk.tag, message);
    }
    if disk.io == Some(Io::Native) && disk.cache.is_some_and(|cache| cache != Cache::None) {
        let message = "native needs the cache none";
        causes.invalid(Rule("disk-io-cache"), format!("{at}.io"), disk.io, message);
    }
    if disk.shareable == Some(true) && disk.cache.is_some_and(|cache| cache != Cache::None) {
        let message = "a disk that several VMs write to needs the cache none";
        causes.invalid(Rule("disk-shareable-cache"), format!("{at}.shareable"), true, message);
    }
    let Some(size) = &disk.block_size else { return };
    let at = format!("{at}.blockSize");
    match (&size.custom, &size.match_volume) {
        (Some(_), Some(_)) => causes.forbidden(Rule("block-size-both"), at, "must be one of custom and matchVolume"),
        (None, None) => causes.required(Rule("block-size-none"), at, "must be one of custom and matchVolume"),
        (Some(custom), None) => blocks(custom, &format!("{at}.custom"), causes),
        (None, Some(_)) => {}
    }
}

fn blocks(size: &CustomBlockSize, at: &str, causes: &mut Causes) {
    for (name, bytes) in [("logical", size.logical), ("physical", size.physical)] {
        let at = format!("{at}.{name}");
        match bytes {
            None => causes.required(Rule("block-size-missing"), at, "must be set"),
            Some(bytes) if !bytes.is_power_of_two() || !(512..=2 << 20).contains(&bytes) => {
                causes.invalid(Rule("block-size"), at, bytes, "must be a power of two between 512 and 2097152");
            }
            Some(_) => {}
        }
    }
    if let (Some(logical), Some(physical)) = (size.logical, size.physical)
        && logical > physical
    {
        let message = format!("must be at most {at}.physical, which is {physical}");
        causes.invalid(Rule("block-size-order"), format!("{at}.logical"), logical, message);
    }
}

/// Checks the boot order, which disks and interfaces share.
fn order(spec: &InstanceSpec, causes: &mut Causes) {
    let devices = &spec.domain.devices;
    let disks = devices.disks.iter().enumerate().map(|(index, disk)| (format!("{AT}[{index}]"), disk.boot_order));
    let interfaces = devices.interfaces.iter().enumerate();
    let interfaces =
        interfaces.map(|(index, one)| (format!("spec.domain.devices.interfaces[{index}]"), one.boot_order));
    let mut taken: BTreeMap<u32, String> = BTreeMap::new();
    for (at, order) in disks.chain(interfaces) {
        let Some(order) = order else { continue };
        let field = format!("{at}.bootOrder");
        if order == 0 {
            causes.invalid(Rule("boot-order"), field, order, "must be at least 1");
        } else if let Some(first) = taken.get(&order) {
            causes.duplicate(Rule("boot-order-twice"), field, order, format!("{first} has this boot order"));
        } else {
            taken.insert(order, at);
        }
    }
}
