//! Creates a pod's VM and network and removes them again: the effects behind `Booting` and `Stopping`. The effects run as tasks
//! of their own and send their results to the pod's actor. The module keeps no state: resources are found by the pod's id, so a
//! cleanup works after a crash too.

use super::error::{LifecycleError, at};
use super::seams::Admit;
use super::size::{self, memory_mib, memory_pages, topology};
use super::{Parts, clip, kernel};
use crate::config::{CgroupDriver, Handler};
use crate::hugepages;
use crate::systemd;
use nacelle_base::machine::{EngineKind, MemoryPages};
use nacelle_base::net::{Neighbour, PodNetwork};
pub(super) use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::timeline::{Step, Timeline};
use nacelle_base::{Chain, PodId, files};
use nacelle_machines::multus;
use nacelle_model::machine::INTERFACE;
use nacelle_model::network::DnsConfig;
use nacelle_model::pod::{OwnKernel, PodConfig};
use nacelle_model::process::PodProcess;
use nacelle_model::record::CleanupFailure;
use nacelle_model::resources::VmResources;
use nacelle_net::{Attachment, InterfaceUsage, PodRef};
use nacelle_pod::client::PodClient;
use nacelle_pod::record::PodRecord as LastRecord;
use nacelle_pod::spec::{self, EngineSpec, JailSpec, NetworkSpec, PodSpec, ScratchSpec, Timeouts};
use nacelle_proto::{common, pod as proto};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// A pod that has started.
pub(super) struct Up {
    pub client: PodClient,
    pub ips: Vec<IpAddr>,
    pub kernel_release: String,
    pub machine: VmResources,
}

/// The longest name of a boot step in bytes; a pod process may report anything.
const STEP_NAME: usize = 64;

/// Time for removing a namespace and recording an owed CNI DEL, in addition to the time of the plugins.
const NO_PLUGIN: Duration = Duration::from_secs(30);

