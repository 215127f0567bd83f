//! Owns: what QEMU is told of disks that were added to a machine, and of the places for more. Pure.

use super::{Args, Opt, file};
use crate::added::{Added, PLACES};
use nacelle_model::machine::{Board, Cache};
use std::path::PathBuf;

/// The device on PCI whose functions are the places.
const DEVICE: u8 = 0x1c;

/// The nodes of the block layer: the file, and the disk in it.
pub fn nodes(disk: &Added) -> [String; 2] {
    [format!("top-added{}", disk.place), format!("disk-added{}", disk.place)]
}

/// The device of the guest.
pub fn device(disk: &Added) -> String {
    format!("added-{}", disk.place)
}

/// What a place is plugged into; none: the board's bus takes devices at any time, wherever there is room.
pub fn port(board: Board, place: u8) -> Option<String> {
    (board == Board::Q35).then(|| format!("place{place}"))
}

/// The places, and the disks in them.
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
