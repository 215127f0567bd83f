//! Defines the counters of a console.

use std::sync::atomic::AtomicU64;

/// Counters of a console since its creation.
#[derive(Debug, Default)]
pub struct ConsoleMetrics {
    /// Bytes that the guest printed.
    pub output_bytes: AtomicU64,
    /// Bytes that the guest printed by emergency writes, included in `output_bytes`.
    pub emergency_bytes: AtomicU64,
    /// Bytes cut off from requests that were too long.
    pub dropped_bytes: AtomicU64,
    /// Bytes of input passed to the guest.
    pub input_bytes: AtomicU64,
}
