//! Owns: what an entropy device counts.

use std::sync::atomic::AtomicU64;

/// Counters of an entropy device, from its making on.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Requests answered.
    pub requests: AtomicU64,
    /// Random bytes given.
    pub bytes: AtomicU64,
}
