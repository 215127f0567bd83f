//! Owns: what a vsock device keeps over a save and restore.

use serde::{Deserialize, Serialize};

/// The state of a vsock device. Connections are not kept: the guest is told that they are gone. Listeners belong to
/// the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The context id of the guest.
    pub guest_cid: u32,
}
