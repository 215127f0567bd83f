//! Builds the specification of a pod process from the pod and its handler.

use super::kernel;
use super::network::network;
use super::size::{self, memory_mib, memory_pages, topology};
use crate::config::Handler;
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::restore::PodBase;
use nacelle_base::PodId;
use nacelle_base::machine::{EngineKind, MemoryPages};
use nacelle_image::LAYERS;
use nacelle_model::pod::{OwnKernel, PodConfig};
use nacelle_pod::spec::{self, JailSpec, PodSpec, ScratchSpec, Timeouts};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) fn own_kernel(config: &PodConfig) -> Option<&OwnKernel> {
    config.kind.shape().and_then(|shape| shape.kernel.as_ref())
}

/// A pod that is to boot.
pub(crate) struct NewPod {
    pub id: PodId,
    pub config: Arc<PodConfig>,
    pub handler: Handler,
    pub engine: EngineKind,
    pub user: Option<u32>,
    /// The checkpoint from which it continues.
    pub base: Option<PodBase>,
}

/// Returns the specification of the pod process in this network namespace and cgroup.
pub(crate) fn pod_spec(
    services: &NodeServices,
    pod: &NewPod,
    netns: Option<PathBuf>,
    group: PathBuf,
    groups: Groups,
) -> PodSpec {
    let NewPod { id, config, handler, engine, user, base } = pod;
    let mut spec = PodSpec {
        version: spec::VERSION,
        id: id.clone(),
        engine: services.engine.spec(*engine, &config.kind),
        vcpus: size::vcpus(config, handler),
        reserved_vcpus: size::reserved(config, handler),
        topology: topology(config),
        cpu_model: config.kind.shape().and_then(|shape| shape.cpu_model.clone()),
        memory_mib: size::narrow(memory_mib(config, handler)),
        reserved_memory_mib: Some(size::narrow(size::hotplug_memory_mib(config, handler))).filter(|mib| *mib > 0),
        // The pod process does not hold the memory of a machine pod's machine.
        memory_pages: if config.kind.machine().is_some() {
            MemoryPages::default()
        } else {
            memory_pages(config, handler)
        },
        console: handler.console,
        kernel: own_kernel(config).map_or_else(|| handler.kernel.clone(), |_| kernel::file(&services.pod_dir(id))),
        initrd: handler.initrd.clone(),
        kernel_args: handler
            .kernel_args
            .iter()
            .chain(config.kind.shape().iter().flat_map(|shape| &shape.kernel_args))
            .cloned()
            .collect(),
        template: None,
        checkpoint: None,
        network: netns.map(|netns| network(config, netns)),
        hostname: config.hostname.clone(),
        sysctls: sysctls(config, groups),
        shared_pid: config.shared_pid,
        user_namespace: config.user_namespace,
        shm_bytes: 0,
        volume_cache_seconds: services.config.sandbox.volume_cache_ttl.as_secs(),
        has_sockets: !config.socket_mounts.is_empty(),
        scratch: ScratchSpec { size_mib: handler.scratch_mib, templates: services.config.paths.scratch() },
        disk_limits: handler.disk_limits,
        timeouts: Timeouts { boot_ms: services.config.sandbox.boot_timeout_ms(), ..Timeouts::default() },
        jail: Some(JailSpec {
            seccomp: services.config.jail.seccomp,
            // The disks of a machine refer to images as backing files, by their paths.
            image_layers: config.kind.machine().map(|_machine| services.config.paths.images().join(LAYERS)),
            cgroup: Some(group),
            user: *user,
        }),
    };
    if let Some(base) = base {
        base.apply(&mut spec);
    }
    spec
}

/// Whether all group ids of the kernel exist for this process: not in a user namespace that maps only a part of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Groups {
    All,
    Some,
}

impl Groups {
    /// Reads the process's own gid_map. An unreadable map counts as all groups.
    pub(crate) fn of_this_process() -> Groups {
        std::fs::read_to_string("/proc/self/gid_map").map_or(Groups::All, |map| Groups::in_map(&map))
    }

    fn in_map(map: &str) -> Groups {
        let whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
        if whole { Groups::All } else { Groups::Some }
    }
}

/// Returns the sysctls of a pod. A pod with a network of its own also gets those by which programs without root may use ports
/// below 1024 and ping, the same defaults as containerd 2. This is safe because no port of the node is among them.
fn sysctls(config: &PodConfig, groups: Groups) -> BTreeMap<String, String> {
    let mut sysctls = config.sysctls.clone();
    // The guest system of a machine pod sets its own sysctls.
    if config.kind.node_namespaces().network || config.kind.machine().is_some() {
        return sysctls;
    }
    let mut default = |name: &str, value: &str| {
        sysctls.entry(name.to_owned()).or_insert_with(|| value.to_owned());
    };
    default("net.ipv4.ip_unprivileged_port_start", "0");
    // The kernel rejects group ids that the writer's user namespace does not map. In a guest the writer is the agent, which maps
    // all.
    if groups == Groups::All {
        default("net.ipv4.ping_group_range", "0 2147483647");
    }
    sysctls
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::namespace::NodeNamespaces;
    use nacelle_model::pod::PodKind;

    #[test]
    fn programs_that_are_not_root_may_use_low_ports_and_ping_unless_the_pod_says_otherwise() {
        let pod = |change: fn(&mut PodConfig)| {
            let mut config = (*nacelle_model::testing::pod(1).config).clone();
            change(&mut config);
            config
        };
        let ports = ("net.ipv4.ip_unprivileged_port_start".to_owned(), "0".to_owned());
        let ping = ("net.ipv4.ping_group_range".to_owned(), "0 2147483647".to_owned());
        let plain = pod(|_| ());
        assert_eq!(sysctls(&plain, Groups::All), [ports.clone(), ping.clone()].into());
        assert_eq!(sysctls(&plain, Groups::Some), [ports.clone()].into());
        let said = pod(|config| config.sysctls = [(String::from("net.ipv4.ping_group_range"), "1 0".into())].into());
        assert_eq!(sysctls(&said, Groups::All), [ports, ("net.ipv4.ping_group_range".into(), "1 0".into())].into());
        assert!(
            sysctls(
                &pod(|config| {
                    config.kind = PodKind::Host { namespaces: NodeNamespaces { network: true, ..Default::default() } };
                }),
                Groups::All
            )
            .is_empty()
        );
        assert_eq!(Groups::in_map("         0          0 4294967295\n"), Groups::All);
        for part in ["0 100000 65536", "0 0 65536", "0 0 1\n1 1 4294967294\n", ""] {
            assert_eq!(Groups::in_map(part), Groups::Some, "{part}");
        }
    }
}
