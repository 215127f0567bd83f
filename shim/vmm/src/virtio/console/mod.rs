//! Implements the virtio console, with the guest's output and its input. One thread serves both queues while a queue runs.

mod device;
mod handle;
mod metrics;
mod requests;
mod state;

pub use handle::{ConsoleSink, INPUT_BYTES, VirtioConsole};
pub use metrics::ConsoleMetrics;
pub use requests::MAX_BYTES;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use requests::serve;
pub use state::ConsoleState;

#[cfg(test)]
mod tests;
