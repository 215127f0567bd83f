//! Provides fuzz harnesses for accesses to ports and addresses that belong to no virtio device, and for files that are loaded as kernels.

use super::bus::DeviceBus;
use super::genid::GenerationId;
use super::kernel::{self, KernelEntry};
use super::layout;
use super::legacy::{COM1, COM1_PORTS, I8042, I8042_PORTS, KeyboardController, SerialPort};
use crate::Memory;
use crate::transport::vhost_user::harness::memfd;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use vm_memory::GuestAddress;

/// Performs accesses of three bytes each: kind and width, position, and value (repeated to the width of the access).
pub(crate) fn ports(data: &[u8]) {
    let (resets, printed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (reset, print) = (resets.clone(), printed.clone());
    let keyboard = KeyboardController::new(move || {
        reset.fetch_add(1, Ordering::Relaxed);
    });
    let sink = Box::new(move |bytes: &[u8]| {
        print.fetch_add(bytes.len(), Ordering::Relaxed);
    });
    let (serial, _line) = SerialPort::new(sink).expect("a serial port");
    let serial = Arc::new(serial);
    let mut bus = DeviceBus::default();
    bus.insert(I8042, I8042_PORTS, Arc::new(keyboard));
    bus.insert(COM1, COM1_PORTS, serial.clone());
    let (address, _) = layout::GENERATION_ID;
    bus.insert(address, layout::WINDOW_SIZE, Arc::new(GenerationId::new().expect("an id")));
    let mut writes = 0;
    for access in data.chunks_exact(3) {
        let [how, place, value] = access else { continue };
        let start = [I8042, COM1, address, u64::MAX - 4][usize::from(how >> 2 & 3)];
        let at = start.wrapping_add(u64::from(*place));
        let mut bytes = vec![*value; 1 << (how & 3)];
        if how & 0x10 == 0 {
            bus.read(at, &mut bytes);
        } else {
            bus.write(at, &bytes);
            writes += 1;
        }
    }
    serial.restore(&serial.save());
    assert!(resets.load(Ordering::Relaxed) <= writes && printed.load(Ordering::Relaxed) <= writes);
}

/// Loads these bytes as a kernel.
pub(crate) fn image(data: &[u8]) {
    const MIB: u32 = 16;
    let memory = Memory::from_ranges(&[(GuestAddress(0), (MIB as usize) << 20)]).expect("memory");
    let file = memfd(data.len() as u64);
    file.write_all_at(data, 0).expect("a file");
    let path = std::path::PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if let Ok(loaded) = kernel::load(&memory, layout::low_end(MIB), &path) {
        let (KernelEntry::Long(entry) | KernelEntry::Pvh(entry)) = loaded.entry;
        assert!(entry < loaded.end && loaded.end <= layout::low_end(MIB));
        let _ = kernel::load_initrd(&memory, MIB, &loaded, &path);
    }
}
