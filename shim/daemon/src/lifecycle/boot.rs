//! Owns: making a pod's machine and network, and giving them back: the effects behind `Booting` and `Stopping`.
//! Nothing here remembers anything: what was taken is found by the pod's id, so giving back works after a crash too.
//! Threads: run as tasks of their own; they answer to the pod's actor.

use super::error::{LifecycleError, at};
use super::size::{self, memory_mib, memory_pages, topology};
use super::{Parts, clip, kernel};
use crate::config::{CgroupDriver, Handler};
use crate::hugepages;
use crate::multus;
use crate::nouns::{MachineSize, OwnKernel, PodConfig};
use crate::store::Left;
use crate::systemd;
use nacelle_base::machine::{EngineKind, MemoryPages};
use nacelle_base::net::PodNetwork;
use nacelle_base::timeline::{Step, Timeline};
use nacelle_base::{Chain, PodId, files};
use nacelle_keeper::spec::INTERFACE;
use nacelle_net::{Attachment, Dns, PodRef};
use nacelle_pod::client::PodClient;
use nacelle_pod::record::PodRecord as LastRecord;
use nacelle_pod::spec::{self, EngineSpec, JailSpec, NetworkSpec, PodSpec, ScratchSpec, Timeouts};
use nacelle_proto::pod as proto;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// A pod that is up.
pub(super) struct Up {
    pub client: PodClient,
    pub ips: Vec<IpAddr>,
    pub kernel_release: String,
    pub machine: MachineSize,
}

/// Of a pod process, which may say anything: the longest name of a step.
const STEP_NAME: usize = 64;

