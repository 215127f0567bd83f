//! Owns: pods and containers as the daemon understands them after everything was checked: plain data, stored as
//! it is. No CRI type, no effect.

use crate::machine_pod::MachinePod;
use crate::profile::Profile;
use nacelle_base::machine::{CpuModel, MemoryPages, Topology};
use nacelle_image::ImageId;
use nacelle_net::{Dns, PortMapping};
use nacelle_pod::spec::{Shares, UserNamespace};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

/// String to string, as labels and annotations are.
pub type Pairs = BTreeMap<String, String>;

/// The name of a PodSandbox: one of these exists once on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodName {
    /// The pod's name.
    pub name: String,
    /// Its Kubernetes namespace.
    pub namespace: String,
    /// Its UID.
    pub uid: String,
    /// How often kubelet has tried before.
    pub attempt: u32,
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (uid {}, attempt {})", self.namespace, self.name, self.uid, self.attempt)
    }
}

/// A PodSandbox as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodConfig {
    /// Its name.
    pub name: PodName,
    /// The handler as the caller wrote it; empty: the default one.
    pub handler: String,
    /// The guest's host name.
    pub hostname: String,
    /// Where logs go, if anywhere.
    pub log_directory: Option<PathBuf>,
    /// The resolver configuration, if the caller has one.
    pub dns: Option<Dns>,
    /// Ports of the node that lead to the pod.
    pub ports: Vec<PortMapping>,
    /// Returned as they came.
    pub labels: Pairs,
    /// Returned as they came.
    pub annotations: Pairs,
    /// Sysctls of the guest.
    pub sysctls: Pairs,
    /// All containers share one PID namespace.
    pub shared_pid: bool,
    /// Namespaces that are the node's. With any of them the pod has no guest.
    #[serde(default, skip_serializing_if = "Shares::none")]
    pub node_namespaces: Shares,
    /// It has no guest, whatever its handler's engine is: it is privileged, and the node lets such pods run so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_host: bool,
    /// The containers' user namespace, if they have one of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_namespace: Option<UserNamespace>,
    /// What its emptyDirs are that kubelet has on its disk; none: shares of the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_dirs: Option<EmptyDirs>,
    /// Its container is this machine; none: its containers are containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Box<MachinePod>>,
    /// What its annotations say of the machine in which its containers run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Shape>,
    /// Namespace and name of the machine that outlives the pod, of which it is a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Containers may be privileged (in the guest).
    pub privileged: bool,
    /// Memory that all containers together may use, in bytes, if it is limited.
    pub memory_limit: Option<u64>,
    /// What kubelet adds to that in the pod's control group, in bytes: the RuntimeClass's overhead, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead_memory: Option<u64>,
    /// The same of processors, in thousandths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead_cpu_milli: Option<u64>,
    /// Processors that all containers together may use, in thousandths, if they are limited.
    pub cpu_limit_milli: Option<u64>,
    /// The control group in which the pod's processes on the node shall be, as kubelet names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup_parent: Option<String>,
}

impl PodConfig {
    /// Whether its handler's engine does not count: it shares with the node what a machine cannot share.
    pub fn needs_host(&self) -> bool {
        self.on_host || !self.node_namespaces.none()
    }
}

/// What a container pod says of its machine; what it does not say, its handler and its limits do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shape {
    /// Its virtual processors, and how they are arranged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processors: Option<Topology>,
    /// Each of these has one of the node's to itself, of those that its containers have.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pinned: bool,
    /// What these are to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<CpuModel>,
    /// Its memory as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// What lies under that on the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_pages: Option<MemoryPages>,
    /// Words of the kernel's command line, after the handler's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kernel_args: Vec<String>,
    /// The kernel, in place of the handler's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<OwnKernel>,
}

/// A kernel that a pod brings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnKernel {
    /// The image that it is in: a whole reference, or an id.
    pub image: String,
    /// Its path there.
    pub path: String,
}

/// The smallest disk of an emptyDir, in bytes: it holds a file system with a journal.
pub const MIN_EMPTY_DIR: u64 = nacelle_vmi::annotations::empty_dirs::LEAST;
/// The largest, in bytes. What a file system needs of a guest's memory grows with it.
pub const MAX_EMPTY_DIR: u64 = nacelle_vmi::annotations::empty_dirs::MOST;

/// What the emptyDirs of a machine are that kubelet has on its disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptyDirs {
    /// New ones are disks of the machine's own, else shares of the node's folders. One that is a disk stays that.
    pub disks: bool,
    /// How large they may become, by their names, in bytes.
    pub limits: BTreeMap<String, u64>,
    /// The same of all others; none: what is free on the node.
    pub limit: Option<u64>,
}

/// Of a limit of [`Resources`] in which 0 means "not set": there is none.
pub const UNLIMITED: i64 = -1;
/// Of a limit of huge pages: there is none.
pub const NO_HUGEPAGE_LIMIT: u64 = u64::MAX;

