//! Owns: the tap of a machine in the pod's namespace, and its join to the interface that CNI made.

use crate::{NetError, NetNs};
use std::os::fd::OwnedFd;

/// A tap: the interface lives until the last copy of `fd` is closed.
#[derive(Debug)]
pub struct Tap {
    /// The queue: reads and writes Ethernet frames, each behind a virtio-net header. Not inherited by
    /// children (close-on-exec), blocking.
    pub fd: OwnedFd,
    /// The name of the interface in the namespace.
    pub name: String,
}

/// Makes a tap `name` in the namespace, down, with one queue and virtio-net headers
/// (`IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`). A name in use is an error.
pub fn create(_netns: &NetNs, name: &str) -> Result<Tap, NetError> {
    Err(NetError::BadName { name: name.to_owned() })
}

/// Joins tap and CNI interface: what the guest sends leaves through `cni_interface`, what arrives there
/// goes to the guest, and the namespace's own stack sees neither. Both are up afterwards, and the tap has
/// the MTU of the CNI interface. May be repeated.
pub fn join(_netns: &NetNs, tap: &str, _cni_interface: &str) -> Result<(), NetError> {
    Err(NetError::NoInterface { name: tap.to_owned() })
}