/// Makes folder, namespace, machine and network, and waits until the guest is configured. On failure the caller
/// undoes everything. `cancel` ends it at the next step.
pub(super) async fn boot(
    parts: Arc<Parts>,
    id: PodId,
    config: Arc<PodConfig>,
    handler: Handler,
    cancel: CancellationToken,
    timeline: Timeline,
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
    make_folders(dir.clone(), config.log_directory.clone()).await?;
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
    let spec = pod_spec(&parts, &id, &config, &handler, netns, group);
    let guest = !matches!(spec.engine, EngineSpec::Host { .. });
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
        all_needed: config.machine.is_some(),
    };
    // The machine boots while the plugins run. Both are awaited to their end, so that undoing meets nothing half-done.
    let limit = Duration::from_secs(parts.config.sandbox.boot_seconds);
    let (client, attached) = tokio::join!(timeline.measure("pod process", parts.pods.spawn(&dir, &spec)), async {
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
    // The pod process has given up the right to do it.
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
    // What the pod process has measured; its times are its own word.
    timeline.add(configured.steps.into_iter().map(|step| Step {
        what: clip(&step.what).chars().take(STEP_NAME).collect(),
        at: step.at,
        micros: step.micros,
        failed: false,
    }));
    let machine = match spec.engine {
        // It is the node.
        EngineSpec::Host { .. } => MachineSize {
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

/// What is to be set up for a pod that has the node's network: nothing. Its addresses are the node's.
fn of_node() -> Attachment {
    Attachment { network: PodNetwork::default(), dns: Dns::default(), ips: Vec::new() }
}

async fn make_folders(dir: PathBuf, logs: Option<PathBuf>) -> Result<(), LifecycleError> {
    let make = move || {
        if let Some(logs) = logs {
            std::fs::create_dir_all(&logs).map_err(files::at("create", &logs))?;
        }
        std::fs::DirBuilder::new().mode(0o700).create(&dir).map_err(files::at("create", &dir))
    };
    blocking(make).await.map_err(at("make the folder of the pod"))
}

/// Runs file work off the async threads. A panic in it is a defect, and goes on.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down: nobody waits any more.
            Err(_cancelled) => std::future::pending().await,
        },
    }
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
        // The memory of a machine pod's machine is none of the pod process's.
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
        sysctls: config.sysctls.clone(),
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

/// What is made of the pod's network: a tap for each card of a machine pod's machine, or for each interface that the containers' guest
/// shall have.
fn network(config: &PodConfig, netns: PathBuf, guest: bool) -> NetworkSpec {
    let first = INTERFACE.to_owned();
    let cards = config.machine.iter().flat_map(|machine| &machine.cards);
    let (mut interfaces, queues): (Vec<String>, Vec<u32>) =
        cards.map(|card| (card.interface.clone(), card.queues)).unzip();
    if interfaces.is_empty() {
        interfaces.push(first);
        if guest && config.machine.is_none() {
            let asked = multus::asked(&config.annotations, &config.name.namespace);
            // What is wrong there is the plugins' to say, which may not know of it either.
            interfaces.extend(asked.ok().flatten().into_iter().flatten().map(|asked| asked.interface));
        }
    }
    NetworkSpec { netns, interfaces, queues }
}

/// Leaves of a network these interfaces, in this order, and what leads through them.
fn keep_only(network: &mut PodNetwork, interfaces: &[String]) {
    network.interfaces.retain(|one| interfaces.contains(&one.name));
    network.interfaces.sort_by_key(|one| interfaces.iter().position(|name| *name == one.name));
    network.routes.retain(|route| interfaces.contains(&route.interface));
}

/// The control group of the pod's process: kubelet's, unless that would kill the machine. Without an overhead kubelet limits it to
/// what the containers may use together; the machine, which may grow to all of its memory, is beside the others then.
async fn choose_group(
    parts: &Parts,
    id: &PodId,
    config: &PodConfig,
    handler: &Handler,
) -> Result<PathBuf, LifecycleError> {
    let driver = parts.config.sandbox.cgroup_driver;
    let group = cgroup(config.cgroup_parent.as_deref(), driver, id);
    let guest = !matches!(parts.engine.spec(handler.engine, config), EngineSpec::Host { .. });
    if !guest || config.cgroup_parent.is_none() || config.overhead_memory.is_some() {
        return Ok(group);
    }
    let (asked, needed) = (group.clone(), memory_mib(config, handler).saturating_mul(1 << 20));
    match blocking(move || nacelle_pod::memory_limit(&asked)).await {
        Some(limit) if limit < needed => {
            let why = "its control group has room for its containers alone, and its machine is beside it: give its RuntimeClass an overhead";
            tracing::warn!(pod = %id, group = %group.display(), limit, needed, why);
            parts.pods.keep_controllers(&group).await.map_err(at("keep the control group that kubelet made"))?;
            Ok(cgroup(None, driver, id))
        }
        _ => Ok(group),
    }
}

/// The control group of a pod process: in the group that kubelet has made for the pod, else beside the others. systemd's slices
/// get a scope, which systemd knows of: it takes controllers away from groups below which it knows of none that needs them.
fn cgroup(parent: Option<&str>, driver: CgroupDriver, id: &PodId) -> PathBuf {
    let parent = parent.map(|parent| parent.trim_start_matches('/'));
    match (driver, parent) {
        (CgroupDriver::Cgroupfs, None) => format!("nacelle/{id}").into(),
        (CgroupDriver::Systemd, None) => systemd::scope_in("nacelle", id),
        // kubelet says the path of the slice, whose last part says it all.
        (CgroupDriver::Systemd, Some(parent)) => match systemd::slice_of(parent) {
            Some(slice) => systemd::scope_in(slice, id),
            None => Path::new(parent).join(format!("nacelle-{id}")),
        },
        (CgroupDriver::Cgroupfs, Some(parent)) => Path::new(parent).join(format!("nacelle-{id}")),
    }
}

fn configuration(config: &PodConfig, attached: &Attachment, resolv_conf: &str) -> proto::ConfigureRequest {
    let interfaces = attached.network.interfaces.iter().map(|interface| proto::Interface {
        name: interface.name.clone(),
        mac: interface.mac.to_vec(),
        mtu: interface.mtu,
        addresses: interface.addresses.iter().map(ToString::to_string).collect(),
    });
    let routes = attached.network.routes.iter().map(|route| proto::Route {
        destination: route.destination.to_string(),
        gateway: route.gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
        interface: route.interface.clone(),
        metric: route.metric,
    });
    let dns = match &config.dns {
        Some(dns) => dns.clone(),
        None if attached.dns != Dns::default() => attached.dns.clone(),
        // What the node reaches, a pod with its network does.
        None => node_dns(resolv_conf, config.node_namespaces.network),
    };
    proto::ConfigureRequest {
        interfaces: interfaces.collect(),
        routes: routes.collect(),
        dns: Some(proto::Dns { servers: dns.servers, searches: dns.searches, options: dns.options }),
    }
}

/// The node's own resolver configuration, for pods that bring none. Its loopback servers cannot be reached from a
/// guest and are left out, unless the pod is on the node's network.
fn node_dns(text: &str, on_node: bool) -> Dns {
    let mut dns = Dns::default();
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

/// What came of giving back.
pub(super) struct Undone {
    /// What the pod process last recorded.
    pub last: Option<LastRecord>,
    /// What is still there.
    pub left: Vec<Left>,
    /// How long it took.
    pub timeline: Timeline,
}

/// Gives machine and network back. Every step is tried, whatever came of those before, and all can be tried again.
pub(super) async fn undo(parts: Arc<Parts>, id: PodId, client: Option<PodClient>) -> Undone {
    let limit = Duration::from_secs(parts.config.sandbox.undo_seconds);
    let timeline = Timeline::default();
    // What runs in the pod is killed in any case: its network need not wait for its end.
    let machine = timeline.measure("end of the pod process", end_machine(&parts, &id, client, limit));
    let network = timeline.measure("end of the network", async {
        match timeout(limit, parts.networks.teardown(&id)).await {
            Ok(torn) => torn.map_err(|error| Chain(&error).to_string()),
            Err(_elapsed) => Err(format!("no end after {} s", limit.as_secs())),
        }
    });
    let (machine, network) = tokio::join!(machine, network);
    let mut left = Vec::new();
    let mut failed = |what: &str, why: String| {
        tracing::error!(pod = %id, what, why, "could not be given back; the next stop tries again");
        left.push(Left { what: what.to_owned(), why });
    };
    let last = machine.unwrap_or_else(|why| {
        failed("machine", why);
        None
    });
    if let Err(why) = network {
        failed("network", why);
    }
    Undone { last, left, timeline }
}

/// Stops the pod process in good order, and kills what has not stopped by itself. Answers what it last said, or why it
/// still lives.
async fn end_machine(
    parts: &Parts,
    id: &PodId,
    client: Option<PodClient>,
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
    match timeout(limit, parts.clean_up(&parts.pod_dir(id))).await {
        Ok(Ok(last)) => Ok(last),
        Ok(Err(error)) => Err(Chain(&error).to_string()),
        Err(_elapsed) => Err(format!("it still lives after {} s", limit.as_secs())),
    }
}

/// Removes the pod's folder.
pub(super) async fn remove_folder(parts: &Parts, id: &PodId) -> Result<(), LifecycleError> {
    let dir = parts.pod_dir(id);
    let removed = blocking(move || files::remove_tree_if_there(&dir)).await;
    removed.map_err(at("remove the folder of the pod"))
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
