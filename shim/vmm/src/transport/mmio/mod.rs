//! Owns: virtio over MMIO, version 2 (VIRTIO 1.2, section 4.2): a window of registers through which the guest's
//! driver finds and sets up one device.
//! May use: the [`Device`] trait; knows no particular device and no KVM.
//! Threads: called from the virtual processors' threads and from whoever pauses the machine. One lock orders them;
//! QueueNotify and the interrupt registers do not take it. Devices interrupt without any lock, so whoever waits
//! under the lock for a queue to stop is never waited for.

mod front;
#[cfg(any(test, feature = "fuzz"))]
#[allow(dead_code, reason = "the tests use the rest")]
pub(crate) mod harness;
mod line;
mod shared;
mod state;

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod sharing;
#[cfg(test)]
mod tests;

pub use shared::SharedPage;
pub use state::{QueueRegisters, Registers, RestoreError, TransportState};

use crate::guest_warn;
use crate::virtio::{Device, DeviceKind, Memory, StartError};
use front::Front;
use line::Line;
use shared::{Shared, overlaps};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use vm_memory::GuestRegionMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Where the driver writes the number of a queue that it has added buffers to; the place for ioeventfds.
pub const QUEUE_NOTIFY: u64 = reg::QUEUE_NOTIFY;

/// Where the driver acknowledges interrupts, and what it writes there (4 bytes) when queues were all that one was for.
/// That changes nothing, so the machine may have the kernel swallow it.
pub const INTERRUPT_ACK: (u64, u32) = (reg::INTERRUPT_ACK, line::USED);

/// The most bytes of a configuration space.
const CONFIG_BYTES: usize = 256;

/// The registers' offsets (VIRTIO 1.2, table 4.1). QueueReset (0xc0) belongs to a feature that is not offered.
mod reg {
    pub const MAGIC_VALUE: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE_ID: u64 = 0x08;
    pub const VENDOR_ID: u64 = 0x0c;
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SEL: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SEL: u64 = 0x24;
    pub const QUEUE_SEL: u64 = 0x30;
    pub const QUEUE_SIZE_MAX: u64 = 0x34;
    pub const QUEUE_SIZE: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const QUEUE_NOTIFY: u64 = 0x50;
    pub const INTERRUPT_STATUS: u64 = 0x60;
    pub const INTERRUPT_ACK: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const QUEUE_DESC_LOW: u64 = 0x80;
    pub const QUEUE_DESC_HIGH: u64 = 0x84;
    pub const QUEUE_DRIVER_LOW: u64 = 0x90;
    pub const QUEUE_DRIVER_HIGH: u64 = 0x94;
    pub const QUEUE_DEVICE_LOW: u64 = 0xa0;
    pub const QUEUE_DEVICE_HIGH: u64 = 0xa4;
    pub const SHM_SEL: u64 = 0xac;
    pub const SHM_LEN_LOW: u64 = 0xb0;
    pub const SHM_LEN_HIGH: u64 = 0xb4;
    pub const SHM_BASE_LOW: u64 = 0xb8;
    pub const SHM_BASE_HIGH: u64 = 0xbc;
    pub const CONFIG_GENERATION: u64 = 0xfc;
    pub const CONFIG: u64 = 0x100;
}

/// One device in its window of the guest's addresses. Dropping it stops the device.
pub struct Transport {
    kind: DeviceKind,
    kicks: Arc<[EventFd]>,
    line: Arc<Line>,
    front: Mutex<Front>,
}

impl Transport {
    /// Puts `device` behind registers. Its queues lie in `memory`; each write to `irq` is to become one (edge)
    /// interrupt of the guest.
    pub fn new(device: Box<dyn Device>, memory: Arc<Memory>, irq: EventFd) -> io::Result<Arc<Transport>> {
        Transport::sharing(device, memory, irq, None)
    }

