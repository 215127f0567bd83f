//! Manages the cgroup of a pod process: in the one hierarchy of cgroup v2, or in each hierarchy of cgroup v1 that accounts
//! or limits resources. The functions block.

use nacelle_base::files::{FileError, at};
use nacelle_base::pidfd::{pidfd_open, pidfd_signal};
use std::fs;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

/// The mount point of the node's cgroup file systems.
pub(crate) const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The hierarchies of cgroup v1 that account or limit what a pod process uses; cpuset would need values first. `unified` is
/// the hierarchy of v2 besides them, which can kill whole cgroups.
const V1_HIERARCHIES: [&str; 7] = ["memory", "cpu,cpuacct", "cpu", "cpuacct", "pids", "blkio", "unified"];
/// The limit for the killed processes of a cgroup to end.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the cgroup's directory in each hierarchy of this node; none for a path that would lead out of them.
pub fn directories(group: &Path) -> Vec<PathBuf> {
    directories_below(Path::new(CGROUP_ROOT), group)
}

fn directories_below(root: &Path, group: &Path) -> Vec<PathBuf> {
    let mut below = PathBuf::new();
    for part in group.components() {
        match part {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => below.push(name),
            Component::ParentDir | Component::Prefix(_) => return Vec::new(),
        }
    }
    if below.as_os_str().is_empty() {
        return Vec::new();
    }
    if is_v2(root) {
        return vec![root.join(below)];
    }
    let trees = V1_HIERARCHIES.iter().map(|name| root.join(name));
    // A name that is a symbolic link refers to a hierarchy that is in the list too.
    let trees = trees.filter(|tree| tree.symlink_metadata().is_ok_and(|tree| tree.is_dir()));
    trees.filter(|tree| tree.join("cgroup.procs").exists()).map(|tree| tree.join(&below)).collect()
}

/// Returns the memory limit in bytes of a cgroup and its ancestors; `None` if there is no limit, or no such cgroup.
pub fn memory_limit(group: &Path) -> Option<u64> {
    memory_limit_below(Path::new(CGROUP_ROOT), group)
}

fn memory_limit_below(root: &Path, group: &Path) -> Option<u64> {
    let limit = |directory: &Path, file: &str| {
        let limit = fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok()?;
        // cgroup v1 reports a cgroup without a limit as the largest possible number of pages.
        Some(limit).filter(|limit| *limit < i64::MAX as u64 / 2)
    };
    smallest_limit(root, group, |directory| {
        ["memory.max", "memory.limit_in_bytes"].into_iter().filter_map(|file| limit(directory, file)).min()
    })
}

/// Returns the CPU limit in thousandths of a CPU of a cgroup and its ancestors; `None` if there is no limit, or no such cgroup.
pub fn cpu_limit(group: &Path) -> Option<u64> {
    cpu_limit_below(Path::new(CGROUP_ROOT), group)
}

fn cpu_limit_below(root: &Path, group: &Path) -> Option<u64> {
    let read = |directory: &Path, file: &str| fs::read_to_string(directory.join(file)).ok();
    smallest_limit(root, group, |directory| {
        // Quota and period are in one file of cgroup v2, in two of v1. Without a limit the quota is "max", or negative.
        let text = read(directory, "cpu.max")
            .or_else(|| Some([read(directory, "cpu.cfs_quota_us")?, read(directory, "cpu.cfs_period_us")?].concat()))?;
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        let (quota, period) = (numbers.next()?.ok()?, numbers.next()?.ok().filter(|period| *period > 0)?);
        Some(quota.saturating_mul(1000) / period)
    })
}

/// Returns the smallest limit of a cgroup and its ancestors, in all hierarchies.
fn smallest_limit(root: &Path, group: &Path, limit: impl Fn(&Path) -> Option<u64>) -> Option<u64> {
    let directories = directories_below(root, group);
    let within = directories
        .iter()
        .flat_map(|directory| directory.ancestors().take_while(|ancestors| ancestors.starts_with(root)));
    within.filter(|directory| *directory != root).filter_map(limit).min()
}

