//! Counts what the daemon does, for metrics. Counting is always on and costs a few atomic additions.
//!
//! docs/reference/metrics.md lists every family; tests compare it with [`family::FAMILIES`]. `crate::monitoring` serves them.

pub mod address;
pub mod counters;
pub mod family;
pub mod labels;
pub(crate) mod process;
pub(crate) mod requests;
#[cfg(test)]
mod tests;

pub use counters::EventCounters;
