//! Connects pods to the network on the node: namespaces, the CNI chain, taps and their connection to CNI interfaces. The crate depends
//! on `nacelle-base` and knows neither CRI nor engines nor guests.
//!
//! `NodeNetworks` and `cni` are async (tokio). `netns`, `tap` and `inspect` block for a few kernel calls: async code calls them
//! through `nacelle_base::task::run_blocking`.
//!
//! The order at a pod's start:
//!
//! 1. daemon: `NodeNetworks::create_netns` makes `/run/netns/nacelle-<id>`;
//! 2. pod process: `NetNs::open`, `tap::create` (the fd goes to the engine, the VM boots);
//! 3. daemon, meanwhile: `NodeNetworks::setup` runs the CNI chain and reads what the guest must have;
//! 4. pod process: `tap::connect` connects tap and CNI interface; the guest takes over MAC and addresses;
//! 5. at the end: `NodeNetworks::teardown` runs DEL and removes the namespace.

pub mod cni;
mod error;
pub mod inspect;
mod netlink;
pub mod netns;
mod network;
mod sys;
pub mod tap;

#[cfg(any(test, feature = "fuzz"))]
pub use cni::fuzz;
pub use cni::{CniError, InterfaceUsage, OwedDelete, PodRef};
pub use error::NetError;
pub use inspect::inspect;
pub use netns::{NetNs, run_in};
pub use network::{Attachment, KnownPods, NetConfig, NodeNetworks};
pub use tap::Tap;
