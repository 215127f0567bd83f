//! Defines a PodSandbox as its validated request describes it.

use crate::StringMap;
use crate::empty_dir::EmptyDirs;
use crate::machine_pod::MachinePod;
use crate::namespace::{NodeNamespaces, UserNamespace};
use crate::network::{Bandwidth, DnsConfig, PortMapping};
use nacelle_base::machine::{CpuModel, MemoryPages, Topology};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The name of a PodSandbox, unique on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodName {
    /// The pod's name.
    pub name: String,
    /// The pod's Kubernetes namespace.
    pub namespace: String,
    /// The pod's UID.
    pub uid: String,
    /// The number of earlier attempts of kubelet to create this PodSandbox.
    pub attempt: u32,
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (uid {}, attempt {})", self.namespace, self.name, self.uid, self.attempt)
    }
}

/// A PodSandbox as its request describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodConfig {
    /// The pod's name.
    pub name: PodName,
    /// The runtime handler as the request names it; empty for the default handler.
    pub handler: String,
    /// The host name of the guest.
    pub hostname: String,
    /// The directory below which container logs are written; `None` if nothing is logged.
    pub log_directory: Option<PathBuf>,
    /// The resolver configuration, if the request has one.
    pub dns: Option<DnsConfig>,
    /// Ports of the node that lead to the pod.
    pub ports: Vec<PortMapping>,
    /// The limits of the pod's traffic.
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    /// Labels, returned unchanged.
    pub labels: StringMap,
    /// Annotations, returned unchanged.
    pub annotations: StringMap,
    /// Sysctls of the guest.
    pub sysctls: StringMap,
    /// All containers share one PID namespace.
    pub shared_pid: bool,
    /// The kind of the pod.
    pub kind: PodKind,
    /// The user namespace of the containers, if they have one of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_namespace: Option<UserNamespace>,
    /// The emptyDirs that kubelet keeps on its disk; `None` if they are shares of the node's directories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_dirs: Option<EmptyDirs>,
    /// The container paths of mounts that are socket volumes: absolute, without `..` and needless slashes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub socket_mounts: Vec<String>,
    /// The name of the checkpoint from which the pod continues, in the directory of its namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Containers may be privileged (in the guest).
    pub privileged: bool,
    /// Memory limit of all containers together in bytes, if there is one.
    pub memory_limit: Option<u64>,
    /// Memory that kubelet adds to the limit in the pod's cgroup, in bytes: the overhead of the RuntimeClass, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead_memory: Option<u64>,
    /// CPU that kubelet adds to the limit in the pod's cgroup, in thousandths of a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead_cpu_milli: Option<u64>,
    /// CPU limit of all containers together in thousandths of a CPU, if there is one.
    pub cpu_limit_milli: Option<u64>,
    /// The cgroup of the node that shall hold the pod's processes, in kubelet's notation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup_parent: Option<String>,
}

/// The kind of a pod: containers in a VM, a machine pod, or containers on the node itself (engine host).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PodKind {
    /// A VM with Nacelle's kernel and agent, which runs the containers.
    Containers {
        /// The VM resources and settings that the pod's annotations ask for.
        #[serde(default)]
        shape: VmShape,
    },
    /// A machine of its own, which takes the place of the pod's container.
    Machine {
        /// The machine.
        machine: Box<MachinePod>,
        /// Namespace and name of the persistent VM of which the pod is a run, separated by a slash.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vm: Option<String>,
    },
    /// The node itself, without a guest.
    Host {
        /// The namespaces that the pod shares with the node.
        #[serde(default, skip_serializing_if = "NodeNamespaces::none")]
        namespaces: NodeNamespaces,
    },
}

impl Default for PodKind {
    /// Returns a pod of containers whose annotations request nothing of the VM.
    fn default() -> PodKind {
        PodKind::Containers { shape: VmShape::default() }
    }
}

impl PodKind {
    /// Returns whether the pod runs in a VM.
    pub fn has_guest(&self) -> bool {
        !matches!(self, PodKind::Host { .. })
    }

    /// Returns the machine of a machine pod.
    pub fn machine(&self) -> Option<&MachinePod> {
        match self {
            PodKind::Machine { machine, .. } => Some(machine),
            PodKind::Containers { .. } | PodKind::Host { .. } => None,
        }
    }

    /// Returns namespace and name of the persistent VM of which the pod is a run.
    pub fn persistent_vm(&self) -> Option<&str> {
        match self {
            PodKind::Machine { vm, .. } => vm.as_deref(),
            PodKind::Containers { .. } | PodKind::Host { .. } => None,
        }
    }

    /// Returns the requested shape of the VM of a container pod.
    pub fn shape(&self) -> Option<&VmShape> {
        match self {
            PodKind::Containers { shape } => Some(shape),
            PodKind::Machine { .. } | PodKind::Host { .. } => None,
        }
    }

    /// Returns the namespaces that the pod shares with the node.
    pub fn node_namespaces(&self) -> NodeNamespaces {
        match self {
            PodKind::Host { namespaces } => *namespaces,
            PodKind::Containers { .. } | PodKind::Machine { .. } => NodeNamespaces::default(),
        }
    }
}

/// The VM resources and settings that the annotations of a container pod request. Unset values follow from the handler and
/// from the limits of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmShape {
    /// The number of vCPUs and their topology.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processors: Option<Topology>,
    /// Each vCPU is pinned to a CPU of its own among those of the pod's containers.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pinned: bool,
    /// The CPU model that the guest sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<CpuModel>,
    /// The memory of the VM in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// The page size that backs the VM's memory on the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_pages: Option<MemoryPages>,
    /// Kernel command-line parameters, appended to those of the handler.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kernel_args: Vec<String>,
    /// The kernel, in place of the handler's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<OwnKernel>,
}

/// A kernel that a pod brings along in an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnKernel {
    /// The image with the kernel: a complete reference or an id.
    pub image: String,
    /// The path of the kernel in the image.
    pub path: String,
}
