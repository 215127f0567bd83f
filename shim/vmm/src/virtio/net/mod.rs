//! Implements the virtio network device (Virtio 1.2, 5.1) over an open tap: one to [`MAX_PAIRS`] pairs of queues and a control
//! queue. Two threads of this process or the kernel (vhost-net) serve a pair; another thread serves the control queue.

mod control;
mod device;
mod error;
mod filter;
mod metrics;
mod pair;
mod state;
mod sys;
mod tap;
mod vhost;
mod worker;

pub use device::{Net, NetConfig};
pub use error::NetError;
pub use metrics::NetMetrics;
pub use state::NetState;
pub use vhost::open as open_vhost;

#[cfg(any(test, feature = "fuzz"))]
pub(crate) use {
    control::{CommandLimits, ControlCommand},
    worker::{FrameReceiver, FrameSender, NextWait},
};

/// The maximum number of queue pairs of a device.
pub const MAX_PAIRS: u16 = 8;

/// The size of `struct virtio_net_hdr` with `num_buffers` (Virtio 1.2, 5.1.6), which precedes each frame in queues and at the tap.
pub(crate) const HEADER: usize = 12;

/// The maximum frame size, header included: an IP packet of 64 KiB behind an Ethernet header with two VLAN tags.
pub(crate) const MAX_FRAME: usize = HEADER + 14 + 8 + 65535;

/// Feature bits (Virtio 1.2, 5.1.3; those of UDP segmentation: 1.3).
mod feature {
    pub const CSUM: u64 = 1 << 0;
    pub const GUEST_CSUM: u64 = 1 << 1;
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    pub const MTU: u64 = 1 << 3;
    pub const MAC: u64 = 1 << 5;
    pub const GUEST_TSO4: u64 = 1 << 7;
    pub const GUEST_TSO6: u64 = 1 << 8;
    pub const GUEST_ECN: u64 = 1 << 9;
    pub const HOST_TSO4: u64 = 1 << 11;
    pub const HOST_TSO6: u64 = 1 << 12;
    pub const HOST_ECN: u64 = 1 << 13;
    pub const MRG_RXBUF: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    pub const CTRL_VQ: u64 = 1 << 17;
    pub const CTRL_RX: u64 = 1 << 18;
    pub const MQ: u64 = 1 << 22;
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    pub const GUEST_USO4: u64 = 1 << 54;
    pub const GUEST_USO6: u64 = 1 << 55;
    pub const HOST_USO: u64 = 1 << 56;

    /// The offloads that the driver may change while the device runs, with the same bits.
    pub const GUEST_OFFLOADS: u64 = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_USO;
    pub const GUEST_USO: u64 = GUEST_USO4 | GUEST_USO6;
}
