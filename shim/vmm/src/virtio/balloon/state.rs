//! Owns: what a balloon keeps over a save and restore.

use serde::{Deserialize, Serialize};

/// What the guest was asked for and what it has given, in pages of 4 KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Pages that it should give.
    pub target: u32,
    /// Pages that it says it has given.
    pub actual: u32,
}
