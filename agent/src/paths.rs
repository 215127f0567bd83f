//! Defines the paths of the agent's files, in the guest or in the pod's root on the node.

use std::path::{Path, PathBuf};

/// The directory of the agent's own files.
pub const RUN: &str = "/run/nacelle";
/// Mounted images, one directory per partition number.
pub const IMAGES: &str = "/run/nacelle/images";
/// The pod's emptyDir volumes in the guest, a tmpfs, hugetlbfs or disk each.
pub const EMPTY_DIRS: &str = "/run/nacelle/empty-dirs";
/// The scratch disk, one directory per container with its writable layer.
pub const SCRATCH: &str = "/run/nacelle/scratch";
/// libcontainer's state, one directory per container. Short, because the paths of sockets are limited.
pub const CONTAINERS: &str = "/run/nacelle/c";
/// Bundles: one directory per container with its `config.json` and its root's mount point.
pub const BUNDLES: &str = "/run/nacelle/b";
/// The pod's hosts, hostname and resolv.conf.
pub const FILES: &str = "/run/nacelle/files";
/// The mount point of the pod's user namespace, if it has one.
pub const USER_NAMESPACE: &str = "/run/nacelle/user";
/// The mount point of the containers' shared PID namespace, if they have one and a user namespace.
pub const PID_NAMESPACE: &str = "/run/nacelle/pid";
/// The pod's shared memory.
pub const SHM: &str = "/dev/shm";
/// The mount point of cgroup v2.
pub const CGROUP: &str = "/sys/fs/cgroup";
/// The cgroup of all containers, below `CGROUP`.
pub const POD_CGROUP: &str = "/pod";
/// The search path for programs of a container whose image sets none.
pub const DEFAULT_SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The mount point of the node's root, for the agent of a pod on the node. Containers do not see it: they leave the agent's root.
pub const NODE: &str = "/node";

/// Returns the path at which the agent of a pod on the node sees a path of the node.
pub fn node_path(path: &Path) -> PathBuf {
    Path::new(NODE).join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the directory on the scratch disk that a container's root is made of.
pub fn scratch_directory(id: &str) -> PathBuf {
    Path::new(SCRATCH).join(id)
}

/// Returns the directory on the scratch disk with the volumes that a container's image declares.
pub fn anonymous_volumes(id: &str) -> PathBuf {
    scratch_directory(id).join("volumes")
}

/// Returns the directory on the scratch disk with what a container has written to its root.
pub fn upper_layer(id: &str) -> PathBuf {
    scratch_directory(id).join("upper")
}
