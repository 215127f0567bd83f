//! Takes the agent from its first instruction to a configured pod: mounts, handshake with the host, listening sockets, zygote.
//!
//! `guest` boots in a VM, `host` on the node without one. Both are synchronous, have one thread, and do as little as possible
//! before they report to the host that the pod is ready.

mod added_memory;
pub mod apply;
mod cgroups;
mod error;
pub mod guest;
mod handshake;
mod hardware;
pub mod host;
pub mod mounts;
pub mod netlink;
pub mod ports;
mod ready;
pub mod restored;
mod sock_diag;
mod template;

pub use error::BootError;
pub use handshake::versions;
pub use ready::BootedAgent;
