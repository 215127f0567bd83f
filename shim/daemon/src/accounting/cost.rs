//! Measures the cost of a VM on the node: the CPU time and memory of its pod process and that process's descendants, read from
//! /proc (proc(5)); the share of the guest's memory; and the counters of their cgroup. The functions block for some reads of
//! /proc.

use nacelle_model::process::ProcessIdentity;
use nacelle_pod::{GroupUsage, cgroup_usage, holds_containers};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// The largest number of processes of one pod that are measured.
const MAX_PROCESSES: usize = 64;

/// The resource use of processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessCost {
    /// CPU time in nanoseconds, including that of children that have ended.
    pub cpu_nanos: u64,
    /// Resident memory in bytes, including huge pages. Memory that processes of a pod share counts once, with the largest share
    /// of one process.
    pub memory_bytes: u64,
    /// The part of `memory_bytes` without a file: the guest's memory, and private memory of the processes.
    pub anonymous_bytes: u64,
}

/// The smallest mapping in bytes that counts as guest memory: half the memory of the smallest VM.
const MIN_GUEST_MAPPING: u64 = 32 << 20;

/// The cost of a VM, and its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmCost {
    /// The total.
    pub whole: ProcessCost,
    /// The part of the memory that backs the guest's memory, in bytes.
    pub guest_bytes: u64,
    /// The counters of the node's kernel; `None` without the controllers for them.
    pub group: Option<GroupUsage>,
}

/// Returns the account of this process with its descendants; `None` if it is gone. Reads all their memory mappings.
pub fn measure_vm(process: &ProcessIdentity) -> Option<VmCost> {
    let mut whole = measure_processes(process)?;
    let directories = list_descendants(Path::new("/proc"), process.pid);
    let guest_bytes = directories.iter().map(|directory| guest_memory(directory)).max().unwrap_or(0);
    whole.anonymous_bytes =
        directories.iter().try_fold(0, |sum, directory| add_anonymous(sum, directory)).unwrap_or(whole.anonymous_bytes);
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap_or_default();
    let group = cgroup_usage(&groups);
    if let Some(group) = group {
        // Exact to the nanosecond: in /proc each process loses up to 10 ms, and ended processes that were never seen are missing.
        whole.cpu_nanos = group.cpu_nanos;
        // Without a guest only the cgroup counts page cache that no process has mapped.
        if holds_containers(&groups) {
            whole.anonymous_bytes = group.anonymous_bytes;
        }
    }
    whole.memory_bytes = whole.memory_bytes.max(whole.anonymous_bytes);
    Some(VmCost { whole, guest_bytes: guest_bytes.min(whole.memory_bytes), group })
}

/// Adds a process's memory without a file to `sum`, each page divided by the number of processes that share it: forked processes
/// share their memory. Returns `None` if the kernel does not report it.
fn add_anonymous(sum: u64, directory: &Path) -> Option<u64> {
    let text = match fs::read_to_string(directory.join("smaps_rollup")) {
        Ok(text) => text,
        // The process has ended meanwhile.
        Err(_) => return Some(sum),
    };
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    let kib = of("Pss_Anon")?.saturating_add(of("Pss_Shmem")?);
    Some(sum.saturating_add(kib.saturating_mul(1024)))
}

/// Returns the resident bytes of the mappings in /proc/PID/smaps that may be guest memory: large, anonymous, writable and not
/// executable (an emulator's translated code is executable).
fn guest_memory(directory: &Path) -> u64 {
    let (mut sum, mut large) = (0_u64, false);
    let Ok(file) = File::open(directory.join("smaps")) else { return 0 };
    let mut can_be = false;
    for line in BufReader::new(file).lines().map_while(Result::ok) {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let kib = || second.parse::<u64>().unwrap_or(0).saturating_mul(1024);
        match first.strip_suffix(':') {
            None => {
                let name = words.nth(3).unwrap_or_default();
                can_be = second.starts_with("rw-")
                    && (name.is_empty()
                        || ["/memfd:", "/anon_hugepage", "[anon"].iter().any(|start| name.starts_with(start)));
                large = false;
            }
            Some("Size") => large = can_be && kib() >= MIN_GUEST_MAPPING,
            Some("Rss" | "Shared_Hugetlb" | "Private_Hugetlb") if large => sum = sum.saturating_add(kib()),
            Some(_) => {}
        }
    }
    sum
}

