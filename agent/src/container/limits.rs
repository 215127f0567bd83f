//! Changes the limits of an existing container, all of them or none, and drops limits from a specification that this node cannot
//! enforce.

use super::reclaim;
use crate::cgroup;
use crate::huge_pages::{self, HugePageLimits};
use libcontainer::oci_spec::runtime::{LinuxCpu, Spec};
use nacelle_base::{Classify, FailureKind};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The limit below which a container would be killed at once.
const MEMORY_LIMIT: &str = "memory.max";
/// The limit of swap, a file that kernels without swap do not have.
pub(super) const SWAP_LIMIT: &str = "memory.swap.max";
/// The controllers of cgroup v2 (the kernel's Documentation/admin-guide/cgroup-v2.rst), which a node may leave to version 1.
const KNOWN_CONTROLLERS: [&str; 8] = ["cpu", "cpuset", "memory", "io", "pids", "hugetlb", "rdma", "misc"];
/// The most limits of one request.
const MAX_LIMITS: usize = 64;

/// Reasons the limits of a container were not changed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum LimitError {
    #[error("invalid limit file {file:?}")]
    Name { file: String },
    #[error("too many limits in one request: {count} (maximum {MAX_LIMITS})")]
    TooMany { count: usize },
    #[error("cannot set {MEMORY_LIMIT} to {limit}: {used} bytes are in use and cannot be reclaimed")]
    InUse { limit: u64, used: u64 },
    #[error("cannot write {value:?} to {file}")]
    Write { file: String, value: String, source: io::Error },
    #[error("cannot read {file}, so a change could not be undone")]
    Read { file: String, source: io::Error },
    #[error(
        "cannot set {file}: there is no cgroup v2 controller for it, only {controllers:?}, and containers run without such limits"
    )]
    NoController { file: String, controllers: String },
}

impl Classify for LimitError {
    fn kind(&self) -> FailureKind {
        match self {
            LimitError::InUse { .. } | LimitError::NoController { .. } => FailureKind::Conflict,
            LimitError::Name { .. } | LimitError::TooMany { .. } => FailureKind::Invalid,
            LimitError::Write { source, .. } | LimitError::Read { source, .. } => match source.raw_os_error() {
                // The kernel rejects the value or has no such file.
                Some(libc::EINVAL | libc::ERANGE | libc::ENOENT | libc::EOPNOTSUPP | libc::EACCES) => {
                    FailureKind::Invalid
                }
                _ => FailureKind::from(source.kind()),
            },
        }
    }
}

/// A file that was written, and its value before.
struct WrittenLimit {
    path: PathBuf,
    before: String,
}

/// Writes values to files of a cgroup, and `oom_score_adj` to all its processes. `proc` is the mount point of procfs. On an error,
/// restores what was written. Memory above a lower `memory.max` is reclaimed first, and stays reclaimed on an error.
pub fn change_limits(
    cgroup: &Path,
    proc: &Path,
    limits: &[(String, String)],
    oom_score_adj: Option<i32>,
) -> Result<(), LimitError> {
    if limits.len() > MAX_LIMITS {
        return Err(LimitError::TooMany { count: limits.len() });
    }
    let controllers = read_controllers(cgroup);
    let mut lowered = None;
    for (file, value) in limits {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        // The files of cgroup v2 itself kill, move and freeze processes.
        if !file.contains('.') || file.starts_with('.') || file.starts_with("cgroup.") || !file.chars().all(plain) {
            return Err(LimitError::Name { file: file.chars().take(100).collect() });
        }
        let controller = file.split('.').next().unwrap_or(file);
        let missing = |controllers: &&String| {
            !is_default_value(file, value) && !controllers.split_whitespace().any(|one| one == controller)
        };
        if let Some(controllers) =
            controllers.as_ref().filter(missing).filter(|_| KNOWN_CONTROLLERS.contains(&controller))
        {
            return Err(LimitError::NoController { file: file.clone(), controllers: controllers.trim().to_owned() });
        }
        if let (MEMORY_LIMIT, Ok(limit)) = (file.as_str(), value.parse::<u64>()) {
            lowered = Some(limit);
        }
    }
    // Last, because it changes something.
    if let Some(limit) = lowered {
        let used = read_file(&cgroup.join("memory.current"))?.trim().parse().unwrap_or(0);
        let used = if used > limit { reclaim_memory(cgroup, limit, used) } else { used };
        if used > limit {
            return Err(LimitError::InUse { limit, used });
        }
    }
    let mut written = Vec::new();
    let changed = change_each(cgroup, proc, limits, oom_score_adj, &mut written);
    if changed.is_err() {
        for WrittenLimit { path, before } in written.iter().rev() {
            // Some files take one line at a time.
            for line in before.lines() {
                if let Err(error) = write_file(path, line) {
                    tracing::warn!(path = %path.display(), %error, "cannot restore a limit");
                }
            }
        }
    }
    changed
}

