//! Owns: what a file-system device counts.

use std::sync::atomic::AtomicU64;

/// Counters since the device was made.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Requests that were answered, or needed no answer.
    pub requests: AtomicU64,
    /// Requests that could not be passed on.
    pub failed: AtomicU64,
}
