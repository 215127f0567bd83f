//! Defines the counters of a network device. Frames that the kernel handles (vhost-net) are counted by the tap only.

use std::sync::atomic::AtomicU64;

/// Counters of a network device since its creation.
#[derive(Debug, Default)]
pub struct NetMetrics {
    /// Frames passed to the guest.
    pub received: AtomicU64,
    /// Bytes of frames passed to the guest, headers included.
    pub received_bytes: AtomicU64,
    /// Frames received from the guest.
    pub sent: AtomicU64,
    /// Bytes of frames received from the guest, headers included.
    pub sent_bytes: AtomicU64,
    /// Frames to the guest that did not fit into its buffers, or were in flight when the queue stopped.
    pub receive_drops: AtomicU64,
    /// Frames of the guest that were invalid or that the kernel rejected.
    pub send_drops: AtomicU64,
    /// Commands on the control queue.
    pub commands: AtomicU64,
    /// Commands on the control queue that were rejected.
    pub bad_commands: AtomicU64,
}