/// Creates the pod's directory, namespace, VM and network, and waits until the guest is configured. On failure the caller cleans
/// up everything. `cancel` ends it at the next step. `admit` records the pod process.
pub(super) async fn boot(
    parts: Arc<Parts>,
    id: PodId,
    config: Arc<PodConfig>,
    handler: Handler,
    cancel: CancellationToken,
    timeline: Timeline,
    admit: Admit,
) -> Result<Up, LifecycleError> {
    let dir = parts.pod_dir(&id);
    if !matches!(parts.engine.spec(handler.engine, &config), EngineSpec::Host { .. }) {
        size::check(&config, &handler)?;
    }
    let page = match &config.machine {
        Some(machine) if machine.largest_pages => Some(hugepages::LARGEST_MIB),
        Some(machine) => machine.hugepages.then_some(hugepages::PAGE_MIB),
        None => (memory_pages(&config, &handler) == MemoryPages::Hugetlb).then_some(hugepages::PAGE_MIB),
    };
    if let Some(page) = page {
        hugepages::check(memory_mib(&config, &handler), page)?;
    }
    make_directories(dir.clone(), config.log_directory.clone()).await?;
    let own_kernel = own_kernel(&config);
    if let Some(own) = own_kernel {
        let engine = match parts.engine.spec(handler.engine, &config) {
            EngineSpec::Qemu { .. } => EngineKind::Qemu,
            _ => EngineKind::Kvm,
        };
        let brought = kernel::bring(&parts, &dir, own, engine, size::narrow(memory_mib(&config, &handler)), &cancel);
        timeline.measure("kernel out of its image", brought).await?;
    }
    let netns = match config.node_namespaces.network {
        true => None,
        false => {
            let created = timeline.measure("network namespace", parts.networks.create(&id)).await;
            Some(created.map_err(at("make the network namespace of the pod"))?)
        }
    };
    if cancel.is_cancelled() {
        return Err(LifecycleError::Cancelled);
    }
    let group = choose_group(&parts, &id, &config, &handler).await?;
    let groups = match parts.engine.spec(handler.engine, &config) {
        EngineSpec::Host { .. } => blocking(Groups::of_this_process).await,
        _ => Groups::All,
    };
    let spec = pod_spec(&parts, &id, &config, &handler, netns, group, groups);
    let usage = match spec.engine {
        EngineSpec::Host { .. } => InterfaceUsage::Namespace,
        _ if config.machine.is_some() => InterfaceUsage::GuestNeedsAll,
        _ => InterfaceUsage::Guest,
    };
    let guest = usage != InterfaceUsage::Namespace;
    let interfaces = spec.network.iter().flat_map(|network| &network.interfaces);
    let pod = PodRef {
        id: id.clone(),
        name: config.name.name.clone(),
        namespace: config.name.namespace.clone(),
        uid: config.name.uid.clone(),
        port_mappings: config.ports.clone(),
        bandwidth: None,
        dns: config.dns.clone(),
        pod_cidrs: parts.pod_cidrs(),
        further: interfaces.filter(|name| *name != INTERFACE).cloned().collect(),
        usage,
    };
    // The VM boots while the plugins run. Both are awaited to their end, so that a cleanup finds nothing half-done.
    let limit = Duration::from_secs(parts.config.sandbox.boot_seconds);
    let (client, attached) =
        tokio::join!(timeline.measure("pod process", parts.pods.spawn(&dir, &spec, admit)), async {
            match spec.network {
                Some(_) => timeout(limit, timeline.measure("CNI", parts.networks.setup(&pod))).await,
                None => Ok(Ok(of_node())),
            }
        });
    let client = client.map_err(at("start the machine of the pod"))?;
    let mut attached = attached
        .map_err(|_elapsed| LifecycleError::TooSlow { step: "attach the pod to its network", limit })?
        .map_err(at("attach the pod to its network"))?;
    if let Some(network) = &spec.network {
        keep_only(&mut attached.network, &network.interfaces);
    }
    if config.machine.is_some() {
        for interface in attached.network.interfaces.iter().filter(|interface| !interface.neighbours.is_empty()) {
            let (name, neighbours) = (&interface.name, interface.neighbours.len());
            let why = "a machine's own system learns no permanent neighbours by DHCP or cloud-init; it asks for their addresses";
            tracing::warn!(pod = %id, name, neighbours, why);
        }
    }
    // The pod process has dropped the privileges for it.
    if guest {
        let known = attached.network.interfaces.iter().enumerate();
        let pairs = known.map(|(n, interface)| (nacelle_pod::tap_name(n), interface.name.clone())).collect();
        let joined = timeline.measure("taps joined to the network", parts.networks.join(&id, pairs)).await;
        joined.map_err(at("join the machine of the pod to its network"))?;
    }
    let node = blocking(|| std::fs::read_to_string("/etc/resolv.conf")).await.unwrap_or_default();
    let request = configuration(&config, &attached, &node);
    let step = "boot the machine of the pod";
    let configured = tokio::select! {
        () = cancel.cancelled() => return Err(LifecycleError::Cancelled),
        configured = timeout(limit, timeline.measure("guest ready", client.configure(request))) => configured,
    };
    let configured = configured.map_err(|_elapsed| LifecycleError::TooSlow { step, limit })?.map_err(at(step))?;
    if own_kernel.is_some()
        && let Err(error) = kernel::forget(&dir).await
    {
        tracing::warn!(pod = %id, "the kernel stays until the pod is removed: {}", Chain(&error));
    }
    // Measured by the pod process; its times are not verified.
    timeline.add(configured.steps.into_iter().map(|step| Step {
        what: clip(&step.what).chars().take(STEP_NAME).collect(),
        at: step.at,
        micros: step.micros,
        failed: false,
    }));
    let machine = match spec.engine {
        // The pod runs on the node itself.
        EngineSpec::Host { .. } => VmResources {
            vcpus: u32::MAX,
            max_vcpus: u32::MAX,
            memory: u64::MAX,
            least_memory: u64::MAX,
            max_memory: u64::MAX,
        },
        _ => size::of(&config, &handler),
    };
    Ok(Up { client, ips: attached.ips, kernel_release: clip(&configured.kernel_release), machine })
}

