//! Defines the counters of a block device.

use std::sync::atomic::AtomicU64;

/// Counters of a slot since its creation.
#[derive(Debug, Default)]
pub struct BlockMetrics {
    /// Read requests that succeeded.
    pub reads: AtomicU64,
    /// Bytes read by successful requests.
    pub read_bytes: AtomicU64,
    /// Write requests that succeeded.
    pub writes: AtomicU64,
    /// Bytes written by successful requests.
    pub written_bytes: AtomicU64,
    /// Flushes that succeeded.
    pub flushes: AtomicU64,
    /// Discards and write-zeroes that succeeded.
    pub discards: AtomicU64,
    /// Requests that failed for any reason.
    pub failures: AtomicU64,
}
