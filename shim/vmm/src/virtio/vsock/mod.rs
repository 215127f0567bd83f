//! Owns: the virtio socket device in user space. A connection ends, on the host, in one end of a socket pair.
//! Threads: one per device, which owns all connections; [`Vsock`] and [`Listener`] may be used from any thread.

mod error;
mod host;

pub use error::VsockError;
pub use host::{Listener, Vsock};

/// The context id of the host.
pub const HOST_CID: u64 = 2;
