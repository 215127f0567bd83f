//! Owns: what a console keeps over a save and restore.

use serde::{Deserialize, Serialize};

/// How large the guest believes the terminal to be, in characters. Input that it had not taken is not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Characters in a row.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}
