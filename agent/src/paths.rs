//! Paths of the agent's files, in the guest or in the pod's root on the node.

use std::path::{Path, PathBuf};

/// All that is the agent's.
pub const RUN: &str = "/run/nacelle";
/// Images, one folder per partition number.
pub const IMAGES: &str = "/run/nacelle/images";
/// The pod's emptyDirs that are the machine's own, a tmpfs or a disk each.
pub const EMPTY_DIRS: &str = "/run/nacelle/empty-dirs";
/// The scratch disk: a folder per container with its upper layer.
pub const SCRATCH: &str = "/run/nacelle/scratch";
/// libcontainer's state, one folder per container. Short, because a socket's path is.
pub const CONTAINERS: &str = "/run/nacelle/c";
/// A folder per container with its `config.json` and its root's mount point.
pub const BUNDLES: &str = "/run/nacelle/b";
/// The pod's hosts, hostname and resolv.conf.
pub const FILES: &str = "/run/nacelle/files";
/// The pod's user namespace, if it has one.
pub const USER_NAMESPACE: &str = "/run/nacelle/user";
/// The PID namespace that all containers share, if they do and have a user namespace.
pub const PID_NAMESPACE: &str = "/run/nacelle/pid";
/// The pod's shared memory.
pub const SHM: &str = "/dev/shm";
/// cgroup v2.
pub const CGROUP: &str = "/sys/fs/cgroup";
/// The cgroup of all containers, below `CGROUP`.
pub const POD_CGROUP: &str = "/pod";
/// The search path for programs of a container whose image sets none.
pub const DEFAULT_SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Where the agent of a pod on the node sees the node's files. Containers do not see them: they leave the agent's root.
pub const NODE: &str = "/node";

/// Returns the path at which the agent of a pod on the node sees a path of the node.
pub fn of_node(path: &Path) -> PathBuf {
    Path::new(NODE).join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the directory on the scratch disk that a container's root is made of.
pub fn scratch_of(id: &str) -> PathBuf {
    Path::new(SCRATCH).join(id)
}

/// Returns the directory on the scratch disk with what a container has written to its root.
pub fn upper_layer_of(id: &str) -> PathBuf {
    scratch_of(id).join("upper")
}
