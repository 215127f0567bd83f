//! Defines the state of a balloon that is saved and restored.

use serde::{Deserialize, Serialize};

/// The requested and the reported size of the balloon, in pages of 4 KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// The number of pages that the host requests.
    pub target: u32,
    /// The number of pages that the guest reports.
    pub actual: u32,
}
