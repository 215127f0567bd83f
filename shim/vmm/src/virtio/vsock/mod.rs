//! Implements the virtio socket device in user space. On the host, a connection ends in one end of a socket pair. Each device
//! has one thread, which owns all connections; [`Vsock`] and [`VsockListener`] may be used from any thread.

mod connection;
mod device;
mod error;
mod host;
mod metrics;
mod muxer;
mod packet;
mod state;
mod worker;

pub use error::VsockError;
pub use host::{Vsock, VsockListener};
pub use metrics::VsockMetrics;
#[cfg(test)]
pub(crate) use packet::Op;
pub use state::VsockState;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use {muxer::Muxer, packet::PacketHeader};

/// The context id of the host.
pub const HOST_CID: u64 = 2;

/// The maximum number of simultaneous connections, from either side.
pub const MAX_CONNECTIONS: usize = 512;

/// The receive window of a connection: the maximum number of bytes that the guest may send before the host has taken them.
pub const WINDOW: u32 = 128 << 10;

/// The maximum number of connections of one listener that have not been accepted.
pub const BACKLOG: usize = 64;

/// The numbers of the queues.
const RX: u16 = 0;
const TX: u16 = 1;
const EVENT: u16 = 2;