/// Returns the cost of this process with its descendants; `None` if it is gone.
pub fn measure_processes(process: &ProcessIdentity) -> Option<ProcessCost> {
    measure_tree(Path::new("/proc"), process.pid, Some(process.start_time))
}

fn measure_tree(proc: &Path, pid: i32, started: Option<u64>) -> Option<ProcessCost> {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
    let nanos = 1_000_000_000 / u64::try_from(ticks.unwrap_or(100)).unwrap_or(100).max(1);
    let (mut sum, mut shared) = (ProcessCost::default(), 0);
    for (n, directory) in list_descendants(proc, pid).into_iter().enumerate() {
        let (Ok(stat), Ok(status)) =
            (fs::read_to_string(directory.join("stat")), fs::read_to_string(directory.join("status")))
        else {
            // The process has ended meanwhile; without the first process there is no result.
            (n > 0).then_some(())?;
            continue;
        };
        let (ticks, start) = parse_stat(&stat)?;
        if n == 0 && started.is_some_and(|started| started != start) {
            return None;
        }
        sum.cpu_nanos = sum.cpu_nanos.saturating_add(ticks.saturating_mul(nanos));
        let with_others = status_bytes(&status, "RssShmem");
        shared = with_others.max(shared);
        let all = status_bytes(&status, "VmRSS").saturating_add(status_bytes(&status, "HugetlbPages"));
        sum.memory_bytes = sum.memory_bytes.saturating_add(all.saturating_sub(with_others));
        sum.anonymous_bytes = sum.anonymous_bytes.saturating_add(status_bytes(&status, "RssAnon"));
    }
    sum.memory_bytes = sum.memory_bytes.saturating_add(shared);
    sum.anonymous_bytes = sum.anonymous_bytes.saturating_add(shared);
    Some(sum)
}

/// Returns the /proc directories of a process and its descendants, the process's own first.
fn list_descendants(proc: &Path, pid: i32) -> Vec<PathBuf> {
    let mut directories = vec![proc.join(pid.to_string())];
    let mut at = 0;
    while let Some(directory) = directories.get(at).filter(|_| at < MAX_PROCESSES) {
        let children = list_children(directory);
        directories.extend(children.iter().map(|pid| proc.join(pid.to_string())));
        at += 1;
    }
    directories.truncate(MAX_PROCESSES);
    directories
}

/// Returns from /proc/PID/stat the ticks used by a process and its ended children, and its start time.
fn parse_stat(stat: &str) -> Option<(u64, u64)> {
    // The process name may contain any character.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks = (14..=17).map(field).try_fold(0_u64, |sum, ticks| Some(sum.saturating_add(ticks?)))?;
    Some((ticks, field(22)?))
}