    /// The same, with memory that the device shares with its driver, which the guest has beside its own: queues and
    /// buffers may lie there, too.
    pub fn sharing(
        device: Box<dyn Device>,
        memory: Arc<Memory>,
        irq: EventFd,
        shared: Option<Arc<GuestRegionMmap<()>>>,
    ) -> io::Result<Arc<Transport>> {
        let shared = Shared::new(shared);
        let memory = shared.beside(memory).ok_or_else(overlaps)?;
        let queues = device.queue_sizes().len();
        let kicks =
            (0..queues).map(|_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)).collect::<io::Result<Arc<[EventFd]>>>()?;
        let line = Arc::new(Line::new(irq));
        let kind = device.kind();
        let front = Mutex::new(Front::new(device, memory, shared, kicks.clone(), line.clone()));
        Ok(Arc::new(Transport { kind, kicks, line, front }))
    }

    /// What the device is.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// One eventfd a queue, for the machine to have written by the kernel when the guest writes the queue's number
    /// (4 bytes) to [`QUEUE_NOTIFY`].
    pub fn kicks(&self) -> &[EventFd] {
        &self.kicks
    }

    /// Stops all queues, waits for their requests in flight and keeps where they stand. Again: nothing.
    pub fn pause(&self) {
        self.front().pause();
    }

    /// Lets the queues run again. A queue that cannot be started is an error, and the guest is told to reset the
    /// device; the others run.
    pub fn resume(&self) -> Result<(), StartError> {
        self.front().resume()
    }

    /// What is needed to go on in another process. Pauses first, and stays paused.
    pub fn save(&self) -> TransportState {
        self.front().save()
    }

    /// Goes on from a saved state: with a device like the one saved and the guest's memory as it was. Is paused
    /// then, also after an error, when the device is as after a reset.
    pub fn restore(&self, state: &TransportState) -> Result<(), RestoreError> {
        self.front().restore(state)
    }

    /// The guest reads `data.len()` bytes at `offset` of the window. What cannot be read is 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match Place::of(offset, data.len()) {
            Some(Place::Config(offset)) => self.front().read_config(offset, data),
            Some(Place::Register(register)) => {
                let value = match register {
                    reg::INTERRUPT_STATUS => self.line.status(),
                    _ => self.front().read(register),
                };
                data.copy_from_slice(&value.to_le_bytes());
            }
            None => self.refuse("read", offset, data.len()),
        }
    }

    /// The guest writes `data` at `offset` of the window. What cannot be written stays as it is.
    pub fn write(&self, offset: u64, data: &[u8]) {
        match (Place::of(offset, data.len()), <[u8; 4]>::try_from(data)) {
            (Some(Place::Config(offset)), _) => self.front().write_config(offset, data),
            (Some(Place::Register(register)), Ok(bytes)) => {
                let value = u32::from_le_bytes(bytes);
                match register {
                    reg::QUEUE_NOTIFY => self.kick(value),
                    reg::INTERRUPT_ACK => self.line.acknowledge(value),
                    _ => self.front().write(register, value),
                }
            }
            _ => self.refuse("wrote", offset, data.len()),
        }
    }

    fn kick(&self, queue: u32) {
        let kick = usize::try_from(queue).ok().and_then(|index| self.kicks.get(index));
        match kick.map(|kick| kick.write(1)) {
            Some(Ok(())) => {}
            // A counter that is full has its reader awake already.
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Some(Err(error)) => tracing::error!("cannot kick a queue: {error}"),
            None => guest_warn!(device = %self.kind, queue, "the guest notified a queue that does not exist"),
        }
    }

    fn refuse(&self, how: &str, offset: u64, length: usize) {
        guest_warn!(device = %self.kind, "the guest {how} {length} bytes at {offset:#x} of a device's registers");
    }

    fn front(&self) -> MutexGuard<'_, Front> {
        self.front.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transport").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// What an access is to.
enum Place {
    /// The register at this offset, all 32 bits of it.
    Register(u64),
    /// The configuration space from this byte on.
    Config(u32),
}

impl Place {
    /// `None`: an access of a width or alignment that there is not.
    fn of(offset: u64, length: usize) -> Option<Place> {
        match offset.checked_sub(reg::CONFIG) {
            Some(inside) if matches!(length, 1 | 2 | 4 | 8) => Some(Place::Config(u32::try_from(inside).ok()?)),
            None if length == 4 && offset.is_multiple_of(4) => Some(Place::Register(offset)),
            _ => None,
        }
    }
}
