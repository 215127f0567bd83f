//! Implements virtio over MMIO, version 2 (VIRTIO 1.2, section 4.2): a window of registers through which the guest's driver
//! finds and sets up one device. It uses only the [`Device`] trait and knows neither a particular device nor KVM.
//!
//! The threads of the vCPUs call it, and the thread that pauses the VM. One lock orders the calls; QueueNotify and the
//! interrupt registers do not take it. Devices interrupt without any lock, so waiting under the lock until a queue has stopped
//! cannot deadlock.

#[cfg(any(test, feature = "fuzz"))]
#[allow(dead_code, reason = "the tests use the rest")]
pub(crate) mod harness;
mod interrupt;
mod register_block;
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

use crate::virtio::{Device, DeviceKind, Memory, StartError};
use interrupt::MmioInterrupt;
use nacelle_base::{guest_error, guest_warn};
use register_block::RegisterBlock;
use shared::{SharedMemory, overlap_error};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use vm_memory::GuestRegionMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The register to which the driver writes the number of a queue with new buffers; the address for ioeventfds.
pub const QUEUE_NOTIFY: u64 = reg::QUEUE_NOTIFY;

/// The register with which the driver acknowledges interrupts, and the value (4 bytes) for an interrupt that concerned only
/// queues. That write has no effect, so the kernel may handle it with an ioeventfd.
pub const INTERRUPT_ACK: (u64, u32) = (reg::INTERRUPT_ACK, interrupt::USED);

/// The maximum size of a configuration space in bytes.
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

/// A register window without a device. A driver reads the device id 0 there and leaves it alone (VIRTIO 1.2, section 4.2.2).
#[derive(Clone, Copy, Debug, Default)]
pub struct EmptyWindow {}

impl EmptyWindow {
    /// Handles a read of `data.len()` bytes at `offset` of the window. Returns 0 for all registers but the first two.
    pub fn read(self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let value = match RegisterAccess::decode(offset, data.len()) {
            Some(RegisterAccess::Register(reg::MAGIC_VALUE)) => register_block::MAGIC,
            Some(RegisterAccess::Register(reg::VERSION)) => register_block::VERSION,
            _ => return,
        };
        data.copy_from_slice(&value.to_le_bytes());
    }
}

/// One device in its register window. Dropping it stops the device.
pub struct Transport {
    kind: DeviceKind,
    kicks: Arc<[EventFd]>,
    interrupt: Arc<MmioInterrupt>,
    registers: Mutex<RegisterBlock>,
}

impl Transport {
    /// Creates the transport of `device`. Its queues lie in `memory`; each write to `irq` must cause one (edge-triggered)
    /// interrupt of the guest.
    pub fn new(device: Box<dyn Device>, memory: Arc<Memory>, irq: EventFd) -> io::Result<Arc<Transport>> {
        Transport::with_shared_memory(device, memory, irq, None)
    }

    /// Like `new`, with memory that the device shares with its driver, separate from the guest's own memory. Queues and buffers
    /// may lie in it too.
    pub fn with_shared_memory(
        device: Box<dyn Device>,
        memory: Arc<Memory>,
        irq: EventFd,
        shared: Option<Arc<GuestRegionMmap<()>>>,
    ) -> io::Result<Arc<Transport>> {
        let shared = SharedMemory::new(shared);
        let memory = shared.add_to(memory).ok_or_else(overlap_error)?;
        let queues = device.queue_sizes().len();
        let kicks =
            (0..queues).map(|_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)).collect::<io::Result<Arc<[EventFd]>>>()?;
        let interrupt = Arc::new(MmioInterrupt::new(irq));
        let kind = device.kind();
        let registers = Mutex::new(RegisterBlock::new(device, memory, shared, kicks.clone(), interrupt.clone()));
        Ok(Arc::new(Transport { kind, kicks, interrupt, registers }))
    }

    /// Returns the kind of the device.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Returns one eventfd per queue, to be registered as ioeventfd for a guest's write of the queue's number (4 bytes) to
    /// [`QUEUE_NOTIFY`].
    pub fn kicks(&self) -> &[EventFd] {
        &self.kicks
    }

    /// Stops all queues, waits for their requests in flight and records their positions. Has no effect if already paused.
    pub fn pause(&self) {
        self.registers().pause();
    }

    /// Starts the queues again. If a queue cannot be started, returns an error and requests a device reset from the guest; the
    /// other queues run.
    pub fn resume(&self) -> Result<(), StartError> {
        self.registers().resume()
    }

    /// Pauses and returns the state from which the transport can continue in another process. The transport stays paused.
    pub fn save(&self) -> TransportState {
        self.registers().save()
    }

    /// Restores a saved state. The device must match the saved one, and the guest's memory must be as it was at the save. The
    /// transport is paused afterwards, also after an error, which leaves the device reset.
    pub fn restore(&self, state: &TransportState) -> Result<(), RestoreError> {
        self.registers().restore(state)
    }

    /// Handles a read of `data.len()` bytes at `offset` of the window. Returns 0 for unreadable registers.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match RegisterAccess::decode(offset, data.len()) {
            Some(RegisterAccess::Config(offset)) => self.registers().read_config(offset, data),
            Some(RegisterAccess::Register(register)) => {
                let value = match register {
                    reg::INTERRUPT_STATUS => self.interrupt.status(),
                    _ => self.registers().read(register),
                };
                data.copy_from_slice(&value.to_le_bytes());
            }
            None => self.warn_invalid_access("read", offset, data.len()),
        }
    }

    /// Handles a write of `data` at `offset` of the window. Invalid writes are ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        match (RegisterAccess::decode(offset, data.len()), <[u8; 4]>::try_from(data)) {
            (Some(RegisterAccess::Config(offset)), _) => self.registers().write_config(offset, data),
            (Some(RegisterAccess::Register(register)), Ok(bytes)) => {
                let value = u32::from_le_bytes(bytes);
                match register {
                    reg::QUEUE_NOTIFY => self.kick(value),
                    reg::INTERRUPT_ACK => self.interrupt.acknowledge(value),
                    _ => self.registers().write(register, value),
                }
            }
            _ => self.warn_invalid_access("wrote", offset, data.len()),
        }
    }

    fn kick(&self, queue: u32) {
        let kick = usize::try_from(queue).ok().and_then(|index| self.kicks.get(index));
        match kick.map(|kick| kick.write(1)) {
            Some(Ok(())) => {}
            // If the counter is full, its reader is awake already.
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Some(Err(error)) => guest_error!("cannot kick a queue: {error}"),
            None => guest_warn!(device = %self.kind, queue, "the guest notified a queue that does not exist"),
        }
    }

    fn warn_invalid_access(&self, how: &str, offset: u64, length: usize) {
        guest_warn!(device = %self.kind, "the guest {how} {length} bytes at {offset:#x} of a device's registers");
    }

    fn registers(&self) -> MutexGuard<'_, RegisterBlock> {
        self.registers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transport").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// The target of an access.
enum RegisterAccess {
    /// The register at this offset, with its full width of 32 bits.
    Register(u64),
    /// The configuration space, starting at this byte.
    Config(u32),
}

impl RegisterAccess {
    /// Returns `None` for an access of invalid width or alignment.
    fn decode(offset: u64, length: usize) -> Option<RegisterAccess> {
        match offset.checked_sub(reg::CONFIG) {
            Some(inside) if matches!(length, 1 | 2 | 4 | 8) => {
                Some(RegisterAccess::Config(u32::try_from(inside).ok()?))
            }
            None if length == 4 && offset.is_multiple_of(4) => Some(RegisterAccess::Register(offset)),
            _ => None,
        }
    }
}
