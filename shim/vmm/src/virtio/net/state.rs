//! Owns: what a network interface keeps over a save and restore.

use serde::{Deserialize, Serialize};

/// What the guest's driver did. The frames of its queues are not kept, nor are those on their way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The address, which the guest may have set.
    pub mac: [u8; 6],
    /// Pairs of queues that the device has.
    pub max_pairs: u16,
    /// Pairs that the driver uses.
    pub pairs: u16,
    /// What the driver takes unfinished: feature bits 1, 7 to 9, 54 and 55 (Virtio 1.2, 5.1.3).
    pub offloads: u64,
}
