//! Counts the resources of a node: processes, mounts, links, namespaces, cgroups, files.

use crate::node::Netns;
use crate::run::run;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The resources at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census(BTreeSet<String>);

impl Census {
    /// Collects the processes and mounts that name `directory`, the links in the node's network namespace, the leases, and the files
    /// in `run` and `netns`.
    pub fn collect(directory: &Path, netns: &Netns) -> Self {
        let mut all = BTreeSet::new();
        for (pid, line) in processes(&directory.join("run")) {
            all.insert(format!("process {pid}: {line}"));
        }
        // That of the templates stays as long as the node runs.
        let others = mounts(directory).into_iter().filter(|mount| !mount.ends_with("/run/templates"));
        all.extend(others.map(|mount| format!("mount {mount}")));
        let links = run(netns.command("ip").args(["-o", "link"])).stdout;
        for link in links.lines().filter_map(|line| line.split(": ").nth(1)) {
            // The bridges stay: the plugin never removes them.
            if !link.strip_prefix("cni").is_some_and(|number| number.bytes().all(|digit| digit.is_ascii_digit())) {
                all.insert(format!("link {link}"));
            }
        }
        let rules = run(netns.command("iptables-save").args(["-t", "nat"])).stdout;
        all.extend(rules.lines().filter(|rule| rule.contains("-j DNAT")).map(|rule| format!("rule {rule}")));
        all.extend(cgroups(directory).into_iter().map(|group| format!("cgroup {}", group.display())));
        for part in ["run", "netns", "leases"] {
            files(&directory.join(part), &mut all);
        }
        Self(all)
    }

    /// Returns the resources that are not in `before`.
    pub fn added_since(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }
}

/// Returns the processes whose command line names `directory`: (PID, command line).
pub fn processes(directory: &Path) -> Vec<(i32, String)> {
    let wanted = directory.display().to_string();
    let pids = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| u32::try_from(*pid) != Ok(std::process::id()))
        .filter_map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains(&wanted).then_some((pid, line))
        })
        .collect()
}

/// Returns the mount points below `directory`, in the order of their creation.
pub fn mounts(directory: &Path) -> Vec<String> {
    let wanted = format!("{}/", directory.display());
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(1));
    points.filter(|point| point.starts_with(&wanted)).map(str::to_owned).collect()
}

/// Returns the name of the parent cgroup of the pods of a node.
pub fn cgroup_parent(directory: &Path) -> String {
    format!("/{}", directory.file_name().unwrap_or_default().to_string_lossy())
}

/// Returns the paths of that cgroup in every hierarchy that has it.
fn cgroup_parents(directory: &Path) -> Vec<PathBuf> {
    let (root, parent) = (Path::new("/sys/fs/cgroup"), cgroup_parent(directory));
    let trees = fs::read_dir(root).into_iter().flatten().flatten().map(|tree| tree.path()).chain([root.to_owned()]);
    trees.map(|tree| tree.join(parent.trim_start_matches('/'))).filter(|group| group.is_dir()).collect()
}

/// Returns the cgroups of a node's pods.
pub fn cgroups(directory: &Path) -> Vec<PathBuf> {
    let groups = cgroup_parents(directory).into_iter().flat_map(|parent| fs::read_dir(parent).into_iter().flatten());
    groups.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// Removes the parent cgroup of a node's pods, which is empty.
pub fn remove_cgroup_parent(directory: &Path) {
    for group in cgroup_parents(directory) {
        if let Err(error) = fs::remove_dir(&group) {
            eprintln!("cannot remove {}: {error}", group.display());
        }
    }
}

/// Returns the log files of pod processes and VMs below a node's run directory.
pub fn pod_logs(directory: &Path) -> Vec<PathBuf> {
    let mut all = BTreeSet::new();
    files(&directory.join("run"), &mut all);
    all.into_iter()
        .filter_map(|line| line.strip_prefix("file ").map(PathBuf::from))
        .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
        .collect()
}

/// Collects leases of addresses and all other files, except the lock and the "last reserved" marks of host-local, and the time of
/// the last event, which the daemon keeps for its successor.
fn files(directory: &Path, all: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            // Templates of VMs stay as images do: they belong to no pod.
            if directory.ends_with("run/templates") && name != "building" {
                continue;
            }
            files(&path, all);
        } else if name != "lock" && name != "last-event" && !name.starts_with("last_reserved") {
            all.insert(format!("file {}", path.display()));
        }
    }
}
