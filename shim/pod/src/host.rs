//! Owns: what a pod without a guest is made of before its process gives up its rights: a control group with room for
//! those of containers, a folder for what they write, and the agent.
//! Threads: the first one, while it is the only one.

use crate::error::PodError;
use crate::spec::PodSpec;
use crate::{jail_dir, share};
use nacelle_base::files::{at, remove_tree_if_there};
use nacelle_engine::host::{Host, HostSpec};
use nacelle_jail::cgroup::{self, Usage as GroupUsage};
use nacelle_model::namespace::NodeNamespaces;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Starts the agent of the pod of `dir`.
pub(crate) fn engine(spec: &PodSpec, dir: &Path, agent: &Path, shares: NodeNamespaces) -> Result<Host, PodError> {
    let scratch = spec.scratch_file();
    remove_tree_if_there(&scratch)?;
    DirBuilder::new().recursive(true).mode(0o700).create(&scratch).map_err(at("create", &scratch))?;
    if let Some(group) = spec.jail.as_ref().and_then(|jail| jail.cgroup.as_ref()) {
        // The agent is born in it, this process leaves it for one of its own: it hands its controllers on.
        cgroup::join(group)?;
        cgroup::hand_down(group);
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
    let host = Host::new(&host)?;
    share::introduce(i32::try_from(host.pid()).unwrap_or_default(), dir)?;
    Ok(host)
}

/// The name of the control group of the pod process itself, in the pod's.
const OWN: &str = "process";

/// That group.
pub(crate) fn own_group(pod: &Path) -> PathBuf {
    pod.join(OWN)
}

/// What a pod's control group has used, by the text of /proc/PID/cgroup of its process.
pub fn group_usage(groups: &str) -> Option<GroupUsage> {
    cgroup::usage(groups, OWN)
}

/// Whether, by the same text, the processes of containers are in the pod's control group, as those without a guest are.
pub fn is_of_containers(groups: &str) -> bool {
    groups.lines().any(|line| Path::new(line).ends_with(OWN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_group_is_known_by_its_processs() {
        let own = own_group(Path::new("/nacelle/a"));
        assert!(is_of_containers(&format!("4:memory:{}\n0::/\n", own.display())));
        for text in ["4:memory:/nacelle/a\n", "0::/process/nacelle-a\n", "0::/a/subprocess\n", ""] {
            assert!(!is_of_containers(text), "{text:?}");
        }
    }
}
