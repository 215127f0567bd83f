//! Owns: what a vsock device counts.

use std::sync::atomic::AtomicU64;

/// Counters of a vsock device, from its making on.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Connections that came to be, whoever made them.
    pub connections: AtomicU64,
    /// Bytes sent to the guest.
    pub to_guest_bytes: AtomicU64,
    /// Bytes received from the guest.
    pub from_guest_bytes: AtomicU64,
    /// Packets of the guest that made no sense or broke the rules.
    pub bad_packets: AtomicU64,
}
