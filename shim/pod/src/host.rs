//! Prepares a pod without a guest before the pod process drops its rights: a cgroup with child cgroups for the containers,
//! a directory for their writable layers, and the agent. Runs on the first thread, while it is the only one.

use crate::error::PodError;
use crate::spec::PodSpec;
use crate::{jail_dir, share};
use nacelle_base::files::{at, remove_tree_if_there};
use nacelle_engine::host::{HostEngine, HostSpec};
use nacelle_jail::cgroup::{self, Usage as GroupUsage};
use nacelle_model::namespace::NodeNamespaces;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Starts the agent of the pod in `dir`.
pub(crate) fn start_agent(
    spec: &PodSpec,
    dir: &Path,
    agent: &Path,
    shares: NodeNamespaces,
) -> Result<HostEngine, PodError> {
    let scratch = spec.scratch_file();
    remove_tree_if_there(&scratch)?;
    DirBuilder::new().recursive(true).mode(0o700).create(&scratch).map_err(at("create", &scratch))?;
    if let Some(group) = spec.jail.as_ref().and_then(|jail| jail.cgroup.as_ref()) {
        // The agent starts in this cgroup, and the pod process then moves to a cgroup of its own, so that the controllers
        // can be delegated to child cgroups.
        cgroup::join(group)?;
        cgroup::enable_controllers(group);
    }
    let netns = spec.network.as_ref().map(|network| network.netns.as_path());
    let host = HostSpec {
        program: agent,
        run_dir: &jail_dir(dir),
        scratch: &scratch,
        netns: netns.filter(|_| !shares.network),
        node_pid: shares.pid,
        node_ipc: shares.ipc,
    };
    let host = HostEngine::new(&host)?;
    share::record_process(i32::try_from(host.pid()).unwrap_or_default(), dir)?;
    Ok(host)
}

/// The name of the pod process's own cgroup, below the pod's.
const PROCESS_GROUP: &str = "process";

/// Returns the path of the pod process's own cgroup.
pub(crate) fn process_group(pod: &Path) -> PathBuf {
    pod.join(PROCESS_GROUP)
}

/// Returns the resource usage of a pod's cgroup, given the text of /proc/PID/cgroup of its process.
pub fn cgroup_usage(groups: &str) -> Option<GroupUsage> {
    cgroup::usage(groups, PROCESS_GROUP)
}

/// Returns whether the processes of containers are in the pod's cgroup, as they are without a guest, given the same text.
pub fn holds_containers(groups: &str) -> bool {
    groups.lines().any(|line| Path::new(line).ends_with(PROCESS_GROUP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_a_pod_without_guest_is_recognized() {
        let own = process_group(Path::new("/nacelle/a"));
        assert!(holds_containers(&format!("4:memory:{}\n0::/\n", own.display())));
        for text in ["4:memory:/nacelle/a\n", "0::/process/nacelle-a\n", "0::/a/subprocess\n", ""] {
            assert!(!holds_containers(text), "{text:?}");
        }
    }
}
