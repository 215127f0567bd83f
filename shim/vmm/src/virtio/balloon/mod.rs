//! Owns: the virtio balloon: memory that the guest gives back, asked for or of its own accord.
//! Threads: one while a queue runs.

mod device;
mod discard;
mod handle;
mod metrics;
mod requests;
mod state;

pub use handle::{Balloon, Statistics};
pub use metrics::Metrics;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use requests::serve;
pub use state::State;

#[cfg(test)]
mod tests;
