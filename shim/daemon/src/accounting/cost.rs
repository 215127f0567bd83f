//! Measures the cost of a VM on the node: the CPU time and memory of its pod process and that process's descendants, read from
//! /proc (proc(5)); the share of the guest's memory; and the counters of their cgroup. The functions block for some reads of
//! /proc.

use nacelle_model::process::{ProcStat, ProcessIdentity, status_field};
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
    let guest = directories.iter().map(|directory| guest_memory(directory)).max_by_key(|guest| guest.own_bytes);
    let guest = guest.unwrap_or_default();
    let anonymous = directories.iter().try_fold(AnonymousMemory::default(), |sum, directory| sum.add(directory));
    // A template belongs to no pod, although its file is shared memory of each clone.
    let of_pod = |memory: AnonymousMemory| {
        memory.private_bytes.saturating_add(memory.shared_bytes.saturating_sub(guest.template_share_bytes))
    };
    whole.anonymous_bytes = anonymous.map_or(whole.anonymous_bytes, of_pod);
    whole.memory_bytes = whole.memory_bytes.saturating_sub(guest.template_bytes);
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
    Some(VmCost { whole, guest_bytes: guest.own_bytes.min(whole.memory_bytes), group })
}

/// The memory of processes without a file on a disk, each page divided by the number of processes that share it: forked processes share
/// their memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AnonymousMemory {
    private_bytes: u64,
    /// Files in memory, as templates are.
    shared_bytes: u64,
}

impl AnonymousMemory {
    /// Adds the memory of a process. Returns `None` if the kernel does not report it.
    fn add(self, directory: &Path) -> Option<AnonymousMemory> {
        let text = match fs::read_to_string(directory.join("smaps_rollup")) {
            Ok(text) => text,
            // The process has ended meanwhile.
            Err(_) => return Some(self),
        };
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.saturating_mul(1024))
        };
        Some(AnonymousMemory {
            private_bytes: self.private_bytes.saturating_add(of("Pss_Anon")?),
            shared_bytes: self.shared_bytes.saturating_add(of("Pss_Shmem")?),
        })
    }
}

/// The memory of a guest in one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct GuestMemory {
    /// The resident bytes that are the guest's own.
    own_bytes: u64,
    /// The resident bytes of its template that it has not written, which its clones share.
    template_bytes: u64,
    /// The same, each page divided by the number of processes that have mapped it.
    template_share_bytes: u64,
}

/// A mapping in /proc/PID/smaps, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Mapping {
    start: u64,
    end: u64,
    /// It may be guest memory: anonymous, writable and not executable (an emulator's translated code is executable), or of a template.
    can_be_guest: bool,
    is_template: bool,
    resident: u64,
    proportional: u64,
    anonymous: u64,
}

impl Mapping {
    /// Parses the first line of a mapping: "START-END RIGHTS OFFSET DEVICE INODE NAME".
    fn parse(line: &str) -> Option<Mapping> {
        let mut words = line.split_whitespace();
        let (range, rights) = (words.next()?, words.next()?);
        let (start, end) = range.split_once('-')?;
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16));
        let name = words.nth(3).unwrap_or_default();
        let is_template = name.contains(TEMPLATES) && name.ends_with(TEMPLATE_MEMORY);
        let is_anonymous =
            name.is_empty() || ["/memfd:", "/anon_hugepage", "[anon"].iter().any(|start| name.starts_with(start));
        let can_be_guest = rights.starts_with("rw-") && (is_anonymous || is_template);
        Some(Mapping { start: start.ok()?, end: end.ok()?, can_be_guest, is_template, ..Mapping::default() })
    }
}

/// Parts of the path of a template's memory, which its clones have mapped.
const TEMPLATES: &str = "/templates/";
const TEMPLATE_MEMORY: &str = "/memory";

