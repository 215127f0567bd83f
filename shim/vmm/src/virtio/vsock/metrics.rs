//! Defines the counters of a vsock device.

use std::sync::atomic::AtomicU64;

/// Counters of a vsock device since its creation.
#[derive(Debug, Default)]
pub struct VsockMetrics {
    /// Connections established from either side.
    pub connections: AtomicU64,
    /// Bytes sent to the guest.
    pub to_guest_bytes: AtomicU64,
    /// Bytes received from the guest.
    pub from_guest_bytes: AtomicU64,
    /// Packets of the guest that were invalid or violated the protocol.
    pub bad_packets: AtomicU64,
}