/// Limits of a container or of a pod; 0 and empty mean "not set", [`UNLIMITED`] that there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// CFS period, µs.
    pub cpu_period: i64,
    /// CFS quota, µs.
    pub cpu_quota: i64,
    /// Relative weight, cgroup v1's scale.
    pub cpu_shares: i64,
    /// Bytes.
    pub memory_limit: i64,
    /// Bytes; memory and swap together.
    pub memory_swap_limit: i64,
    /// -1000 to 1000.
    pub oom_score_adj: i64,
    /// Page size ("2MB") and bytes: 0 keeps the container from them, [`NO_HUGEPAGE_LIMIT`] is no limit.
    pub hugepages: Vec<(String, u64)>,
    /// Files of cgroup v2 and what is written to them.
    pub unified: Pairs,
    /// Processors of the node, "0-3,7".
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_cpus: String,
    /// Memory nodes of the node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_mems: String,
}

impl Resources {
    /// These, after a change in which only what is set counts.
    pub fn changed_by(&self, change: &Resources) -> Resources {
        let number = |old: i64, new: i64| if new == 0 { old } else { new };
        let mut next = Resources {
            cpu_period: number(self.cpu_period, change.cpu_period),
            cpu_quota: number(self.cpu_quota, change.cpu_quota),
            cpu_shares: number(self.cpu_shares, change.cpu_shares),
            memory_limit: number(self.memory_limit, change.memory_limit),
            memory_swap_limit: number(self.memory_swap_limit, change.memory_swap_limit),
            oom_score_adj: number(self.oom_score_adj, change.oom_score_adj),
            ..self.clone()
        };
        for (size, limit) in &change.hugepages {
            next.hugepages.retain(|(known, _)| known != size);
            next.hugepages.push((size.clone(), *limit));
        }
        next.unified.extend(change.unified.clone());
        for (list, new) in [(&mut next.cpuset_cpus, &change.cpuset_cpus), (&mut next.cpuset_mems, &change.cpuset_mems)]
        {
            if !new.is_empty() {
                list.clone_from(new);
            }
        }
        next
    }

    /// Those of a guest, which has processors and memory of its own.
    pub fn in_guest(&self) -> Resources {
        Resources { cpuset_cpus: String::new(), cpuset_mems: String::new(), ..self.clone() }
    }
}

/// Processors in thousandths, if this period and this quota limit them.
pub fn cpu_milli(period: i64, quota: i64) -> Option<u64> {
    let quota = u64::try_from(quota).ok().filter(|quota| *quota > 0)?;
    let period = u64::try_from(period).ok().filter(|period| *period > 0)?;
    Some(quota.saturating_mul(1000).div_ceil(period))
}

/// What kubelet says last that a pod may have on the node: beside what each container may.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResources {
    /// Of all containers together.
    pub containers: Resources,
    /// Of what the pod needs beside them.
    pub overhead: Resources,
}

impl PodResources {
    /// These, after a change in which only what is set counts.
    pub fn changed_by(&self, change: &PodResources) -> PodResources {
        PodResources {
            containers: self.containers.changed_by(&change.containers),
            overhead: self.overhead.changed_by(&change.overhead),
        }
    }
}

/// How large a pod's machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSize {
    /// Virtual processors that run.
    pub vcpus: u32,
    /// Those that it was made with: so many can run; 0: of a record that is older than this field, whose machine keeps those it has.
    #[serde(default)]
    pub max_vcpus: u32,
    /// Memory that is meant for containers, in bytes: that of the machine without the handler's share, if the pod came
    /// with a limit, else all of it.
    pub memory: u64,
    /// What it was at the machine's birth, and never falls below; 0: of a record that is older than this field.
    #[serde(default)]
    pub least_memory: u64,
    /// What it can become; 0: it stays.
    #[serde(default)]
    pub max_memory: u64,
}

impl MachineSize {
    /// As many processors as can run.
    pub fn bound(&self) -> u32 {
        self.max_vcpus.max(self.vcpus)
    }

    /// As much memory as there can be for containers.
    pub fn memory_bound(&self) -> u64 {
        self.max_memory.max(self.memory)
    }

    /// How much of the machine's reserve of memory is in use, if it has one.
    pub fn reserve_used(&self) -> Option<u64> {
        (self.max_memory > self.least_memory).then(|| self.memory.saturating_sub(self.least_memory))
    }
}

/// Who a container runs as, as the caller said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// A number or a name; none: what the image says.
    pub user: Option<String>,
    /// A group's number.
    pub group: Option<u32>,
    /// Further groups.
    pub supplemental: Vec<u32>,
    /// The image's /etc/group does not add groups.
    pub strict: bool,
}

/// Which system calls a container may use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seccomp {
    /// All.
    #[default]
    Unconfined,
    /// Those of the default profile.
    RuntimeDefault,
    /// Those of a profile that was a file of the node when the container was made.
    Localhost(Box<Profile>),
}

/// Capabilities that are added to and taken from the default set; names without "CAP_", "ALL" is all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Added.
    pub add: Vec<String>,
    /// Taken away.
    pub drop: Vec<String>,
    /// Kept by programs that are not root.
    pub ambient: Vec<String>,
}

