//! Owns: what a console counts.

use std::sync::atomic::AtomicU64;

/// Counters of a console, from its making on.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Bytes that the guest printed.
    pub output_bytes: AtomicU64,
    /// Bytes that it printed by emergency writes, which are among those above.
    pub emergency_bytes: AtomicU64,
    /// Bytes at the ends of requests that were too long.
    pub dropped_bytes: AtomicU64,
    /// Bytes given to the guest.
    pub input_bytes: AtomicU64,
}
