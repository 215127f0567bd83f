//! Owns: what a pod without a guest is made of before its process gives up its rights: a control group with room for
//! those of containers, a folder for what they write, and the agent.
//! Threads: the first one, while it is the only one.

use crate::error::PodError;
use crate::share;
use crate::spec::{PodSpec, Shares};
use nacelle_base::files::{at, remove_tree_if_there};
use nacelle_engine::host::{Host, HostSpec};
use nacelle_jail::cgroup;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Starts the agent of the pod of `dir`.
pub(crate) fn engine(spec: &PodSpec, dir: &Path, agent: &Path, shares: Shares) -> Result<Host, PodError> {
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
        run_dir: dir,
        scratch: &scratch,
        netns: netns.filter(|_| !shares.network),
        node_pid: shares.pid,
        node_ipc: shares.ipc,
    };
    let host = Host::new(&host)?;
    share::introduce(i32::try_from(host.pid()).unwrap_or_default(), dir)?;
    Ok(host)
}

/// The control group of the pod process itself, in the pod's.
pub(crate) fn own_group(pod: &Path) -> PathBuf {
    pod.join("process")
}