/// Returns a field of /proc/PID/status in bytes, 0 if it is missing.
fn status_bytes(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn list_children(directory: &Path) -> Vec<i32> {
    let threads = fs::read_dir(directory.join("task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(proc: &Path, pid: i32, ticks: u64, kib: u64, children: &str) {
        let directory = proc.join(pid.to_string());
        fs::create_dir_all(directory.join(format!("task/{pid}"))).unwrap();
        fs::create_dir_all(directory.join("task/9")).unwrap();
        let stat = format!("{pid} (a) b) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 1 0 0 20 0 4 0 777 1000 1 0");
        fs::write(directory.join("stat"), stat).unwrap();
        let status =
            format!("Name:\tx\nVmRSS:\t{kib} kB\nRssAnon:\t2 kB\nRssShmem:\t{} kB\nHugetlbPages:\t1 kB\n", kib / 10);
        fs::write(directory.join("status"), status).unwrap();
        fs::write(directory.join("task/9/children"), children).unwrap();
    }

    #[test]
    fn a_process_counts_with_those_it_started() {
        let proc = tempfile::tempdir().unwrap();
        process(proc.path(), 5, 10, 100, "6 8 ");
        process(proc.path(), 6, 20, 200, "");
        let cost = measure_tree(proc.path(), 5, Some(777)).unwrap();
        assert_eq!(cost.memory_bytes, (90 + 180 + 20 + 2) << 10, "what they share counts once");
        assert_eq!(cost.anonymous_bytes, (2 + 2 + 20) << 10);
        assert_eq!(cost.cpu_nanos % 32, 0, "32 ticks");
        assert_eq!(measure_tree(proc.path(), 5, Some(778)), None, "another process of this number");
        assert_eq!(measure_tree(proc.path(), 8, None), None);
    }

    #[test]
    fn this_process_has_used_something() {
        let cost = measure_tree(Path::new("/proc"), i32::try_from(std::process::id()).unwrap(), None).unwrap();
        assert!(cost.memory_bytes > 0);
    }

    #[test]
    fn what_is_no_stat_is_none() {
        for text in ["", ")", "1 (x) S 1 2", "1 (x) S 1 1 1 0 -1 0 0 0 0 0 a 1 0 0 20 0 4 0 777"] {
            assert_eq!(parse_stat(text), None, "{text:?}");
        }
        assert_eq!(status_bytes("VmRSS: x kB\nVmRSS:", "VmRSS"), 0);
    }

    #[test]
    fn a_guests_memory_is_told_from_the_rest() {
        let directory = tempfile::tempdir().unwrap();
        let mapping = |rights: &str, name: &str, size: u64, rss: u64| {
            let head = format!("7f0000000000-7f0008000000 {rights} 00000000 00:01 7 {name}\n");
            format!("{head}Size: {size} kB\nRss: {rss} kB\nPss: 1 kB\nPrivate_Hugetlb: 0 kB\n")
        };
        let text = [
            mapping("rw-p", "", 64 << 10, 1),
            mapping("rw-s", "/memfd:ram (deleted)", 64 << 10, 20),
            mapping("rw-p", "", 31 << 10, 300),
            mapping("rwxp", "", 1 << 20, 4000),
            mapping("r--p", "/usr/lib/x", 1 << 20, 50_000),
            mapping("rw-p", "[heap]", 64 << 10, 600_000),
        ];
        fs::write(directory.path().join("smaps"), text.concat()).unwrap();
        assert_eq!(guest_memory(directory.path()), 21 << 10);
        fs::write(directory.path().join("smaps"), [0xff, 0xfe, b'\n']).unwrap();
        assert_eq!((guest_memory(directory.path()), guest_memory(&directory.path().join("none"))), (0, 0));
    }

    #[test]
    fn shared_pages_count_in_parts() {
        let directory = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(directory.path().join("smaps_rollup"), text).unwrap();
        assert_eq!(add_anonymous(7, directory.path()), Some(7), "it has ended");
        write("Rss: 90 kB\nPss: 50 kB\nPss_Dirty: 1 kB\nPss_Anon:     3 kB\nPss_File: 9 kB\nPss_Shmem:  2 kB\n");
        assert_eq!(add_anonymous(7, directory.path()), Some(7 + (5 << 10)));
        for text in ["Pss: 50 kB\n", "Pss_Anon: x kB\nPss_Shmem: 2 kB\n", "Pss_Anon: 3\nPss_Shmem: 2 kB\n", ""] {
            write(text);
            assert_eq!(add_anonymous(7, directory.path()), None, "{text:?}");
        }
    }

    #[test]
    fn the_account_of_a_process_adds_up() {
        let own = nacelle_pod::identity::of_this_process().unwrap();
        let account = measure_vm(&own).unwrap();
        assert!(account.whole.memory_bytes >= account.guest_bytes, "{account:?}");
    }
}
