//! Defines resource limits of containers and pods, and the resources of a pod's VM.

use crate::StringMap;
use serde::{Deserialize, Serialize};

/// In a limit of [`Resources`] for which 0 means "not set": there is no limit.
pub const UNLIMITED: i64 = -1;
/// In a limit of huge pages: there is no limit.
pub const NO_HUGEPAGE_LIMIT: u64 = u64::MAX;

/// Limits of a container or of a pod. 0 and empty mean "not set", [`UNLIMITED`] means that there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// CFS period in µs.
    pub cpu_period: i64,
    /// CFS quota in µs.
    pub cpu_quota: i64,
    /// Relative CPU weight on the scale of cgroup v1.
    pub cpu_shares: i64,
    /// Memory limit in bytes.
    pub memory_limit: i64,
    /// Limit of memory and swap together, in bytes.
    pub memory_swap_limit: i64,
    /// OOM score adjustment, -1000 to 1000.
    pub oom_score_adj: i64,
    /// Page size ("2MB") and limit in bytes; 0 forbids pages of that size, [`NO_HUGEPAGE_LIMIT`] sets no limit.
    pub hugepages: Vec<(String, u64)>,
    /// Files of cgroup v2 and the values to write to them.
    pub unified: StringMap,
    /// CPUs of the node that may be used, for example "0-3,7".
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_cpus: String,
    /// NUMA nodes of the node whose memory may be used.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_mems: String,
}

impl Resources {
    /// Returns these limits after `change`, in which only the values that are set count.
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

    /// Returns the limits that apply inside a guest, whose CPUs and NUMA nodes are not those of the node, and which has no swap.
    pub fn in_guest(&self) -> Resources {
        Resources { cpuset_cpus: String::new(), cpuset_mems: String::new(), memory_swap_limit: 0, ..self.clone() }
    }

    /// Returns the limit of swap alone in bytes, as cgroup v2 has it: [`UNLIMITED`], or what the limit of memory and swap together
    /// leaves. `None` without such a limit, or if memory has none.
    pub fn swap_limit(&self) -> Option<i64> {
        match (self.memory_swap_limit, self.memory_limit) {
            (0, _) => None,
            (swap, _) if swap < 0 => Some(UNLIMITED),
            (_, memory) if memory <= 0 => None,
            (swap, memory) => Some((swap - memory).max(0)),
        }
    }
}

/// Converts a CFS period and quota to thousandths of a CPU; `None` if they set no limit.
pub fn cpu_milli(period: i64, quota: i64) -> Option<u64> {
    let quota = u64::try_from(quota).ok().filter(|quota| *quota > 0)?;
    let period = u64::try_from(period).ok().filter(|period| *period > 0)?;
    Some(quota.saturating_mul(1000).div_ceil(period))
}

/// The limits of a pod as a whole, as the last UpdatePodSandboxResources set them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResources {
    /// The limits of all containers together.
    pub containers: Resources,
    /// The overhead of the pod itself.
    pub overhead: Resources,
}

impl PodResources {
    /// Returns these limits after `change`, in which only the values that are set count.
    pub fn changed_by(&self, change: &PodResources) -> PodResources {
        PodResources {
            containers: self.containers.changed_by(&change.containers),
            overhead: self.overhead.changed_by(&change.overhead),
        }
    }
}

/// The vCPUs and the memory of a pod's VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmResources {
    /// The number of vCPUs that are online.
    pub vcpus: u32,
    /// The number of vCPUs that the VM was created with, and so can have online. 0 in records from before this field existed; such a
    /// VM keeps the vCPUs that it has.
    #[serde(default)]
    pub max_vcpus: u32,
    /// Memory for containers in bytes: the memory of the VM without the handler's share if the pod has a memory limit, otherwise all of it.
    pub memory: u64,
    /// The memory at the creation of the VM, below which it cannot shrink, in bytes. 0 in records from before this field existed.
    #[serde(default)]
    pub least_memory: u64,
    /// The memory to which the VM can grow, in bytes; 0 if it cannot grow.
    #[serde(default)]
    pub max_memory: u64,
}

impl VmResources {
    /// Returns the largest number of vCPUs that can be online.
    pub fn vcpu_bound(&self) -> u32 {
        self.max_vcpus.max(self.vcpus)
    }

    /// Returns the largest amount of memory for containers, in bytes.
    pub fn memory_bound(&self) -> u64 {
        self.max_memory.max(self.memory)
    }

    /// Returns how many bytes of the VM's hot-plug memory are in use; `None` if it has none.
    pub fn hotplug_memory_used(&self) -> Option<u64> {
        (self.max_memory > self.least_memory).then(|| self.memory.saturating_sub(self.least_memory))
    }
}