/// The resource usage of a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The CPU time in nanoseconds.
    pub cpu_nanos: u64,
    /// All memory that is charged to the cgroup, in bytes, including the page cache of files that it was the first to read or write.
    pub memory_bytes: u64,
    /// The part of it that belongs to no file: memory of processes and shared memory, and so the memory of VMs.
    pub anonymous_bytes: u64,
    /// The maximum of `memory_bytes`; `None` with cgroup v2 before Linux 5.19.
    pub peak_bytes: Option<u64>,
}

/// Returns the resource usage of the cgroup of a process, including child cgroups, given the text of its /proc/PID/cgroup.
/// If that cgroup is named `part`, its parent is used. Returns `None` without the needed controllers.
pub fn usage(groups: &str, part: &str) -> Option<Usage> {
    usage_below(Path::new(CGROUP_ROOT), groups, part)
}

fn usage_below(root: &Path, groups: &str, part: &str) -> Option<Usage> {
    // With cgroup v1 a process may be in another cgroup in each hierarchy; with v2 no controller is named.
    let directory_of = |controller: &str, file: &str| {
        let mut lines = groups.lines().map(|line| line.splitn(3, ':').skip(1));
        let group = lines.find_map(|mut line| {
            let (controllers, group) = (line.next()?, line.next()?);
            let named = if is_v2(root) { "" } else { controller };
            controllers.split(',').any(|one| one == named).then_some(group)
        })?;
        let group = Path::new(group);
        let group = if group.ends_with(part) { group.parent()? } else { group };
        directories_below(root, group).into_iter().find(|directory| directory.join(file).exists())
    };
    let number =
        |directory: &Path, file: &str| fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok();
    let lines = |directory: &Path, file: &str, names: &[&str]| {
        let text = fs::read_to_string(directory.join(file)).ok()?;
        let of =
            |name: &&str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
        names.iter().map(of).try_fold(0_u64, |sum, one| Some(sum.saturating_add(one?)))
    };
    let group = |current: &str, peak: &str, anonymous: &[&str]| {
        let directory = directory_of("memory", current)?;
        let memory_bytes = number(&directory, current)?;
        Some((memory_bytes, lines(&directory, "memory.stat", anonymous)?, number(&directory, peak)))
    };
    let (memory_bytes, anonymous_bytes, peak_bytes) = group("memory.current", "memory.peak", &["anon", "shmem"])
        .or_else(|| group("memory.usage_in_bytes", "memory.max_usage_in_bytes", &["total_rss", "total_shmem"]))?;
    let micros = || lines(&directory_of("cpu", "cpu.stat")?, "cpu.stat", &["usage_usec"])?.checked_mul(1000);
    let cpu_nanos = micros().or_else(|| number(&directory_of("cpuacct", "cpuacct.usage")?, "cpuacct.usage"))?;
    Some(Usage { cpu_nanos, memory_bytes, anonymous_bytes, peak_bytes })
}

/// Returns how many processes of a cgroup the OOM killer has killed, because of the cgroup's limit or because the node ran
/// out of memory; child cgroups do not count.
pub fn oom_kills(group: &Path) -> u64 {
    oom_kills_below(Path::new(CGROUP_ROOT), group)
}

fn oom_kills_below(root: &Path, group: &Path) -> u64 {
    let of = |directory: &PathBuf| {
        let files = ["memory.events.local", "memory.oom_control"].map(|file| fs::read_to_string(directory.join(file)));
        let text = files.into_iter().find_map(Result::ok)?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok())
    };
    directories_below(root, group).iter().find_map(of).unwrap_or(0)
}

/// Returns whether the node has cgroup v2 only.
pub fn is_unified() -> bool {
    is_v2(Path::new(CGROUP_ROOT))
}

/// What a cgroup may keep in swap, and what of its memory is protected from reclaim, in bytes, where [`u64::MAX`] is "max"
/// (cgroup-v2.rst, "Memory Interface Files"); and how early its processes are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// `memory.swap.max`.
    pub swap_max: u64,
    /// `memory.low`.
    pub low: u64,
    /// `memory.min`.
    pub min: u64,
    /// The OOM score adjustment of all its processes, from -1000 to 1000, which [`crate::set_oom_score`] sets.
    pub oom_score_adj: i32,
}

