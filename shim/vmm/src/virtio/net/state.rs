//! Defines the state of a network interface that is saved and restored.

use serde::{Deserialize, Serialize};

/// The state that the guest's driver has set. Frames in the queues and in flight are not saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The address, which the guest may have set.
    pub mac: [u8; 6],
    /// The number of queue pairs of the device.
    pub max_pairs: u16,
    /// The number of pairs that the driver uses.
    pub pairs: u16,
    /// The offloads that the driver accepts: feature bits 1, 7 to 9, 54 and 55 (Virtio 1.2, 5.1.3).
    pub offloads: u64,
}
