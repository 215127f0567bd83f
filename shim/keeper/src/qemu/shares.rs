//! Builds QEMU's arguments for the VM's memory, and for directories of the node that are shared with the guest (QEMU's manual,
//! "memory-backend-memfd" and "vhost-user-fs-pci"). The file-server process accesses the guest's memory directly, so the memory
//! must be shared. The functions are pure.

use super::{Opt, QemuArgs};
use nacelle_base::share::QUEUE_SIZE;
use nacelle_model::machine::MachineDocument;
use std::path::PathBuf;

/// Adds the VM's memory.
pub(super) fn add_memory(args: &mut QemuArgs, document: &MachineDocument) {
    let memory = format!("{}M", document.memory_mib);
    args.add("m", Opt::new(&memory));
    let shared = !document.filesystems.is_empty();
    let kind = if document.hugepages || shared { "memory-backend-memfd" } else { "memory-backend-ram" };
    let ram = Opt::new(kind).set("id", "ram").set("size", &memory);
    let ram = if shared { ram.set("share", "on") } else { ram };
    // Allocated at the start, because a missing huge page later would kill QEMU.
    let ram = match document.hugepages {
        true => {
            let size = if document.largest_pages { "1G" } else { "2M" };
            ram.set("hugetlb", "on").set("hugetlbsize", size).set("prealloc", "on")
        }
        false => ram,
    };
    args.add("object", ram);
}

/// Adds the devices of the file systems at these sockets.
pub(super) fn add_filesystems(args: &mut QemuArgs, document: &MachineDocument, sockets: &[PathBuf]) {
    for (n, (filesystem, socket)) in document.filesystems.iter().zip(sockets).enumerate() {
        let id = format!("share{n}");
        args.add("chardev", Opt::new("socket").set("id", &id).set("path", socket.display()));
        let device = args.virtio("vhost-user-fs").set("chardev", id);
        args.device(device.set("tag", &filesystem.name).set("queue-size", QUEUE_SIZE));
    }
}