impl Default for MemoryPolicy {
    /// What a new VM has: all of the node's swap, and no protection.
    fn default() -> MemoryPolicy {
        MemoryPolicy { swap_max: u64::MAX, low: 0, min: 0, oom_score_adj: 0 }
    }
}

/// Writes the policy to the files of the cgroup, as far as the node has them: cgroup v1 has none of them.
pub fn set_memory_policy(group: &Path, policy: MemoryPolicy) -> Result<(), FileError> {
    set_memory_policy_below(Path::new(CGROUP_ROOT), group, policy)
}

fn set_memory_policy_below(root: &Path, group: &Path, policy: MemoryPolicy) -> Result<(), FileError> {
    let Some(directory) = directories_below(root, group).pop().filter(|_| is_v2(root)) else { return Ok(()) };
    for (name, bytes) in [("memory.swap.max", policy.swap_max), ("memory.low", policy.low), ("memory.min", policy.min)]
    {
        let file = directory.join(name);
        let text = if bytes == u64::MAX { "max".to_owned() } else { bytes.to_string() };
        match fs::OpenOptions::new().write(true).open(&file).and_then(|mut file| file.write_all(text.as_bytes())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            written => written.map_err(at("write", &file))?,
        }
    }
    Ok(())
}

/// Creates the cgroup if it is missing, with all controllers that the node allows (an existing one keeps those that its
/// creator has enabled), and moves the calling process into it. Continues after a failure, and returns the first one.
pub fn join(group: &Path) -> Result<(), FileError> {
    let mut first = Ok(());
    for directory in directories(group) {
        let file = directory.join("cgroup.procs");
        let missing = !directory.exists();
        let created = fs::create_dir_all(&directory).map_err(at("create", &directory));
        if missing && created.is_ok() {
            enable_controllers(group);
        }
        let joined =
            created.and_then(|()| fs::write(&file, std::process::id().to_string()).map_err(at("write", &file)));
        if let Err(error) = joined {
            // The cgroup was just created, and would stay empty.
            let _ = fs::remove_dir(&directory);
            first = first.and(Err(error));
        }
    }
    first
}

/// Gives the processes of a cgroup the smallest share of the CPUs that others want, too (`cpu.weight`, with cgroup v1 `cpu.shares`), where the
/// node has that controller.
pub fn set_lowest_cpu_weight(group: &Path) -> Result<(), FileError> {
    for directory in directories(group) {
        for (name, lowest) in [("cpu.weight", "1"), ("cpu.shares", "2")] {
            let file = directory.join(name);
            match fs::OpenOptions::new().write(true).open(&file).and_then(|mut file| file.write_all(lowest.as_bytes()))
            {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                written => written.map_err(at("write", &file))?,
            }
        }
    }
    Ok(())
}

/// Enables the controllers of cgroup v2 in all ancestors of the cgroup, as far as the node allows, because a cgroup can
/// limit only what its ancestors have enabled. An ancestor with processes of its own enables nothing more: with threaded
/// controllers alone it would become a threaded domain, whose children cannot have processes (cgroup-v2.rst, "Threads").
pub fn enable_controllers(group: &Path) {
    enable_controllers_below(Path::new(CGROUP_ROOT), group);
}

fn enable_controllers_below(root: &Path, group: &Path) {
    if !is_v2(root) {
        return;
    }
    let Some(directory) = directories_below(root, group).pop() else { return };
    let mut ancestors: Vec<&Path> =
        directory.ancestors().skip(1).take_while(|directory| directory.starts_with(root)).collect();
    ancestors.reverse();
    for directory in ancestors {
        let Ok(controllers) = fs::read_to_string(directory.join("cgroup.controllers")) else { return };
        // Only the node's root cgroup, which has no type, may have both processes and enabled controllers.
        let with_processes =
            || fs::read_to_string(directory.join("cgroup.procs")).map_or(true, |text| !text.is_empty());
        if directory.join("cgroup.type").exists() && with_processes() {
            return;
        }
        for controller in controllers.split_whitespace() {
            // A controller that cannot be enabled does not prevent the others.
            let _ = fs::write(directory.join("cgroup.subtree_control"), format!("+{controller}"));
        }
    }
}

