//! Builds QEMU's arguments for threads and queues of disks, and for disks that several VMs write to (QEMU's manual, "iothread",
//! and the disk properties "iothread", "num-queues", "share-rw"). The functions are pure.

use super::{Opt, QemuArgs};
use nacelle_model::machine::{Bus, Disk, MachineDocument};

/// Adds the threads of disks besides the main thread.
pub(super) fn add_iothreads(args: &mut QemuArgs, document: &MachineDocument) {
    let last = document.disks.iter().filter_map(|disk| disk.serving.thread).max();
    for thread in 0..last.map_or(0, |last| last + 1) {
        args.add("object", Opt::new("iothread").set("id", format!("thread{thread}")));
    }
}

/// Sets the properties of a disk's device.
pub(super) fn set_disk_properties(device: Opt, disk: &Disk, processors: u32) -> Opt {
    let virtio = disk.bus == Bus::Virtio;
    let thread = disk.serving.thread.filter(|_| virtio).map(|thread| format!("thread{thread}"));
    let queues = (disk.serving.queues && virtio).then_some(processors);
    let device = device.set_if("iothread", thread).set_if("num-queues", queues);
    device.set_if("share-rw", disk.serving.shared.then_some("on"))
}

/// Sets the properties of a disk's own controller.
pub(super) fn set_controller_queues(controller: Opt, disk: &Disk, processors: u32) -> Opt {
    controller.set_if("num_queues", disk.serving.queues.then_some(processors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::tests::sample;
    use nacelle_model::machine::{DiskSource, Serving};

    #[test]
    fn disk_properties_follow_the_specification() {
        let non_empty = |bus, serving| {
            let disk = Disk { bus, serving, ..sample("a", DiskSource::Empty { bytes: 512 }) };
            (serving_of(&disk), set_controller_queues(Opt::new("c"), &disk, 4).0)
        };
        fn serving_of(disk: &Disk) -> String {
            set_disk_properties(Opt::new("d"), disk, 4).0
        }
        let all = Serving { thread: Some(1), queues: true, shared: true };
        assert_eq!(non_empty(Bus::Virtio, all).0, "d,iothread=thread1,num-queues=4,share-rw=on");
        assert_eq!(non_empty(Bus::Scsi, all), ("d,share-rw=on".into(), "c,num_queues=4".into()));
        assert_eq!(non_empty(Bus::Virtio, Serving::default()), ("d".into(), "c".into()));
    }

    #[test]
    fn there_are_as_many_iothreads_as_disks_name() {
        let values = |threads_of: &[Option<u32>]| {
            let mut args = QemuArgs { words: Vec::new(), free_slots: None };
            let mut document = crate::qemu::tests::document();
            document.disks = threads_of
                .iter()
                .map(|thread| {
                    let serving = Serving { thread: *thread, ..Serving::default() };
                    Disk { serving, ..sample("a", DiskSource::Empty { bytes: 512 }) }
                })
                .collect();
            add_iothreads(&mut args, &document);
            args.words
        };
        assert!(values(&[None]).is_empty());
        assert_eq!(
            values(&[Some(1), None, Some(0)]),
            ["-object", "iothread,id=thread0", "-object", "iothread,id=thread1"]
        );
    }
}
