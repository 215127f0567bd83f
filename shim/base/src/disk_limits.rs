//! Defines the limits of what a pod reads from and writes to the disk of its node.

use serde::{Deserialize, Serialize};

/// The limits of a pod on one disk; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiskLimits {
    /// The bytes that it may read in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_second: Option<u64>,
    /// The bytes that it may write in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bytes_per_second: Option<u64>,
    /// The read requests that it may send in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads_per_second: Option<u64>,
    /// The write requests that it may send in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes_per_second: Option<u64>,
}