/// Returns the attachment of a pod with the node's network: nothing to set up, and the addresses of the node.
fn of_node() -> Attachment {
    Attachment { network: PodNetwork::default(), dns: DnsConfig::default(), ips: Vec::new() }
}

async fn make_directories(dir: PathBuf, logs: Option<PathBuf>) -> Result<(), LifecycleError> {
    let make = move || {
        if let Some(logs) = logs {
            std::fs::create_dir_all(&logs).map_err(files::at("create", &logs))?;
        }
        if let Some(pods) = dir.parent() {
            // The directory existed when the daemon started, but may have been removed since with its contents.
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(pods).map_err(files::at("create", pods))?;
        }
        std::fs::DirBuilder::new().mode(0o700).create(&dir).map_err(files::at("create", &dir))?;
        nacelle_pod::make_jail(&dir)
    };
    blocking(make).await.map_err(at("make the directory of the pod"))
}

fn own_kernel(config: &PodConfig) -> Option<&OwnKernel> {
    config.shape.as_ref().and_then(|shape| shape.kernel.as_ref())
}

fn pod_spec(
    parts: &Parts,
    id: &PodId,
    config: &PodConfig,
    handler: &Handler,
    netns: Option<PathBuf>,
    group: PathBuf,
    groups: Groups,
) -> PodSpec {
    PodSpec {
        version: spec::VERSION,
        id: id.clone(),
        engine: parts.engine.spec(handler.engine, config),
        vcpus: size::vcpus(config, handler),
        reserved_vcpus: size::reserved(config, handler),
        topology: topology(config),
        cpu_model: config.shape.as_ref().and_then(|shape| shape.cpu_model.clone()),
        memory_mib: size::narrow(memory_mib(config, handler)),
        reserved_memory_mib: Some(size::narrow(size::reserve_mib(config, handler))).filter(|mib| *mib > 0),
        // The pod process does not hold the memory of a machine pod's machine.
        memory_pages: if config.machine.is_some() { MemoryPages::default() } else { memory_pages(config, handler) },
        console: handler.console,
        kernel: own_kernel(config).map_or_else(|| handler.kernel.clone(), |_| kernel::file(&parts.pod_dir(id))),
        initrd: handler.initrd.clone(),
        kernel_args: handler
            .kernel_args
            .iter()
            .chain(config.shape.iter().flat_map(|shape| &shape.kernel_args))
            .cloned()
            .collect(),
        network: netns.map(|netns| network(config, netns, parts.engine.spec(handler.engine, config).has_machine())),
        hostname: config.hostname.clone(),
        sysctls: sysctls(config, groups),
        shared_pid: config.shared_pid,
        user_namespace: config.user_namespace,
        shm_bytes: 0,
        volume_cache_seconds: parts.config.sandbox.volume_cache_seconds,
        log_directory: config.log_directory.clone(),
        scratch: ScratchSpec { size_mib: handler.scratch_mib, templates: parts.config.paths.scratch() },
        timeouts: Timeouts { boot_ms: parts.config.sandbox.boot_seconds * 1000, ..Timeouts::default() },
        jail: Some(JailSpec {
            seccomp: parts.config.jail.seccomp,
            images: vec![parts.config.paths.images()],
            cgroup: Some(group),
        }),
    }
}

/// Whether all group ids of the kernel exist for this process: not in a user namespace that maps only a part of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Groups {
    All,
    Some,
}

