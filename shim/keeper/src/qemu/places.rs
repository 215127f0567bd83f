//! Builds QEMU's arguments for disks that were added to a VM, and for the free slots. The functions are pure.

use super::{Args, Opt, file};
use crate::added::{Added, PLACES};
use nacelle_model::machine::{Board, Cache};
use std::path::PathBuf;

/// The PCI device number whose functions are the slots.
const DEVICE: u8 = 0x1c;

/// Returns the names of the block nodes: the file, and the disk in it.
pub fn nodes(disk: &Added) -> [String; 2] {
    [format!("top-added{}", disk.place), format!("disk-added{}", disk.place)]
}

/// Returns the id of the guest's device.
pub fn device(disk: &Added) -> String {
    format!("added-{}", disk.place)
}

/// Returns the port that a slot is plugged into; `None` if the board's bus is hot-pluggable without ports.
pub fn port(board: Board, place: u8) -> Option<String> {
    (board == Board::Q35).then(|| format!("place{place}"))
}

/// Adds the slots, and the disks in them.
pub(super) fn places(args: &mut Args, board: Board, added: &[(Added, PathBuf)]) {
    for place in 0..PLACES {
        let Some(port) = port(board, place) else { continue };
        let root = Opt::new("pcie-root-port").set("id", port).set("bus", "pcie.0").set("chassis", place + 1);
        let root = root.set("addr", format!("{DEVICE:x}.{place:x}"));
        args.device(if place == 0 { root.set("multifunction", "on") } else { root });
    }
    for (disk, path) in added {
        let [inner, whole] = nodes(disk);
        file(args, &inner, path, false, Cache::Writeback);
        let node = Opt::new("driver=qcow2").set("node-name", &whole).set("file", inner).set("discard", "unmap");
        args.add("blockdev", node);
        let virtio = Opt::new("virtio-blk-pci").set("id", device(disk)).set("drive", whole).set("serial", &disk.name);
        args.device(virtio.set_if("bus", port(board, disk.place)));
    }
}
