//! Reads the memory of processes, cgroups and the node from the node's kernel (proc(5)).

use nacelle_e2e::census;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The number of bytes of a MiB.
pub const MIB: f64 = 1_048_576.0;

/// Returns these processes and all their descendants.
pub fn with_descendants(roots: &[i32]) -> BTreeSet<i32> {
    let parents: Vec<(i32, i32)> = fs::read_dir("/proc")
        .expect("/proc is mounted")
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            Some((pid, parent_pid(&fs::read_to_string(entry.path().join("stat")).ok()?)?))
        })
        .collect();
    let mut found: BTreeSet<i32> = roots.iter().copied().collect();
    loop {
        let more: Vec<i32> = parents
            .iter()
            .filter(|(pid, parent)| found.contains(parent) && !found.contains(pid))
            .map(|(pid, _)| *pid)
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

/// Returns the parent from /proc/PID/stat; the command's name may contain any characters.
fn parent_pid(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the proportional memory (PSS) of processes in bytes, by the program's name.
pub fn pss_by_program(processes: &BTreeSet<i32>) -> BTreeMap<String, f64> {
    let mut programs = BTreeMap::new();
    for pid in processes {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let kib = crate::benches::read_kib(*pid, "smaps_rollup", "Pss:");
        // A process that has ended meanwhile has none.
        if kib.is_finite() {
            *programs.entry(name.trim().to_owned()).or_insert(0.0) += kib * 1024.0;
        }
    }
    programs
}

/// The memory in use on the node, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct NodeMemory {
    /// All memory in use except the page cache.
    pub all: f64,
    /// The part of the kernel: its structures, stacks, page tables and per-CPU counters.
    pub kernel: f64,
}

/// Reads the memory in use on the node.
pub fn node_memory_in_use() -> NodeMemory {
    let text = fs::read_to_string("/proc/meminfo").expect("/proc is mounted");
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib: Option<f64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.unwrap_or(0.0) * 1024.0
    };
    let files = of("Buffers") + of("Cached") - of("Shmem") + of("SReclaimable");
    let kernel = ["SUnreclaim", "KernelStack", "PageTables", "Percpu"].map(of).iter().sum();
    NodeMemory { all: of("MemTotal") - of("MemFree") - files, kernel }
}

/// The kernel's counts for a pod's cgroup and those below it, in bytes and nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct CgroupUsage {
    /// All charged memory.
    pub all: f64,
    /// The anonymous part.
    pub anonymous: f64,
    /// The part of kernel structures.
    pub kernel: f64,
    /// The CPU time.
    pub cpu_nanos: f64,
}

/// Reads the cgroup of the pod with this id, or that of all pods of a node; `None` where the kernel does not count.
pub fn read_cgroup(directory: &Path, pod: Option<&str>) -> Option<CgroupUsage> {
    let groups = census::cgroups(directory).into_iter();
    let directories: BTreeSet<PathBuf> = match pod {
        Some(id) => groups.filter(|path| path.ends_with(format!("nacelle-{id}"))).collect(),
        None => groups.filter_map(|path| Some(path.parent()?.to_owned())).collect(),
    };
    let read = |file: &str| directories.iter().find_map(|directory| fs::read_to_string(directory.join(file)).ok());
    let number = |file: &str| read(file)?.trim().parse::<f64>().ok();
    let of = |file: &str, names: &[&str]| {
        let text = read(file)?;
        let one =
            |name: &&str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<f64>().ok());
        names.iter().map(one).try_fold(0.0, |sum, one| Some(sum + one?))
    };
    // The fields of cgroup v2, or of v1.
    Some(CgroupUsage {
        all: number("memory.current").or_else(|| number("memory.usage_in_bytes"))?,
        anonymous: of("memory.stat", &["anon", "shmem"])
            .or_else(|| of("memory.stat", &["total_rss", "total_shmem"]))?,
        kernel: of("memory.stat", &["kernel"]).or_else(|| number("memory.kmem.usage_in_bytes")).unwrap_or(0.0),
        cpu_nanos: of("cpu.stat", &["usage_usec"]).map(|micros| micros * 1000.0).or_else(|| number("cpuacct.usage"))?,
    })
}

/// Enables memory counting for the pods' cgroups where the kernel requires that, as kubelet does.
pub fn enable_accounting(directory: &Path) {
    let root = Path::new("/sys/fs/cgroup");
    if !root.join("cgroup.controllers").exists() {
        return;
    }
    let parent = root.join(census::cgroup_parent(directory).trim_start_matches('/'));
    fs::create_dir_all(&parent).expect("control groups can be made");
    for directory in [root, &parent] {
        let file = directory.join("cgroup.subtree_control");
        fs::write(&file, "+memory").unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    }
}
