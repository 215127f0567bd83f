//! Chooses the cgroup of a pod process.

use super::size::memory_mib;
use crate::config::{CgroupDriver, Handler};
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::systemd;
use nacelle_base::PodId;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_model::pod::PodConfig;
use std::path::{Path, PathBuf};

/// Returns the cgroup of the pod process: a child of kubelet's pod cgroup, or, if that is too small for the VM ([`too_small`]),
/// one outside of kubelet's hierarchy.
pub(crate) async fn choose_group(
    services: &NodeServices,
    id: &PodId,
    config: &PodConfig,
    handler: &Handler,
) -> Result<PathBuf, LifecycleError> {
    let driver = services.config.sandbox.cgroup_driver;
    let group = cgroup(config.cgroup_parent.as_deref(), driver, id);
    if !config.kind.has_guest() || config.cgroup_parent.is_none() {
        return Ok(group);
    }
    let asked = group.clone();
    let limits = blocking(move || GroupLimits {
        memory: nacelle_pod::memory_limit(&asked),
        cpu_milli: nacelle_pod::cpu_limit(&asked),
    });
    match too_small(config, memory_mib(config, handler).saturating_mul(1 << 20), limits.await) {
        Some(what) => {
            let why = "its control group has room for its containers alone, and its VM is beside it: give its RuntimeClass an overhead";
            tracing::warn!(pod = %id, group = %group.display(), what, why);
            services.pods.keep_controllers(&group).await.map_err(at("keep the control group that kubelet made"))?;
            Ok(cgroup(None, driver, id))
        }
        None => Ok(group),
    }
}

/// The tightest limits of a cgroup and its ancestors.
#[derive(Clone, Copy, Debug, Default)]
struct GroupLimits {
    memory: Option<u64>,
    cpu_milli: Option<u64>,
}

/// The lowest CPU limit, in thousandths of a CPU, at which a VM boots at full speed: the boot keeps one CPU busy.
const BOOT_CPU_MILLI: u64 = 1000;

/// Returns which resource of a pod's cgroup is too small for a VM with `needed` bytes of memory, or `None`. Without a pod
/// overhead, kubelet limits the cgroup to what the containers may use together. Too little memory gets the VM killed; a CPU quota
/// below one CPU throttles its kernel, its agent and the boot, possibly beyond the timeout. The guest's kernel enforces the
/// limits of each container.
fn too_small(config: &PodConfig, needed: u64, group: GroupLimits) -> Option<String> {
    if let (None, Some(limit)) = (config.overhead_memory, group.memory.filter(|limit| *limit < needed)) {
        return Some(format!("memory: {limit} of {needed} bytes"));
    }
    match (config.overhead_cpu_milli, group.cpu_milli.filter(|limit| *limit < BOOT_CPU_MILLI)) {
        (None, Some(limit)) => Some(format!("CPU: {limit} of {BOOT_CPU_MILLI} thousandths")),
        _ => None,
    }
}

/// Returns the cgroup of a pod process: inside the cgroup that kubelet created for the pod, otherwise in the runtime's own. Below
/// systemd's slices it is a scope that systemd knows: systemd removes controllers from cgroups below which it knows no unit that
/// needs them.
fn cgroup(parent: Option<&str>, driver: CgroupDriver, id: &PodId) -> PathBuf {
    let parent = parent.map(|parent| parent.trim_start_matches('/'));
    match (driver, parent) {
        (CgroupDriver::Cgroupfs, None) => format!("nacelle/{id}").into(),
        (CgroupDriver::Systemd, None) => systemd::scope_in("nacelle", id),
        // kubelet sends the path of the slice; its last component is sufficient.
        (CgroupDriver::Systemd, Some(parent)) => match systemd::slice_of(parent) {
            Some(slice) => systemd::scope_in(slice, id),
            None => Path::new(parent).join(format!("nacelle-{id}")),
        },
        (CgroupDriver::Cgroupfs, Some(parent)) => Path::new(parent).join(format!("nacelle-{id}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_group_lies_where_kubelet_wants_it() {
        let id = PodId::from_bytes([1; 32]);
        let group = |parent, driver| cgroup(parent, driver, &id).to_str().unwrap().replace(id.as_str(), "ID");
        use CgroupDriver::{Cgroupfs, Systemd};
        assert_eq!(group(None, Cgroupfs), "nacelle/ID");
        assert_eq!(group(None, Systemd), "nacelle.slice/nacelle-ID.scope");
        assert_eq!(group(Some("/kubepods/burstable/podab"), Cgroupfs), "kubepods/burstable/podab/nacelle-ID");
        let slice = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podab_c.slice/nacelle-ID.scope";
        assert_eq!(group(Some("kubepods-besteffort-podab_c.slice"), Systemd), slice);
        let path = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podab_c.slice";
        assert_eq!(group(Some(path), Systemd), slice);
        assert_eq!(group(Some("/a.slice/b"), Systemd), "a.slice/b/nacelle-ID");
    }

    #[test]
    fn a_vm_is_in_kubelets_group_unless_that_is_too_small_for_it() {
        let config = |overhead_memory, overhead_cpu_milli| PodConfig {
            overhead_memory,
            overhead_cpu_milli,
            ..(*nacelle_model::testing::pod(1).config).clone()
        };
        for (overhead, memory, cpu_milli, lacks) in [
            ((None, None), None, None, None),
            ((None, None), Some(100), Some(1000), None),
            ((None, None), Some(99), None, Some("memory: 99 of 100 bytes")),
            ((None, None), Some(100), Some(999), Some("CPU: 999 of 1000 thousandths")),
            ((None, None), None, Some(10), Some("CPU: 10 of 1000 thousandths")),
            // An overhead states what a VM needs on this node, for memory and CPU separately.
            ((Some(1), None), Some(99), None, None),
            ((Some(1), None), Some(99), Some(10), Some("CPU: 10 of 1000 thousandths")),
            ((None, Some(250)), None, Some(260), None),
            ((None, Some(250)), Some(99), Some(260), Some("memory: 99 of 100 bytes")),
            ((Some(1), Some(250)), Some(99), Some(260), None),
        ] {
            let found = too_small(&config(overhead.0, overhead.1), 100, GroupLimits { memory, cpu_milli });
            assert_eq!(found.as_deref(), lacks, "{overhead:?} {memory:?} {cpu_milli:?}");
        }
    }
}
