//! Owns: the host's handle to a block device: what it shows and how large it is.

use super::BlockError;
use crate::Device;
use nacelle_base::machine::ImageDisk;
use std::path::Path;

/// A block device that exists from boot and whose backing changes while the guest runs. Clones are handles to
/// the same slot.
#[derive(Clone, Debug)]
pub struct Slot {}

impl Slot {
    /// A read-only slot that shows nothing yet: its capacity is 0 and grows with [`place`](Slot::place).
    /// The guest finds it by `serial` (1 to 20 printable ASCII characters) in /sys/block/*/serial.
    pub fn read_only(serial: &str) -> Result<Slot, BlockError> {
        let _ = serial;
        unimplemented!()
    }

    /// A read-write slot over a raw file or block device that exists; a shorter file is made `size` bytes long
    /// (sparse). `size` is a multiple of 512.
    pub fn read_write(serial: &str, path: &Path, size: u64) -> Result<Slot, BlockError> {
        let _ = (serial, path, size);
        unimplemented!()
    }

    /// Shows the pieces of `disk`, one after the other, from byte `at` (a multiple of 512). The files are opened
    /// here and may be unlinked afterwards. The capacity becomes at least the end of the image, rounded up to
    /// 1 MiB, and the guest is told; it never shrinks. Placing on top of something else is an error.
    pub fn place(&self, at: u64, disk: &ImageDisk) -> Result<(), BlockError> {
        let _ = (at, disk);
        unimplemented!()
    }

    /// Takes away what was placed at byte `at`; the range reads as zeros from then on. `false`: nothing lay there.
    pub fn unplace(&self, at: u64) -> bool {
        let _ = at;
        unimplemented!()
    }

    /// Gives a read-write slot a new size in bytes (a multiple of 512) and tells the guest. A file grows with it
    /// (sparse); it is never cut.
    pub fn resize(&self, size: u64) -> Result<(), BlockError> {
        let _ = size;
        unimplemented!()
    }

    /// The size that the guest sees, in bytes.
    pub fn capacity(&self) -> u64 {
        unimplemented!()
    }

    /// The device for a transport. Meant to be called once per slot.
    pub fn device(&self) -> Box<dyn Device> {
        unimplemented!()
    }
}
