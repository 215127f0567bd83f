//! Builds QEMU's arguments for hot-plugged disks, and for the free hot-plug slots. The functions are pure.

use super::{Opt, QemuArgs, add_file_node};
use crate::hotplug_list::{HotplugDisk, SLOTS};
use nacelle_model::machine::{Board, Cache};
use std::path::PathBuf;

/// The PCI device number whose functions are the slots.
const DEVICE: u8 = 0x1c;

/// Returns the names of the block nodes: the file, and the disk in it.
pub fn block_nodes(disk: &HotplugDisk) -> [String; 2] {
    [format!("top-added{}", disk.slot), format!("disk-added{}", disk.slot)]
}

/// Returns the id of the guest's device.
pub fn device_id(disk: &HotplugDisk) -> String {
    format!("added-{}", disk.slot)
}

/// Returns the port that a slot is plugged into; `None` if the board's bus is hot-pluggable without ports.
pub fn root_port(board: Board, slot: u8) -> Option<String> {
    (board == Board::Q35).then(|| format!("place{slot}"))
}

/// Adds the slots, and the disks in them.
pub(super) fn add_slots(args: &mut QemuArgs, board: Board, hotplug: &[(HotplugDisk, PathBuf)]) {
    for slot in 0..SLOTS {
        let Some(port) = root_port(board, slot) else { continue };
        let root = Opt::new("pcie-root-port").set("id", port).set("bus", "pcie.0").set("chassis", slot + 1);
        let root = root.set("addr", format!("{DEVICE:x}.{slot:x}"));
        args.device(if slot == 0 { root.set("multifunction", "on") } else { root });
    }
    for (disk, path) in hotplug {
        let [inner, whole] = block_nodes(disk);
        add_file_node(args, &inner, path, false, Cache::Writeback);
        let node = Opt::new("driver=qcow2").set("node-name", &whole).set("file", inner).set("discard", "unmap");
        args.add("blockdev", node);
        let virtio =
            Opt::new("virtio-blk-pci").set("id", device_id(disk)).set("drive", whole).set("serial", &disk.name);
        args.device(virtio.set_if("bus", root_port(board, disk.slot)));
    }
}