/// Reclaims memory of a cgroup that uses `used` bytes, and returns how many it uses then.
fn reclaim_memory(cgroup: &Path, limit: u64, used: u64) -> u64 {
    match reclaim::reclaim_down_to(cgroup, limit) {
        Ok(used) => used,
        Err(error) => {
            tracing::warn!(cgroup = %cgroup.display(), %error, "cannot reclaim memory for a lower limit");
            used
        }
    }
}

fn change_each(
    cgroup: &Path,
    proc: &Path,
    limits: &[(String, String)],
    oom_score_adj: Option<i32>,
    written: &mut Vec<WrittenLimit>,
) -> Result<(), LimitError> {
    let mut set = |path: PathBuf, value: &str| {
        let before = read_file(&path)?;
        let result = write_file(&path, value);
        result.map_err(|source| LimitError::Write { file: file_name(&path), value: value.to_owned(), source })?;
        written.push(WrittenLimit { path, before });
        Ok(())
    };
    for (file, value) in limits {
        let path = cgroup.join(file);
        if !is_default_value(file, value) || path.exists() {
            set(path, value)?;
        }
    }
    let Some(adjustment) = oom_score_adj else { return Ok(()) };
    let processes = cgroup::list_processes(cgroup);
    let processes = processes.map_err(|source| LimitError::Read { file: "cgroup.procs".into(), source })?;
    for pid in processes {
        match set(proc.join(pid.to_string()).join("oom_score_adj"), &adjustment.to_string()) {
            Err(LimitError::Write { source, .. } | LimitError::Read { source, .. }) if is_missing(&source) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Whether a limit holds where its file is missing: "max" limits nothing, and of huge pages of a size that the kernel does not
/// have, or of swap where it has none, a container can have none.
fn is_default_value(file: &str, value: &str) -> bool {
    value == "max"
        || value.starts_with("max ")
        || (file.starts_with("hugetlb.") && value == "0")
        || (file == SWAP_LIMIT && value == "0")
}

/// Whether the error means that the process has ended.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the controllers of a cgroup, without which it has no files of limits; `None` if they cannot be read.
fn read_controllers(cgroup: &Path) -> Option<String> {
    fs::read_to_string(cgroup.join("cgroup.controllers")).ok()
}

fn read_file(path: &Path) -> Result<String, LimitError> {
    fs::read_to_string(path).map_err(|source| LimitError::Read { file: file_name(path), source })
}

/// Writes to an existing file, in one piece.
pub(super) fn write_file(path: &Path, value: &str) -> io::Result<()> {
    File::options().write(true).truncate(true).open(path)?.write_all(value.as_bytes())
}

/// Returns the huge page limits of a specification.
pub fn huge_page_limits(spec: &Spec) -> HugePageLimits {
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
    let Some(resources) = resources else { return HugePageLimits::new() };
    let of_sizes = resources.hugepage_limits().iter().flatten();
    let mut limits: HugePageLimits =
        of_sizes.filter_map(|limit| Some((limit.page_size().clone(), u64::try_from(limit.limit()).ok()?))).collect();
    let files = resources.unified().iter().flatten().map(|(file, value)| (file.as_str(), value.as_str()));
    limits.extend(huge_pages::limits_from_files(files));
    limits
}

/// Drops the limits from a specification for which there is no cgroup v2 controller here, and logs which: on a node that leaves a
/// controller to cgroup v1, containers run without its limits. Drops limits of 0 for huge page sizes that are not among `sizes`, and
/// the limit of swap without `has_swap`.
pub fn drop_unsupported_limits(spec: &mut Spec, controllers: &str, sizes: &[String], has_swap: bool) {
    let Some(resources) = spec.linux_mut().as_mut().and_then(|linux| linux.resources_mut().as_mut()) else { return };
    let missing = |name: &str| !controllers.split_whitespace().any(|controller| controller == name);
    let mut dropped = Vec::new();
    if missing("memory") && resources.memory().is_some() {
        resources.set_memory(None);
        dropped.push("memory");
    }
    if let Some(memory) = resources.memory_mut().as_mut().filter(|memory| !has_swap && memory.swap().is_some()) {
        memory.set_swap(None);
        dropped.push("swap");
    }
    if let Some(asked) = resources.cpu().clone() {
        // The daemon also sends a cpu part without limits.
        let mut kept = if missing("cpu") { LinuxCpu::default() } else { asked.clone() };
        let sets = if missing("cpuset") { (None, None) } else { (asked.cpus().clone(), asked.mems().clone()) };
        kept.set_cpus(sets.0).set_mems(sets.1);
        if kept != asked {
            dropped.push("cpu, cpuset");
        }
        resources.set_cpu(Some(kept).filter(|kept| *kept != LinuxCpu::default()));
    }
    if missing("pids") && resources.pids().is_some() {
        resources.set_pids(None);
        dropped.push("pids");
    }
    if let Some(limits) = resources.hugepage_limits().clone() {
        let none = missing("hugetlb");
        let (dropped_limits, kept): (Vec<_>, Vec<_>) = limits
            .into_iter()
            .filter(|limit| limit.limit() > 0 || sizes.contains(limit.page_size()))
            .partition(|limit| none && limit.limit() > 0);
        resources.set_hugepage_limits(Some(kept).filter(|kept| !none && !kept.is_empty()));
        dropped.extend(if dropped_limits.is_empty() { None } else { Some("hugetlb") });
    }
    if let Some(unified) = resources.unified().clone() {
        let known = |file: &String| !missing(file.split('.').next().unwrap_or(file));
        let (kept, dropped_limits): (HashMap<_, _>, HashMap<_, _>) =
            unified.into_iter().partition(|(file, _)| known(file));
        resources.set_unified(Some(kept).filter(|kept| !kept.is_empty()));
        dropped.extend(if dropped_limits.is_empty() { None } else { Some("unified") });
    }
    if !dropped.is_empty() {
        tracing::warn!(
            ?dropped,
            "this node cannot enforce these limits of a container: no controller of cgroup v2 has them"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_swap_is_left_out_where_the_kernel_has_none() {
        for (has_swap, expected) in [(true, Some(7)), (false, None)] {
            let mut spec: Spec = serde_json::from_value(serde_json::json!({
                "ociVersion": "1.0.2", "linux": { "resources": { "memory": { "limit": 5, "swap": 7 } } },
            }))
            .unwrap();
            drop_unsupported_limits(&mut spec, "memory", &[], has_swap);
            let memory = spec.linux().clone().unwrap().resources().clone().unwrap().memory().unwrap();
            assert_eq!((memory.limit(), memory.swap()), (Some(5), expected));
        }
        assert!(is_default_value(SWAP_LIMIT, "0") && !is_default_value(SWAP_LIMIT, "1"));
    }

    #[test]
    fn limits_without_a_controller_are_left_out() {
        let spec = |controllers| {
            let mut spec: Spec = serde_json::from_value(serde_json::json!({
                "ociVersion": "1.0.2",
                "linux": { "resources": {
                    "memory": { "limit": 5 }, "cpu": { "quota": 1, "cpus": "0-1", "mems": "0" },
                    "hugepageLimits": [
                        { "pageSize": "2MB", "limit": 0 }, { "pageSize": "1GB", "limit": 0 }, { "pageSize": "1GB", "limit": 1 },
                    ],
                    "unified": { "memory.high": "1", "hugetlb.2MB.max": "1" },
                } },
            }))
            .unwrap();
            drop_unsupported_limits(&mut spec, controllers, &["2MB".to_owned()], true);
            spec.linux().clone().unwrap().resources().clone().unwrap()
        };
        let all = spec("cpu cpuset memory pids hugetlb io\n");
        let cpu = all.cpu().clone().unwrap();
        assert_eq!((cpu.quota(), cpu.cpus().as_deref(), cpu.mems().as_deref()), (Some(1), Some("0-1"), Some("0")));
        for (controllers, quota, cpus) in [("cpu", Some(1), None), ("cpuset", None, Some("0-1"))] {
            let cpu = spec(controllers).cpu().clone().unwrap();
            assert_eq!((cpu.quota(), cpu.cpus().as_deref()), (quota, cpus));
        }
        assert!(all.memory().is_some() && all.cpu().is_some());
        let pages = all.hugepage_limits().iter().flatten().map(|limit| (limit.page_size().as_str(), limit.limit()));
        assert_eq!(pages.collect::<Vec<_>>(), [("2MB", 0), ("1GB", 1)]);
        assert_eq!(all.unified().as_ref().unwrap().len(), 2);
        let few = spec("hugetlb\n");
        assert!(few.memory().is_none() && few.cpu().is_none() && few.hugepage_limits().is_some());
        assert_eq!(few.unified().as_ref().unwrap().keys().collect::<Vec<_>>(), ["hugetlb.2MB.max"]);
        assert!(spec("").unified().is_none() && spec("").hugepage_limits().is_none());
    }

    /// Makes a directory that looks like a cgroup with two processes, one of which has ended.
    fn fake() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let outer = tempfile::tempdir().unwrap();
        let (cgroup, proc) = (outer.path().join("c"), outer.path().join("proc"));
        fs::create_dir_all(&cgroup).unwrap();
        fs::create_dir_all(proc.join("7")).unwrap();
        for (file, text) in [
            ("memory.max", "max\n"),
            ("memory.current", "1000\n"),
            ("cpu.max", "max 100000\n"),
            ("cgroup.kill", ""),
            ("cgroup.procs", "7\n8\n"),
        ] {
            fs::write(cgroup.join(file), text).unwrap();
        }
        fs::write(proc.join("7/oom_score_adj"), "3\n").unwrap();
        (outer, cgroup, proc)
    }

    fn limits(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn all_limits_are_written() {
        let (_outer, cgroup, proc) = fake();
        let none = ("hugetlb.1GB.max", "0");
        change_limits(&cgroup, &proc, &limits(&[("memory.max", "1000"), none, ("cpu.max", "5 10")]), Some(-4)).unwrap();
        let text = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert_eq!(text(cgroup.join("memory.max")), "1000");
        assert_eq!(text(cgroup.join("cpu.max")), "5 10");
        assert_eq!(text(proc.join("7/oom_score_adj")), "-4");
    }

    #[test]
    fn a_failure_names_the_file_and_changes_nothing() {
        let (_outer, cgroup, proc) = fake();
        for (list, kind, word) in [
            (&[("cpu.max", "5 10"), ("memory.max", "999")][..], FailureKind::Conflict, "1000 bytes are in use"),
            (&[("cpu.max", "5 10"), ("hugetlb.1GB.max", "1")], FailureKind::Invalid, "hugetlb.1GB.max"),
            (&[("cpu.max", "5 10"), ("cgroup.kill", "1")], FailureKind::Invalid, "cgroup.kill"),
            (&[("cpu.max", "5 10"), ("../c/cpu.max", "1")], FailureKind::Invalid, "../c"),
            (&[("cpu.max", "5 10"), (".x", "1")], FailureKind::Invalid, ".x"),
            (&[("cpu.max", "5 10"), ("tasks", "1")], FailureKind::Invalid, "tasks"),
        ] {
            let error = change_limits(&cgroup, &proc, &limits(list), None).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(word), "{error}");
            assert_eq!(fs::read_to_string(cgroup.join("cpu.max")).unwrap().trim(), "max 100000", "{error}");
        }
        assert!(change_limits(&cgroup, &proc, &limits(&[("cpu.max", "1"); MAX_LIMITS + 1]), None).is_err());
    }

    #[test]
    fn a_missing_controller_is_reported() {
        let (_outer, cgroup, proc) = fake();
        fs::write(cgroup.join("cgroup.controllers"), "cpu\n").unwrap();
        let error =
            change_limits(&cgroup, &proc, &limits(&[("cpu.max", "5 10"), ("memory.max", "2000")]), None).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Conflict, "{error}");
        assert!(
            error.to_string().contains("cannot set memory.max") && error.to_string().contains("\"cpu\""),
            "{error}"
        );
        assert_eq!(fs::read_to_string(cgroup.join("cpu.max")).unwrap(), "max 100000\n");
        let error = change_limits(&cgroup, &proc, &limits(&[("memry.max", "1")]), None).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
        change_limits(&cgroup, &proc, &limits(&[("cpu.max", "5 10"), ("hugetlb.2MB.max", "0")]), None).unwrap();
        // Without the controller nothing is limited, which "max" asks for.
        fs::remove_file(cgroup.join("memory.max")).unwrap();
        change_limits(&cgroup, &proc, &limits(&[("memory.max", "max"), ("pids.max", "max")]), None).unwrap();
    }
}