/// The PID namespace of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PidMode {
    /// As the pod has it.
    Pod,
    /// Its own.
    Own,
    /// That of another container, by its id.
    Of(String),
}

/// What a volume does not allow besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountOption {
    /// Set-user-id programs get no rights.
    Nosuid,
    /// Device files open no devices.
    Nodev,
    /// Nothing is run from there.
    Noexec,
    /// Reading changes no times.
    Noatime,
    /// The mark of a read-only volume below which mounts can be written, for a guest's kernel; not to be asked for.
    Nodiratime,
}

impl MountOption {
    /// All that can be asked for.
    pub const ALL: [MountOption; 4] =
        [MountOption::Nosuid, MountOption::Nodev, MountOption::Noexec, MountOption::Noatime];

    /// The word for it in CRI, in OCI and for mount(8).
    pub fn word(self) -> &'static str {
        match self {
            MountOption::Nosuid => "nosuid",
            MountOption::Nodev => "nodev",
            MountOption::Noexec => "noexec",
            MountOption::Noatime => "noatime",
            MountOption::Nodiratime => "nodiratime",
        }
    }
}

/// An image that a container sees at a path of its own, read-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolume {
    /// The image as kubelet wrote it: an id or a reference.
    pub image: String,
    /// The image as the user wrote it.
    pub user_image: String,
    /// The folder of it that is seen; empty: all of it.
    pub sub_path: String,
    /// Where: absolute, without `..`.
    pub container_path: String,
    /// Read-only in all its depth was asked for, which it always is.
    pub recursive_read_only: bool,
    /// What was asked for besides.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub options: BTreeSet<MountOption>,
}

/// Whether a container sees what the node mounts below a volume after it has started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Propagation {
    /// No.
    #[default]
    Private,
    /// Yes; the node does not see what the container mounts.
    FromNode,
    /// Yes, and the node sees what the container mounts.
    BothWays,
}

/// A file or folder of the node that a container sees at a path of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeVolume {
    /// On the node: absolute, without `..`; a folder is made there if there is nothing.
    pub host_path: String,
    /// Where: absolute, without `..`.
    pub container_path: String,
    /// The container cannot write there; it can to what is mounted below.
    pub readonly: bool,
    /// Nor to that.
    pub recursive_read_only: bool,
    /// Later mounts.
    pub propagation: Propagation,
    /// The owners of files are shown as numbers of the pod's user namespace.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub id_mapped: bool,
    /// What it does not allow besides.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub options: BTreeSet<MountOption>,
}

/// A device that a container sees at a path of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Where: below /dev, without `..`.
    pub container_path: String,
    /// On the node: absolute, without `..`; a folder means the devices in it.
    pub host_path: String,
    /// Of "r", "w" and "m" (mknod).
    pub permissions: String,
}

/// A container as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerConfig {
    /// Its name, unique in the pod together with `attempt`.
    pub name: String,
    /// How often kubelet has tried before.
    pub attempt: u32,
    /// The image as kubelet wrote it: an id or a reference.
    pub image: String,
    /// The image as the user wrote it.
    pub user_image: String,
    /// Replaces the image's entry point if not empty.
    pub command: Vec<String>,
    /// Replaces the image's arguments if not empty.
    pub args: Vec<String>,
    /// Replaces the image's if not empty.
    pub working_dir: String,
    /// Added to the image's environment.
    pub envs: Vec<(String, String)>,
    /// Returned as they came.
    pub labels: Pairs,
    /// Returned as they came.
    pub annotations: Pairs,
    /// The log file as kubelet wrote it, below the pod's log folder.
    pub log_path: String,
    /// Keep an input open.
    pub stdin: bool,
    /// Close it after the first client.
    pub stdin_once: bool,
    /// A terminal.
    pub tty: bool,
    /// The number of the signal that asks it to end; none: what the image says, else SIGTERM.
    pub stop_signal: Option<u32>,
    /// Limits.
    pub resources: Resources,
    /// All rights (in the guest).
    pub privileged: bool,
    /// Added and dropped rights.
    pub capabilities: Capabilities,
    /// Its PID namespace.
    pub pid: PidMode,
    /// Who it runs as.
    pub run_as: RunAs,
    /// The root file system is read-only.
    pub readonly_rootfs: bool,
    /// No rights by setuid programs.
    pub no_new_privs: bool,
    /// Paths that appear empty.
    pub masked_paths: Vec<String>,
    /// Paths that cannot be written.
    pub readonly_paths: Vec<String>,
    /// System calls.
    pub seccomp: Seccomp,
    /// Images that it sees beside its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<ImageVolume>,
    /// What it sees of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_volumes: Vec<NodeVolume>,
    /// The devices that it asks for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
}

/// The user of a container as found in its image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

/// The image of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOf {
    /// Its id.
    pub id: ImageId,
    /// A reference by digest, if the store knew one, else the id.
    pub reference: String,
}
