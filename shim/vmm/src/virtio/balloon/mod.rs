//! Implements the virtio balloon, through which the guest returns memory on request (inflation) or on its own (free page
//! reporting). One thread serves all queues while a queue runs.

mod device;
mod discard;
mod handle;
mod metrics;
mod requests;
mod state;

pub use handle::{Balloon, Statistics};
pub use metrics::BalloonMetrics;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use requests::serve;
pub use state::BalloonState;

#[cfg(test)]
mod tests;
