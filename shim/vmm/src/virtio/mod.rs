//! Owns: what a virtio device is to a transport, and the devices.
//! May use: `vm-memory`, `virtio-queue`. Knows no transport.

pub mod balloon;
pub mod block;
pub mod console;
pub mod fs;
pub mod net;
pub(crate) mod pieces;
pub(crate) mod queue_thread;
pub(crate) mod ring;
pub mod rng;
mod state;
pub mod vsock;
pub(crate) mod worker;

#[cfg(test)]
mod ring_model;
#[cfg(test)]
mod scripted;
#[cfg(test)]
mod tests;

pub use ring::Ring;
pub use state::{DeviceState, StateError};

use nacelle_base::{Classify, Kind};
use std::os::fd::OwnedFd;
use virtio_queue::QueueState;

/// The memory of a guest as devices see it.
pub type Memory = vm_memory::GuestMemoryMmap<()>;

/// `VIRTIO_RING_F_INDIRECT_DESC`, `VIRTIO_RING_F_EVENT_IDX` and `VIRTIO_F_VERSION_1`: what every device offers.
pub const COMMON_FEATURES: u64 = 1 << 28 | 1 << 29 | 1 << 32;

/// The number of the memory that a device shares with its driver, if it does; 0 would be a window to files (VIRTIO 1.2, 5.11.4).
pub const SHARED_ID: u32 = 1;

/// The kind of a device; the number is its virtio id.
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
    /// Memory that the guest gives back.
    Balloon = 5,
    /// A socket between host and guest.
    Vsock = 19,
    /// A file system of the node.
    Fs = 26,
}

impl DeviceKind {
    /// The virtio device id.
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

/// How a device tells the guest that something happened. Given by the transport; callable from any thread.
pub trait Interrupt: Send + Sync {
    /// The used ring of queue `index` has grown.
    fn queue(&self, index: u16);
    /// The configuration space has changed.
    fn config(&self);
    /// The guest broke the rules of queue `index`, which is served no more until it resets the device.
    fn broken(&self, _index: u16) {}
    /// An eventfd by which somebody else (the kernel) can interrupt for queue `index` without us; `None`: this
    /// transport has none. Asked for anew each time the queue starts.
    fn eventfd(&self, _index: u16) -> Option<OwnedFd> {
        None
    }
}

/// A queue could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The device has no queue of that number.
    #[error("a {device} device has no queue {index}")]
    NoSuchQueue {
        /// The device.
        device: DeviceKind,
        /// The queue asked for.
        index: u16,
    },
    /// The queue runs already.
    #[error("queue {index} of a {device} device runs already")]
    Running {
        /// The device.
        device: DeviceKind,
        /// The queue asked for.
        index: u16,
    },
    /// The thread that serves the queue could not be made.
    #[error("cannot serve queue {index} of a {device} device")]
    Thread {
        /// The device.
        device: DeviceKind,
        /// The queue asked for.
        index: u16,
        /// Why not.
        source: std::io::Error,
    },
}

impl Classify for StartError {
    fn kind(&self) -> Kind {
        match self {
            StartError::NoSuchQueue { .. } => Kind::Invalid,
            StartError::Running { .. } => Kind::Conflict,
            StartError::Thread { .. } => Kind::Exhausted,
        }
    }
}

/// A virtio device. It holds no queue of its own: the transport owns them, hands each one in with
/// [`start`](Device::start) and takes its state back with [`stop`](Device::stop).
pub trait Device: Send {
    /// What it is.
    fn kind(&self) -> DeviceKind;

    /// The feature bits it offers.
    fn features(&self) -> u64;

    /// The driver and the device have agreed on these features. Called while no queue runs and before the first one
    /// is started, also after a restore; [`reset`](Device::reset) forgets them.
    fn acknowledge(&mut self, _features: u64) {}

    /// The largest size of each of its queues, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// The bytes of memory, apart from the guest's own, that it would share with its driver (VIRTIO 1.2, section 2.10): a
    /// driver that knows of it puts queues and buffers there, and others need not see more of the guest than that. 0: none. A
    /// transport may have none to give.
    fn shared_memory(&self) -> u64 {
        0
    }

    /// Reads the configuration space from byte `offset`; bytes beyond its end are 0.
    fn read_config(&self, offset: u32, data: &mut [u8]);

    /// Writes the configuration space; what cannot be written is left as it is.
    fn write_config(&mut self, _offset: u32, _data: &[u8]) {}

    /// Starts to serve a queue. Buffers that lie in it already are seen without a kick.
    fn start(&mut self, ring: Ring) -> Result<(), StartError>;

    /// Stops serving queue `index` and gives its state back; on return no request of it is in flight and
    /// guest memory is no longer touched on its behalf. `None`: it did not run.
    fn stop(&mut self, index: u16) -> Option<QueueState>;

    /// Stops all queues and forgets what the guest's driver did: connections, acknowledged state.
    fn reset(&mut self);

    /// What it must know to go on in another process. Called only while no queue runs.
    fn save(&self) -> DeviceState;

    /// Goes on from a saved state. Called on a fresh device, or one that was reset, while no queue runs; an error
    /// leaves it as it was.
    fn restore(&mut self, state: DeviceState) -> Result<(), StateError>;
}

/// Copies the part of a configuration space that starts at `offset`; what lies beyond its end is 0.
pub(crate) fn read_config(config: &[u8], offset: u32, data: &mut [u8]) {
    data.fill(0);
    let there = config.iter().skip(offset as usize);
    data.iter_mut().zip(there).for_each(|(to, byte)| *to = *byte);
}
