//! Defines how the daemon identifies a pod process after its own restart. `nacelle-pod` reads these facts from /proc and files.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One process of one boot of the node. A pid alone is reused; pid, start time and boot id together are not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The process id.
    pub pid: i32,
    /// The start time in clock ticks since boot: field 22 of /proc/PID/stat.
    pub start_time: u64,
    /// The boot in which the process ran: /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
}

/// What the daemon must know of a pod process to find and release it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodProcess {
    /// The process.
    pub identity: ProcessIdentity,
    /// The cgroup of the process, relative to the root of each hierarchy; `None` if the daemon created none for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// The path of the pod's scratch disk, or of the directory that replaces the disk on engine `host`.
    pub scratch: PathBuf,
}
