//! Implements the virtio entropy device, with random bytes from the host's kernel. One thread serves it while its queue runs.

mod device;
mod metrics;
mod worker;

pub use device::Rng;
pub use metrics::RngMetrics;
pub use worker::MAX_BYTES;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use worker::fill;
