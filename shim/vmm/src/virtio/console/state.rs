//! Defines the state of a console that is saved and restored.

use serde::{Deserialize, Serialize};

/// The size of the terminal as the guest knows it. Input that the guest had not read is not saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleState {
    /// The number of characters in a row.
    pub columns: u16,
    /// The number of rows.
    pub rows: u16,
}
