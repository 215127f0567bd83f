//! Defines the counters of a balloon.

use std::sync::atomic::AtomicU64;

/// Counters of a balloon since its creation.
#[derive(Debug, Default)]
pub struct BalloonMetrics {
    /// Pages of 4 KiB that the guest put into the balloon.
    pub inflated_pages: AtomicU64,
    /// Pages of 4 KiB that the guest took out of the balloon.
    pub deflated_pages: AtomicU64,
    /// Bytes that the guest reported as free.
    pub reported_bytes: AtomicU64,
    /// Bytes released to the host, inflated or reported.
    pub freed_bytes: AtomicU64,
    /// Pages and ranges outside guest memory, and truncated lists.
    pub refused: AtomicU64,
    /// Ranges that the host's kernel could not release.
    pub failed: AtomicU64,
}
