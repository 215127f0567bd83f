//! Defines the counters of a file-system device.

use std::sync::atomic::AtomicU64;

/// Counters of a file-system device since its creation.
#[derive(Debug, Default)]
pub struct FsMetrics {
    /// Requests that were answered or needed no answer.
    pub requests: AtomicU64,
    /// Requests that could not be sent or answered.
    pub failed: AtomicU64,
}