impl Groups {
    /// Reads the process's own gid_map. An unreadable map counts as all groups.
    fn of_this_process() -> Groups {
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
    if config.node_namespaces.network || config.machine.is_some() {
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

/// Returns the specification of the pod's network: a tap for each network interface of a machine pod's machine, or for each
/// interface of the containers' guest.
fn network(config: &PodConfig, netns: PathBuf, guest: bool) -> NetworkSpec {
    let first = INTERFACE.to_owned();
    let cards = config.machine.iter().flat_map(|machine| &machine.cards);
    let (mut interfaces, queues): (Vec<String>, Vec<u32>) =
        cards.map(|card| (card.interface.clone(), card.queues)).unzip();
    if interfaces.is_empty() {
        interfaces.push(first);
        if guest && config.machine.is_none() {
            let asked = multus::asked(&config.annotations, &config.name.namespace);
            // An invalid annotation is left to the plugins, which may not read it at all.
            interfaces.extend(asked.ok().flatten().into_iter().flatten().map(|asked| asked.interface));
        }
    }
    NetworkSpec { netns, interfaces, queues }
}

/// Reduces a network to these interfaces, in this order, and to the routes through them.
fn keep_only(network: &mut PodNetwork, interfaces: &[String]) {
    network.interfaces.retain(|one| interfaces.contains(&one.name));
    network.interfaces.sort_by_key(|one| interfaces.iter().position(|name| *name == one.name));
    network.routes.retain(|route| interfaces.contains(&route.interface));
}

/// Returns the cgroup of the pod process: a child of kubelet's pod cgroup, or, if that is too small for the VM ([`too_small`]),
/// one outside of kubelet's hierarchy.
async fn choose_group(
    parts: &Parts,
    id: &PodId,
    config: &PodConfig,
    handler: &Handler,
) -> Result<PathBuf, LifecycleError> {
    let driver = parts.config.sandbox.cgroup_driver;
    let group = cgroup(config.cgroup_parent.as_deref(), driver, id);
    let guest = !matches!(parts.engine.spec(handler.engine, config), EngineSpec::Host { .. });
    if !guest || config.cgroup_parent.is_none() {
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
            parts.pods.keep_controllers(&group).await.map_err(at("keep the control group that kubelet made"))?;
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

fn configuration(config: &PodConfig, attached: &Attachment, resolv_conf: &str) -> proto::ConfigureRequest {
    let interfaces = attached.network.interfaces.iter().map(|interface| common::Interface {
        name: interface.name.clone(),
        mac: interface.mac.to_vec(),
        mtu: interface.mtu,
        addresses: interface.addresses.iter().map(ToString::to_string).collect(),
        neighbours: interface.neighbours.iter().map(neighbour).collect(),
    });
    let routes = attached.network.routes.iter().map(|route| common::Route {
        destination: route.destination.to_string(),
        gateway: route.gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
        interface: route.interface.clone(),
        metric: route.metric,
        source: route.source.map(|source| source.to_string()).unwrap_or_default(),
        mtu: route.mtu.unwrap_or(0),
    });
    let dns = match &config.dns {
        Some(dns) => dns.clone(),
        None if attached.dns != DnsConfig::default() => attached.dns.clone(),
        // A pod with the node's network reaches what the node reaches.
        None => node_dns(resolv_conf, config.node_namespaces.network),
    };
    proto::ConfigureRequest {
        interfaces: interfaces.collect(),
        routes: routes.collect(),
        dns: Some(common::Dns { servers: dns.servers, searches: dns.searches, options: dns.options }),
    }
}

fn neighbour(neighbour: &Neighbour) -> common::Neighbour {
    common::Neighbour { address: neighbour.ip.to_string(), mac: neighbour.mac.to_vec() }
}

/// Returns the node's own resolver configuration, for pods that bring none. Loopback servers are unreachable from a guest and are
/// left out, unless the pod is on the node's network.
fn node_dns(text: &str, on_node: bool) -> DnsConfig {
    let mut dns = DnsConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("nameserver") => dns.servers.extend(
                words
                    .next()
                    .filter(|server| server.parse::<IpAddr>().is_ok_and(|address| on_node || !address.is_loopback())),
            ),
            Some("search") => dns.searches = words.collect(),
            Some("options") => dns.options.extend(words),
            _ => {}
        }
    }
    dns
}

/// The result of a cleanup.
pub(super) struct Undone {
    /// The last record of the pod process.
    pub last: Option<LastRecord>,
    /// Resources that could not be released.
    pub left: Vec<CleanupFailure>,
    /// The steps of the cleanup, with their durations.
    pub timeline: Timeline,
}

/// Ends the VM, whose process the store knows as `process`, and releases the network. Every step is tried, whatever the result of
/// those before it, and all of them can be repeated.
pub(super) async fn undo(
    parts: Arc<Parts>,
    id: PodId,
    client: Option<PodClient>,
    process: Option<PodProcess>,
) -> Undone {
    let limit = parts.teardown_limit();
    let timeline = Timeline::default();
    // The processes of the pod are killed in any case: the release of its network need not wait for their end.
    let machine = timeline.measure("end of the pod process", end_machine(&parts, &id, client, process, limit));
    let network = timeline.measure("end of the network", async {
        // `limit` bounds the plugins; the rest takes a moment.
        match timeout(limit + NO_PLUGIN, parts.networks.release(&id, limit)).await {
            Ok(released) => released.map_err(|error| Chain(&error).to_string()),
            Err(_elapsed) => Err(format!("no end after {} s", (limit + NO_PLUGIN).as_secs())),
        }
    });
    let (machine, network) = tokio::join!(machine, network);
    let mut left = Vec::new();
    let mut failed = |what: &str, why: String| {
        tracing::error!(pod = %id, what, why, "could not be given back; the next stop tries again");
        left.push(CleanupFailure { what: what.to_owned(), why });
    };
    let last = machine.unwrap_or_else(|why| {
        failed("machine", why);
        None
    });
    match network {
        Ok(None) => {}
        Ok(Some(owed)) => tracing::warn!(
            pod = %id, error = %Chain(&owed),
            "the CNI DEL of the pod is owed: its network keeps what the pod had until it succeeds; it is tried again"
        ),
        Err(why) => failed("network", why),
    }
    Undone { last, left, timeline }
}

/// Stops the pod process in good order, and kills it if it does not stop by itself. Returns its last report, or why it still
/// lives.
async fn end_machine(
    parts: &Parts,
    id: &PodId,
    client: Option<PodClient>,
    process: Option<PodProcess>,
    limit: Duration,
) -> Result<Option<LastRecord>, String> {
    if let Some(client) = client {
        let orderly = async {
            client.stop(Duration::ZERO).await?;
            client.ended().await
        };
        match timeout(limit, orderly).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(pod = %id, "the pod process did not stop: {}", Chain(&error)),
            Err(_elapsed) => tracing::warn!(pod = %id, "the pod process did not stop in time"),
        }
    }
    match timeout(limit, parts.clean_up(&parts.pod_dir(id), process.as_ref())).await {
        Ok(Ok(last)) => Ok(last),
        Ok(Err(error)) => Err(Chain(&error).to_string()),
        Err(_elapsed) => Err(format!("it still lives after {} s", limit.as_secs())),
    }
}

/// Removes the pod's directory.
pub(super) async fn remove_directory(parts: &Parts, id: &PodId) -> Result<(), LifecycleError> {
    let dir = parts.pod_dir(id);
    let removed = blocking(move || files::remove_tree_if_there(&dir)).await;
    removed.map_err(at("remove the directory of the pod"))
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
        assert!(sysctls(&pod(|config| config.node_namespaces.network = true), Groups::All).is_empty());
        assert_eq!(Groups::in_map("         0          0 4294967295\n"), Groups::All);
        for part in ["0 100000 65536", "0 0 65536", "0 0 1\n1 1 4294967294\n", ""] {
            assert_eq!(Groups::in_map(part), Groups::Some, "{part}");
        }
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

    #[test]
    fn the_nodes_resolver_without_what_a_guest_cannot_reach() {
        let dns = node_dns(
            "# x\nnameserver 127.0.0.53\nnameserver 10.0.0.1\nnameserver bad\nsearch a b\noptions ndots:5\n",
            false,
        );
        assert_eq!(dns.servers, ["10.0.0.1"]);
        assert_eq!(node_dns("nameserver 127.0.0.53", true).servers, ["127.0.0.53"]);
        assert_eq!(dns.searches, ["a", "b"]);
        assert_eq!(dns.options, ["ndots:5"]);
    }
}
