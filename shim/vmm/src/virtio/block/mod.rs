//! Implements the virtio block device: a slot whose backing and size can change while the guest runs. One thread serves it
//! while its queue runs; a [`Slot`] may be used from any thread.

mod device;
mod error;
mod metrics;
mod slot;
mod state;
mod table;
mod worker;

pub use error::BlockError;
pub use metrics::Metrics;
pub use slot::Slot;
pub use state::State;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use worker::{begin, finish};

/// The size of a sector in bytes, the unit of the protocol.
const SECTOR: u64 = 512;
