//! Implements the virtio block device: a slot whose backing and size can change while the guest runs. One thread serves it
//! while its queue runs; a [`Slot`] may be used from any thread.

mod copy;
mod device;
mod error;
mod extent_map;
mod metrics;
mod slot;
mod state;
mod worker;

pub use copy::{CopiedDisk, DiskCopy, PreparedCopy};
pub use error::BlockError;
pub use metrics::BlockMetrics;
pub use slot::{OpenExtent, Slot};
pub use state::BlockState;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use worker::{serve, try_serve};

/// The size of a sector in bytes, the unit of the protocol.
const SECTOR: u64 = 512;
