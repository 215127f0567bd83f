//! Defines how the daemon identifies a pod process after its own restart, and parses what /proc has of a process. `nacelle-pod` reads
//! these facts from /proc and files.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::str::FromStr;

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

/// The fields of /proc/PID/stat (proc(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcStat<'s>(Vec<&'s str>);

impl<'s> ProcStat<'s> {
    /// Splits the text into its fields. `None` if it does not have the form of the file.
    pub fn parse(text: &'s str) -> Option<ProcStat<'s>> {
        // The name of the process may contain any character.
        let (_, fields) = text.rsplit_once(')')?;
        Some(ProcStat(fields.split_whitespace().collect()))
    }

    /// Returns a field after the name of the process by its number in proc(5), from 3: the state.
    pub fn field<T: FromStr>(&self, number: usize) -> Option<T> {
        self.0.get(number.checked_sub(3)?)?.parse().ok()
    }
}

/// Returns the text of a field of /proc/PID/status (proc(5)), such as "12 kB" for "VmRSS".
pub fn status_field<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parentheses_in_the_name_of_a_process_do_not_shift_the_fields() {
        let stat = ProcStat::parse("12 (a) b) S 1 x").unwrap();
        assert_eq!((stat.field(3), stat.field(4), stat.field::<u64>(5)), (Some('S'), Some(1), None));
        assert_eq!((stat.field::<u64>(6), stat.field::<u64>(2)), (None, None));
        assert_eq!(ProcStat::parse("12"), None);
    }

    #[test]
    fn a_field_of_the_status_has_its_whole_name() {
        let status = "VmRSSx:\t1 kB\nVmRSS:\t  12 kB\nThreads:\t3\n";
        assert_eq!(["VmRSS", "Threads", "Vm"].map(|name| status_field(status, name)), [Some("12 kB"), Some("3"), None]);
    }
}
