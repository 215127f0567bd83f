//! Defines how the emptyDirs of a pod that kubelet keeps on its disk reach the guest, and their quotas.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The smallest quota of an emptyDir in bytes: a file system with a journal must fit.
pub const MIN_QUOTA: u64 = 16 << 20;
/// The largest quota in bytes. The memory that a guest needs for the file system grows with it.
pub const MAX_QUOTA: u64 = 4 << 40;

/// The emptyDirs of a VM pod that kubelet keeps on its disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptyDirs {
    /// A new emptyDir is a disk of the VM; otherwise it is a share of the node's directory. One that is a disk stays a disk.
    pub disks: bool,
    /// Quotas in bytes by volume name.
    pub limits: BTreeMap<String, u64>,
    /// The quota of all others in bytes; `None` for the free space of the node.
    pub limit: Option<u64>,
}
