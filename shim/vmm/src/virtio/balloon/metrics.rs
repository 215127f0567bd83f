//! Owns: what a balloon counts.

use std::sync::atomic::AtomicU64;

/// Counters of a balloon, from its making on.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Pages of 4 KiB that the guest put into the balloon.
    pub inflated_pages: AtomicU64,
    /// Pages of 4 KiB that it took out again.
    pub deflated_pages: AtomicU64,
    /// Bytes that it reported as free.
    pub reported_bytes: AtomicU64,
    /// Bytes given back to the host, for either reason.
    pub freed_bytes: AtomicU64,
    /// Pages and ranges that are not memory of the guest, and ends of lists that were too long.
    pub refused: AtomicU64,
    /// Ranges that the host's kernel did not take back.
    pub failed: AtomicU64,
}
