//! Owns: the virtio entropy device: random bytes from the host's kernel.
//! Threads: one while its queue runs.

mod device;
mod metrics;
mod worker;

pub use device::Rng;
pub use metrics::Metrics;
pub use worker::MAX_BYTES;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use worker::fill;
