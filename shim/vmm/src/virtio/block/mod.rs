//! Owns: the virtio block device: a slot whose backing and size change while the guest runs.
//! Threads: one per started queue; a [`Slot`] may be used from any thread.

mod error;
mod slot;

pub use error::BlockError;
pub use slot::Slot;
