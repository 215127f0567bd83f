//! Creates the cgroups of the agent and of the pod.

use std::fs;
use std::path::PathBuf;

use super::error::BootError;
use crate::paths;

/// Moves the agent to a cgroup of its own, with memory that containers cannot take, and enables all controllers for the cgroup of
/// the containers.
pub(super) fn create() -> Result<(), BootError> {
    let controllers = read(format!("{}/cgroup.controllers", paths::CGROUP))?;
    let all: Vec<String> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
    let all = all.join(" ");
    write("cgroup.subtree_control", &all)?;
    for name in ["agent", pod()] {
        let path = PathBuf::from(format!("{}/{name}", paths::CGROUP));
        fs::create_dir(&path).map_err(|source| BootError::File { path, source })?;
    }
    write(&format!("{}/cgroup.subtree_control", pod()), &all)?;
    write("agent/memory.min", "33554432")?;
    write("agent/cpu.weight", "10000")?;
    write("agent/cgroup.procs", "1")?;
    let path = PathBuf::from("/proc/self/oom_score_adj");
    fs::write(&path, "-1000").map_err(|source| BootError::File { path, source })
}

/// Gives the agent's cgroup a device program that allows everything, so that a template has the memory for compiled programs (2 MiB, filled
/// once) that the first container of each clone would need.
pub(super) fn allow_agent_devices() -> Result<(), BootError> {
    /// `return 1` (kernel's Documentation/bpf/standardization/instruction-set.rst).
    const ALLOW: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, 1, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    let cgroup = fs::File::open(format!("{}/agent", paths::CGROUP));
    let attached = cgroup.and_then(|cgroup| crate::sys::attach_device_program(cgroup, &ALLOW));
    attached.map_err(|source| BootError::DeviceProgram { source })
}

/// Leaves the agent enough threads to kill a fork bomb. A clone may have more memory than its template, and so more threads.
pub(super) fn limit_threads() -> Result<(), BootError> {
    let threads: u64 = read("/proc/sys/kernel/threads-max".into())?.trim().parse().unwrap_or(0);
    write(&format!("{}/pids.max", pod()), &(threads / 4 * 3).max(64).to_string())
}

/// The name of the containers' cgroup.
fn pod() -> &'static str {
    paths::POD_CGROUP.trim_start_matches('/')
}

fn read(path: String) -> Result<String, BootError> {
    fs::read_to_string(&path).map_err(|source| BootError::File { path: path.into(), source })
}

fn write(name: &str, value: &str) -> Result<(), BootError> {
    let path = PathBuf::from(format!("{}/{name}", paths::CGROUP));
    fs::write(&path, value).map_err(|source| BootError::File { path, source })
}
