//! Owns: what a network device counts. The kernel's own work (vhost-net) is in the tap's counters only.

use std::sync::atomic::AtomicU64;

/// Counters of a network device, from its making on.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Frames given to the guest.
    pub received: AtomicU64,
    /// Their bytes, headers included.
    pub received_bytes: AtomicU64,
    /// Frames taken from the guest.
    pub sent: AtomicU64,
    /// Their bytes, headers included.
    pub sent_bytes: AtomicU64,
    /// Frames to the guest that did not fit into what it provides, or were on their way at a stop.
    pub receive_drops: AtomicU64,
    /// Frames of the guest that made no sense, or that the kernel refused.
    pub send_drops: AtomicU64,
    /// Commands on the control queue.
    pub commands: AtomicU64,
    /// Those of them that were refused.
    pub bad_commands: AtomicU64,
}