/// Kills all processes in the cgroup and its children, and removes it from every hierarchy; succeeds if it does not exist.
/// Blocks until the processes have ended. Continues after a failure and returns the first one.
pub fn remove(group: &Path) -> Result<(), FileError> {
    let directories = directories(group);
    for directory in &directories {
        kill_processes(directory);
    }
    let deadline = Instant::now() + REMOVE_TIMEOUT;
    let mut first = Ok(());
    for directory in directories {
        loop {
            match remove_tree(&directory) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                    kill_processes(&directory);
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => {
                    first = first.and(Err(at("remove", &directory)(error)));
                    break;
                }
            }
        }
    }
    first
}

/// Removes a cgroup after its children.
fn remove_tree(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            match remove_tree(&entry.path()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
    }
    fs::remove_dir(directory)
}

fn is_v2(root: &Path) -> bool {
    root.join("cgroup.controllers").exists()
}

/// Kills the processes of a cgroup and its children. A process that is missed is killed when removing the cgroup fails.
fn kill_processes(directory: &Path) {
    let kill_file = fs::OpenOptions::new().write(true).open(directory.join("cgroup.kill"));
    if kill_file.and_then(|mut file| io::Write::write_all(&mut file, b"1")).is_ok() {
        return;
    }
    // This file does not exist before Linux 5.14, nor in cgroup v1.
    let file = directory.join("cgroup.procs");
    let members = || fs::read_to_string(&file).unwrap_or_default();
    for line in members().lines() {
        let Ok(pid) = line.trim().parse() else { continue };
        // The pid may have been reused: the pidfd is opened before the members are read again.
        let Ok(handle) = pidfd_open(pid) else { continue };
        if members().lines().any(|again| again == line) {
            // A process that has ended meanwhile needs no signal.
            let _ = pidfd_signal(&handle, libc::SIGKILL);
        }
    }
    for below in fs::read_dir(directory).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            kill_processes(&below.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_lies_in_every_tree_and_never_outside() {
        let root = tempfile::tempdir().unwrap();
        for tree in ["memory", "pids", "cpuset"] {
            fs::create_dir(root.path().join(tree)).unwrap();
            fs::write(root.path().join(tree).join("cgroup.procs"), "").unwrap();
        }
        fs::create_dir(root.path().join("blkio")).unwrap();
        std::os::unix::fs::symlink("memory", root.path().join("cpu")).unwrap();
        let directories = |group: &str| directories_below(root.path(), Path::new(group));
        assert_eq!(directories("/a/b"), [root.path().join("memory/a/b"), root.path().join("pids/a/b")]);
        fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        assert_eq!(directories("a/b"), [root.path().join("a/b")]);
        for bad in ["../a", "a/../../b", "", "/"] {
            assert_eq!(directories(bad), Vec::<PathBuf>::new(), "{bad}");
        }
    }

    #[test]
    fn a_memory_policy_is_written_where_the_node_has_its_files() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("pods/a");
        fs::create_dir_all(&group).unwrap();
        let set = |policy| set_memory_policy_below(root.path(), Path::new("pods/a"), policy);
        let read = |file: &str| fs::read_to_string(group.join(file)).ok();
        let policy = MemoryPolicy { swap_max: 0, low: u64::MAX, min: 4096, oom_score_adj: 0 };
        // With cgroup v1 nothing is created.
        set(policy).unwrap();
        assert_eq!(fs::read_dir(&group).unwrap().count(), 0);
        fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        for file in ["memory.low", "memory.min"] {
            fs::write(group.join(file), "").unwrap();
        }
        set(policy).unwrap();
        let written = ["memory.swap.max", "memory.low", "memory.min"].map(read);
        assert_eq!(written, [None, Some("max".to_owned()), Some("4096".to_owned())], "a kernel without swap");
        fs::create_dir(group.join("memory.swap.max")).unwrap();
        let error = set(policy).unwrap_err();
        assert!(error.to_string().contains("pods/a/memory.swap.max"), "{error}");
    }

    #[test]
    fn the_least_cpu_time_of_all_groups_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let file = |group: &str, file: &str, text: &str| {
            let directory = root.path().join(group);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join(file), text).unwrap();
        };
        let limit = |group: &str| cpu_limit_below(root.path(), Path::new(group));
        // With cgroup v1 the cgroups are in several hierarchies.
        file("cpu", "cgroup.procs", "");
        for (group, quota) in [("cpu/pods", "-1"), ("cpu/pods/a", "1000"), ("cpu/pods/a/b", "-1")] {
            file(group, "cpu.cfs_quota_us", &format!("{quota}\n"));
            file(group, "cpu.cfs_period_us", "100000\n");
        }
        assert_eq!(
            [limit("pods/a/b/new"), limit("pods/a"), limit("pods"), limit("x")],
            [Some(10), Some(10), None, None]
        );
        // With cgroup v2 there is one hierarchy.
        file("", "cgroup.controllers", "cpu\n");
        for (group, text) in [("pods", "max 100000\n"), ("pods/a", "250000 100000\n"), ("pods/a/b", "150000 50000\n")] {
            file(group, "cpu.max", text);
        }
        assert_eq!([limit("pods/a/b"), limit("pods/a"), limit("pods")], [Some(2500), Some(2500), None]);
        for text in ["", "max", "5", "5 0", "x 5"] {
            file("pods", "cpu.max", text);
            assert_eq!(limit("pods"), None, "{text}");
        }
    }

    #[test]
    fn a_group_with_processes_hands_nothing_on() {
        let root = tempfile::tempdir().unwrap();
        // The node's root cgroup has processes, but no type.
        for (group, processes) in [("", "1\n2\n"), ("a", ""), ("a/b", "3\n"), ("a/b/c", "")] {
            let directory = root.path().join(group);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("cgroup.controllers"), "pids\n").unwrap();
            fs::write(directory.join("cgroup.procs"), processes).unwrap();
            if !group.is_empty() {
                fs::write(directory.join("cgroup.type"), "domain\n").unwrap();
            }
        }
        enable_controllers_below(root.path(), Path::new("a/b/c/d"));
        let handed = |group: &str| fs::read_to_string(root.path().join(group).join("cgroup.subtree_control")).ok();
        assert_eq!(
            ["", "a", "a/b", "a/b/c"].map(handed),
            [Some("+pids".to_owned()), Some("+pids".to_owned()), None, None]
        );
    }

    #[test]
    fn the_least_limit_on_the_way_counts() {
        let root = tempfile::tempdir().unwrap();
        let limit = |group: &str| memory_limit_below(root.path(), Path::new(group));
        fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        for (group, text) in [("a", "max\n"), ("a/b", "300\n"), ("a/b/c", "500\n"), ("a/d", "max\n")] {
            fs::create_dir_all(root.path().join(group)).unwrap();
            fs::write(root.path().join(group).join("memory.max"), text).unwrap();
        }
        assert_eq!(
            ["a/b/c", "a/b", "a/b/c/gone", "a/d", "a", "../a"].map(limit),
            [Some(300), Some(300), Some(300), None, None, None]
        );
        let v1 = tempfile::tempdir().unwrap();
        fs::create_dir_all(v1.path().join("memory/a")).unwrap();
        fs::write(v1.path().join("memory/cgroup.procs"), "").unwrap();
        for (text, known) in [("9223372036854771712\n", None), ("7\n", Some(7))] {
            fs::write(v1.path().join("memory/a/memory.limit_in_bytes"), text).unwrap();
            assert_eq!(memory_limit_below(v1.path(), Path::new("a")), known);
        }
    }

    #[test]
    fn removing_a_missing_cgroup_succeeds() {
        let group = format!("nacelle/test-{}", std::process::id());
        remove(Path::new(&group)).unwrap();
    }

    #[test]
    fn a_group_that_cannot_be_killed_at_once_is_killed_one_by_one() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("below")).unwrap();
        let start = || std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let (mut spared, mut killed) = (start(), [start(), start()]);
        for (group, child) in ["", "below"].iter().zip(&killed) {
            fs::write(directory.path().join(group).join("cgroup.procs"), format!("{}\n", child.id())).unwrap();
        }
        kill_processes(directory.path());
        for child in &mut killed {
            assert!(!child.wait().unwrap().success());
        }
        assert!(spared.try_wait().unwrap().is_none());
        spared.kill().unwrap();
        spared.wait().unwrap();
    }

    #[test]
    fn the_usage_of_a_cgroup_is_read_from_its_files() {
        let write = |root: &Path, files: &[(&str, &str)]| {
            for (file, text) in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
        };
        let root = tempfile::tempdir().unwrap();
        write(
            root.path(),
            &[
                ("cgroup.controllers", "memory"),
                ("a/b/memory.current", "100\n"),
                ("a/b/memory.stat", "anon 30\nanon_thp 5\nfile 60\nshmem 40\n"),
                ("a/b/cpu.stat", "usage_usec 7\nuser_usec 5\n"),
                ("a/memory.current", "1\n"),
            ],
        );
        let expected = Usage { cpu_nanos: 7000, memory_bytes: 100, anonymous_bytes: 70, peak_bytes: None };
        assert_eq!(usage_below(root.path(), "0::/a/b\n", "own"), Some(expected));
        write(root.path(), &[("a/b/memory.peak", "120\n")]);
        assert_eq!(usage_below(root.path(), "0::/a/b\n", "own"), Some(Usage { peak_bytes: Some(120), ..expected }));
        assert_eq!(usage_below(root.path(), "0::/a/b/own\n", "own").map(|usage| usage.memory_bytes), Some(100));
        for gone in ["0::/a\n", "0::/own\n", "0::/../a/b\n", "0::/a/c\n", "", "x"] {
            assert_eq!(usage_below(root.path(), gone, "own"), None, "{gone:?}");
        }
        let v1 = tempfile::tempdir().unwrap();
        write(
            v1.path(),
            &[
                ("memory/cgroup.procs", ""),
                ("cpu,cpuacct/cgroup.procs", ""),
                ("memory/m/memory.usage_in_bytes", "100\n"),
                ("memory/m/memory.max_usage_in_bytes", "120\n"),
                (
                    "memory/m/memory.stat",
                    "cache 50\nrss 3\nshmem 4\ntotal_cache 60\ntotal_rss 30\ntotal_rss_huge 0\ntotal_shmem 40\n",
                ),
                ("cpu,cpuacct/c/cpuacct.usage", "7000\n"),
            ],
        );
        let groups = "9:pids:/p\n8:memory:/m\n4:cpu,cpuacct:/c\n0::/\n";
        write(v1.path(), &[("memory/p/memory.usage_in_bytes", "1\n")]);
        assert_eq!(usage_below(v1.path(), groups, "own"), Some(Usage { peak_bytes: Some(120), ..expected }));
    }

    #[test]
    fn oom_kills_are_counted() {
        let root = tempfile::tempdir().unwrap();
        let kills = |group: &str| oom_kills_below(root.path(), Path::new(group));
        for (group, text) in [("a", "low 0\noom 5\noom_kill 2\noom_group_kill 7\n"), ("b", "oom_kill x\n"), ("c", "")] {
            fs::create_dir_all(root.path().join(group)).unwrap();
            fs::write(root.path().join(group).join("memory.events.local"), text).unwrap();
        }
        fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        assert_eq!(["a", "b", "c", "d", "../a"].map(kills), [2, 0, 0, 0, 0]);
        let v1 = tempfile::tempdir().unwrap();
        fs::create_dir_all(v1.path().join("memory/a")).unwrap();
        fs::write(v1.path().join("memory/cgroup.procs"), "").unwrap();
        fs::write(v1.path().join("memory/a/memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
            .unwrap();
        assert_eq!(oom_kills_below(v1.path(), Path::new("a")), 1);
    }
}