/// Returns the memory of the guest in this process. It is in large mappings; that of a clone is in many that adjoin each other, with parts of
/// its template among them.
fn guest_memory(directory: &Path) -> GuestMemory {
    let Ok(file) = File::open(directory.join("smaps")) else { return GuestMemory::default() };
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in BufReader::new(file).lines().map_while(Result::ok) {
        let mut words = line.split_whitespace();
        let (Some(first), second) = (words.next(), words.next().unwrap_or_default()) else { continue };
        let bytes = || second.parse::<u64>().unwrap_or(0).saturating_mul(1024);
        match (first.strip_suffix(':'), mappings.last_mut()) {
            (None, _) => mappings.extend(Mapping::parse(&line)),
            (Some("Rss" | "Shared_Hugetlb" | "Private_Hugetlb"), Some(last)) => {
                last.resident = last.resident.saturating_add(bytes());
            }
            (Some("Pss"), Some(last)) => last.proportional = bytes(),
            (Some("Anonymous"), Some(last)) => last.anonymous = bytes(),
            _ => {}
        }
    }
    let mut sum = GuestMemory::default();
    for region in mappings.chunk_by(|one, next| one.can_be_guest && next.can_be_guest && one.end == next.start) {
        let is_clone = region.iter().any(|mapping| mapping.is_template);
        for mapping in region {
            let large = mapping.end.saturating_sub(mapping.start) >= MIN_GUEST_MAPPING;
            if mapping.is_template {
                sum.own_bytes = sum.own_bytes.saturating_add(mapping.anonymous);
                sum.template_bytes =
                    sum.template_bytes.saturating_add(mapping.resident.saturating_sub(mapping.anonymous));
                let share = mapping.proportional.saturating_sub(mapping.anonymous);
                sum.template_share_bytes = sum.template_share_bytes.saturating_add(share);
            } else if mapping.can_be_guest && (is_clone || large) {
                sum.own_bytes = sum.own_bytes.saturating_add(mapping.resident);
            }
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
    let stat = ProcStat::parse(stat)?;
    let mut used = (14..=17).map(|number| stat.field::<u64>(number));
    let ticks = used.try_fold(0_u64, |sum, ticks| Some(sum.saturating_add(ticks?)))?;
    Some((ticks, stat.field(22)?))
}

/// Returns a field of /proc/PID/status in bytes, 0 if it is missing.
fn status_bytes(status: &str, name: &str) -> u64 {
    let kib = status_field(status, name).and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok());
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
        let mut next = 0x7f00_0000_0000_u64;
        let mut mapping = |rights: &str, name: &str, size: u64, rss: u64| {
            let start = next;
            next = start + (size << 10);
            // A page lies between two mappings.
            let head = format!("{:x}-{next:x} {rights} 00000000 00:01 7 {name}\n", start);
            next += 4096;
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
        let own = GuestMemory { own_bytes: 21 << 10, ..GuestMemory::default() };
        assert_eq!(guest_memory(directory.path()), own);
        fs::write(directory.path().join("smaps"), [0xff, 0xfe, b'\n']).unwrap();
        let none = GuestMemory::default();
        assert_eq!((guest_memory(directory.path()), guest_memory(&directory.path().join("none"))), (none, none));
    }

    #[test]
    fn a_clones_memory_is_told_from_its_templates() {
        let directory = tempfile::tempdir().unwrap();
        let mapping = |range: &str, name: &str, [rss, pss, anonymous]: [u64; 3]| {
            format!("{range} rw-p 00000000 00:01 7 {name}\nRss: {rss} kB\nPss: {pss} kB\nAnonymous: {anonymous} kB\n")
        };
        let template = "/run/nacelle/templates/0123456789abcdef/memory (deleted)";
        let text = [
            // Not beside the guest's memory.
            mapping("1000-2000", "", [4, 4, 4]),
            mapping("200000-400000", template, [100, 30, 20]),
            mapping("400000-800000", "", [2048, 2048, 2048]),
            mapping("800000-a00000", template, [50, 10, 0]),
            mapping("a00000-b00000", "/other/templates/x", [9, 9, 9]),
        ];
        fs::write(directory.path().join("smaps"), text.concat()).unwrap();
        let expected = GuestMemory { own_bytes: 2068 << 10, template_bytes: 130 << 10, template_share_bytes: 20 << 10 };
        assert_eq!(guest_memory(directory.path()), expected);
    }

    #[test]
    fn shared_pages_count_in_parts() {
        let directory = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(directory.path().join("smaps_rollup"), text).unwrap();
        let sum = AnonymousMemory { private_bytes: 7, shared_bytes: 8 };
        assert_eq!(sum.add(directory.path()), Some(sum), "it has ended");
        write("Rss: 90 kB\nPss: 50 kB\nPss_Dirty: 1 kB\nPss_Anon:     3 kB\nPss_File: 9 kB\nPss_Shmem:  2 kB\n");
        let both = AnonymousMemory { private_bytes: 7 + (3 << 10), shared_bytes: 8 + (2 << 10) };
        assert_eq!(sum.add(directory.path()), Some(both));
        for text in ["Pss: 50 kB\n", "Pss_Anon: x kB\nPss_Shmem: 2 kB\n", "Pss_Anon: 3\nPss_Shmem: 2 kB\n", ""] {
            write(text);
            assert_eq!(sum.add(directory.path()), None, "{text:?}");
        }
    }

    #[test]
    fn the_account_of_a_process_adds_up() {
        let own = nacelle_pod::identity::of_this_process().unwrap();
        let account = measure_vm(&own).unwrap();
        assert!(account.whole.memory_bytes >= account.guest_bytes, "{account:?}");
    }
}
