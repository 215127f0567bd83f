//! Defines the interface between virtio devices and transports, and contains the devices. It uses `vm-memory` and
//! `virtio-queue` and knows no transport.

pub mod balloon;
pub mod block;
pub(crate) mod buffers;
pub mod console;
pub mod fs;
pub mod net;
pub(crate) mod queue_thread;
pub(crate) mod ring;
pub mod rng;
mod state;
pub mod vsock;
pub(crate) mod worker;

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod ring_model;
#[cfg(test)]
mod scripted;
#[cfg(test)]
mod tests;

pub use ring::Ring;
pub use state::{DeviceState, StateError};

use nacelle_base::{Classify, FailureKind};
use std::os::fd::OwnedFd;
use virtio_queue::QueueState;

/// The memory of a guest as the devices see it.
pub type Memory = vm_memory::GuestMemoryMmap<()>;

/// The features that every device offers: `VIRTIO_RING_F_INDIRECT_DESC`, `VIRTIO_RING_F_EVENT_IDX` and `VIRTIO_F_VERSION_1`.
pub const COMMON_FEATURES: u64 = 1 << 28 | 1 << 29 | 1 << 32;

/// The id of the memory region that a device shares with its driver, if it has one. Id 0 would be the DAX window (VIRTIO 1.2, 5.11.4).
pub const SHARED_MEMORY_ID: u32 = 1;

/// The kind of a device. The number is its virtio device id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DeviceKind {
    /// A network interface.
    Net = 1,
    /// A disk.
    Block = 2,
    /// A console.
    Console = 3,
    /// An entropy source.
    Rng = 4,
    /// A balloon, through which the guest returns memory.
    Balloon = 5,
    /// A socket between host and guest.
    Vsock = 19,
    /// A file system of the node (virtio-fs).
    Fs = 26,
}

impl DeviceKind {
    /// Returns the virtio device id.
    pub const fn id(self) -> u32 {
        self as u32
    }
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DeviceKind::Net => "net",
            DeviceKind::Block => "block",
            DeviceKind::Console => "console",
            DeviceKind::Rng => "rng",
            DeviceKind::Balloon => "balloon",
            DeviceKind::Vsock => "vsock",
            DeviceKind::Fs => "fs",
        })
    }
}

/// Notifies the guest. Implemented by the transport; callable from any thread.
pub trait Interrupt: Send + Sync {
    /// Notifies the guest that the used ring of queue `index` has grown.
    fn notify_queue(&self, index: u16);
    /// Notifies the guest that the configuration space has changed.
    fn notify_config(&self);
    /// Reports that the guest violated the rules of queue `index`. The queue is no longer served until the guest resets the device.
    fn report_broken(&self, _index: u16) {}
    /// Returns an eventfd by which another component (the kernel) can interrupt the guest for queue `index` directly, or `None`
    /// if the transport has none. Requested again each time the queue starts.
    fn interrupt_eventfd(&self, _index: u16) -> Option<OwnedFd> {
        None
    }
}

/// A queue could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The device has no queue with this number.
    #[error("a {device} device has no queue {index}")]
    NoSuchQueue {
        /// The kind of the device.
        device: DeviceKind,
        /// The number of the queue.
        index: u16,
    },
    /// The queue runs already.
    #[error("queue {index} of a {device} device runs already")]
    Running {
        /// The kind of the device.
        device: DeviceKind,
        /// The number of the queue.
        index: u16,
    },
    /// The thread that serves the queue could not be created.
    #[error("cannot serve queue {index} of a {device} device")]
    Thread {
        /// The kind of the device.
        device: DeviceKind,
        /// The number of the queue.
        index: u16,
        /// The cause.
        source: std::io::Error,
    },
}

impl Classify for StartError {
    fn kind(&self) -> FailureKind {
        match self {
            StartError::NoSuchQueue { .. } => FailureKind::Invalid,
            StartError::Running { .. } => FailureKind::Conflict,
            StartError::Thread { .. } => FailureKind::Exhausted,
        }
    }
}

/// A virtio device. The transport owns the queues: it passes each one to the device with [`start`](Device::start) and takes its
/// state back with [`stop`](Device::stop).
pub trait Device: Send {
    /// Returns the kind of the device.
    fn kind(&self) -> DeviceKind;

    /// Returns the feature bits that the device offers.
    fn features(&self) -> u64;

    /// Sets the features that driver and device have negotiated. Called while no queue runs and before the first one is
    /// started, also after a restore; [`reset`](Device::reset) clears them.
    fn acknowledge(&mut self, _features: u64) {}

    /// Returns the maximum size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Returns the size in bytes of the memory, separate from the guest's own, that the device would share with its driver
    /// (VIRTIO 1.2, section 2.10), or 0 for none. A driver that supports it places queues and buffers there, and then other
    /// processes need no access to the rest of the guest's memory. A transport may not provide such memory.
    fn shared_memory(&self) -> u64 {
        0
    }

    /// Reads the configuration space from byte `offset`. Bytes beyond its end are 0.
    fn read_config(&self, offset: u32, data: &mut [u8]);

    /// Writes the configuration space. Writes to read-only bytes are ignored.
    fn write_config(&mut self, _offset: u32, _data: &[u8]) {}

    /// Starts serving a queue. Buffers that are already in it are processed without a kick.
    fn start(&mut self, ring: Ring) -> Result<(), StartError>;

    /// Stops serving queue `index` and returns its state, or `None` if it was not running. On return no request of the queue is
    /// in flight, and the device no longer accesses guest memory for it.
    fn stop(&mut self, index: u16) -> Option<QueueState>;

    /// Stops all queues and discards the state that the driver has set up: connections, negotiated features.
    fn reset(&mut self);

    /// Returns the state from which the device can continue in another process. Called only while no queue runs.
    fn save(&self) -> DeviceState;

    /// Restores a saved state. Called on a new or reset device while no queue runs. On an error the device is unchanged.
    fn restore(&mut self, state: DeviceState) -> Result<(), StateError>;
}

/// Copies the part of a configuration space that starts at `offset`. Bytes beyond its end are 0.
pub(crate) fn read_config(config: &[u8], offset: u32, data: &mut [u8]) {
    data.fill(0);
    let there = config.iter().skip(offset as usize);
    data.iter_mut().zip(there).for_each(|(to, byte)| *to = *byte);
}
