//! Defines the counters of an entropy device.

use std::sync::atomic::AtomicU64;

/// Counters of an entropy device since its creation.
#[derive(Debug, Default)]
pub struct RngMetrics {
    /// Completed requests.
    pub requests: AtomicU64,
    /// Random bytes passed to the guest.
    pub bytes: AtomicU64,
}
