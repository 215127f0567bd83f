//! Defines the state of a vsock device that is saved and restored.

use serde::{Deserialize, Serialize};

/// The state of a vsock device. Connections are not saved: the guest is notified that they are closed. Listeners belong to the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// The context id of the guest.
    pub guest_cid: u32,
}
