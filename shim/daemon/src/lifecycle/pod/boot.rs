//! Creates a pod's VM and network: the effect behind the state `Booting`. On failure the caller tears everything down. Resources are
//! found by the pod's id, so a teardown works after a crash too.

use super::cgroup::choose_group;
use super::kernel;
use super::network::{configuration, keep_only, of_node};
use super::size::{self, memory_mib, memory_pages};
use super::spec::{Groups, NewPod, own_kernel, pod_spec};
use crate::config::Handler;
use crate::hugepages;
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::boot_files::BootFiles;
use crate::lifecycle::context::error::{LifecycleError, MAX_KERNEL_BYTES, at};
use crate::lifecycle::context::services::Admit;
use crate::lifecycle::context::text::clip;
use crate::lifecycle::template::TemplateOutcome;
use nacelle_base::machine::MemoryPages;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::timeline::{Timeline, TimelineStep};
use nacelle_base::{Chain, FailureKind, PodId, files};
use nacelle_model::machine::INTERFACE;
use nacelle_model::pod::{PodConfig, PodKind};
use nacelle_model::resources::VmResources;
use nacelle_net::{Attachment, InterfaceUsage, PodRef};
use nacelle_pod::client::{ClientError, PodClient};
use nacelle_pod::run_dir::{self, RUN_BYTES};
use nacelle_pod::spec::PodSpec;
use nacelle_proto::pod::{ConfigureResponse, Phase};
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// A pod that has started.
pub(crate) struct BootedPod {
    pub client: PodClient,
    pub ips: Vec<IpAddr>,
    pub kernel_release: String,
    pub machine: VmResources,
}

/// The step that creates the VM.
const START: &str = "start the machine of the pod";
const BOOT: &str = "boot the machine of the pod";
/// Time to ask a pod process whether its VM has ended, after something else has failed.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The longest name of a boot step in bytes; a pod process may report anything.
const STEP_NAME: usize = 64;

/// Creates the pod's directory, namespace, VM and network, and waits until the guest is configured. On failure the caller cleans
/// up everything. `cancel` ends it at the next step. `admit` records the pod process.
pub(crate) async fn boot(
    services: Arc<NodeServices>,
    pod: NewPod,
    cancel: CancellationToken,
    timeline: Timeline,
    admit: Admit,
) -> Result<BootedPod, LifecycleError> {
    check_resources(&pod.config, &pod.handler)?;
    let mut spec = prepare(&services, &pod, &cancel, &timeline).await?;
    let template = match &spec.checkpoint {
        Some(_) => None,
        None => services.templates.find(&spec, &pod.config.name.namespace, &pod.handler).await,
    };
    spec.template = template.as_ref().map(|found| found.template.clone());
    if let Some(files) = BootFiles::of_pod(&spec) {
        services.pods.check_files(files).await.map_err(at(START))?;
    }
    let (client, attached) = start(&services, &pod, &spec, &timeline, admit).await?;
    // The guest of a restored pod still has the addresses and connections of the pod that was saved: nothing of it may reach the network.
    let early = match spec.checkpoint {
        None => Some(join(&services, &pod, &attached, &timeline).await),
        Some(_) => None,
    };
    let configured = configure(&services, &pod, &client, &attached, &cancel, &timeline).await;
    if let Some(found) = &template
        && !cancel.is_cancelled()
    {
        let outcome = match &configured {
            Ok(configured) if configured.from_template => TemplateOutcome::Started,
            Ok(_booted) => TemplateOutcome::Booted,
            Err(_failed) => TemplateOutcome::Failed,
        };
        services.templates.report(found, outcome).await;
    }
    // A VM that has ended took its taps along, so its end is the first cause.
    let configured = configured?;
    match early {
        Some(joined) => joined?,
        None => join(&services, &pod, &attached, &timeline).await?,
    }
    let kernel_release = clip(&configured.kernel_release);
    let machine = match pod.config.kind.has_guest() {
        true => {
            let created = size::of(&pod.config, &pod.handler);
            pod.base.as_ref().map_or(created, |base| base.resized(created, &pod.config, &pod.handler))
        }
        // The pod runs on the node itself.
        false => VmResources {
            vcpus: u32::MAX,
            max_vcpus: u32::MAX,
            memory: u64::MAX,
            least_memory: u64::MAX,
            max_memory: u64::MAX,
        },
    };
    Ok(BootedPod { client, ips: attached.ips, kernel_release, machine })
}

/// Rejects a VM that no node can have, or for which this node has too few huge pages.
fn check_resources(config: &PodConfig, handler: &Handler) -> Result<(), LifecycleError> {
    if config.kind.has_guest() {
        size::check(config, handler)?;
    }
    let page = match config.kind.machine() {
        Some(machine) if machine.largest_pages => Some(hugepages::LARGEST_MIB),
        Some(machine) => machine.hugepages.then_some(hugepages::PAGE_MIB),
        None => (memory_pages(config, handler) == MemoryPages::Hugetlb).then_some(hugepages::PAGE_MIB),
    };
    page.map_or(Ok(()), |page| Ok(hugepages::check(memory_mib(config, handler), page)?))
}

/// Creates what the pod process finds: its directories, the pod's kernel and the network namespace. Returns its specification.
async fn prepare(
    services: &NodeServices,
    pod: &NewPod,
    cancel: &CancellationToken,
    timeline: &Timeline,
) -> Result<PodSpec, LifecycleError> {
    let NewPod { id, config, handler, engine, .. } = pod;
    let dir = services.pod_dir(id);
    // A kernel of the pod's own lies beside what the pod process writes.
    let kernel_bytes = own_kernel(config).map_or(0, |_| MAX_KERNEL_BYTES);
    make_directories(dir.clone(), config.log_directory.clone(), RUN_BYTES + kernel_bytes).await?;
    if let Some(own) = own_kernel(config) {
        let memory = size::narrow(memory_mib(config, handler));
        let brought = kernel::bring(services, &dir, own, *engine, memory, cancel);
        timeline.measure("kernel out of its image", brought).await?;
    }
    let netns = match config.kind.node_namespaces().network {
        true => None,
        false => {
            let created = timeline.measure("network namespace", services.networks.create_netns(id)).await;
            Some(created.map_err(at("make the network namespace of the pod"))?)
        }
    };
    if cancel.is_cancelled() {
        return Err(LifecycleError::Cancelled);
    }
    let group = choose_group(services, id, config, handler).await?;
    let groups = if config.kind.has_guest() { Groups::All } else { blocking(Groups::of_this_process).await };
    Ok(pod_spec(services, pod, netns, group, groups))
}

/// Starts the pod process, and attaches the pod to its networks meanwhile.
async fn start(
    services: &NodeServices,
    pod: &NewPod,
    spec: &PodSpec,
    timeline: &Timeline,
    admit: Admit,
) -> Result<(PodClient, Attachment), LifecycleError> {
    let NewPod { id, config, .. } = pod;
    let dir = services.pod_dir(id);
    let reference = pod_ref(services, pod, spec);
    // The VM boots while the plugins run. Both are awaited to their end, so that a cleanup finds nothing half-done.
    let limit = services.config.sandbox.boot_timeout;
    let (client, attached) =
        tokio::join!(timeline.measure("pod process", services.pods.spawn(&dir, spec, admit)), async {
            match spec.network {
                Some(_) => timeout(limit, timeline.measure("CNI", services.networks.setup(&reference))).await,
                None => Ok(Ok(of_node())),
            }
        });
    let client = client.map_err(at(START))?;
    let attached = attached
        .map_err(|_elapsed| LifecycleError::TooSlow { step: "attach the pod to its network", limit })
        .and_then(|attached| attached.map_err(at("attach the pod to its network")));
    let mut attached = match attached {
        Ok(attached) => attached,
        // A VM that has ended meanwhile is the cause that is reported.
        Err(error) => return Err(find_end(services, id, &client).await.unwrap_or(error)),
    };
    if let Some(network) = &spec.network {
        keep_only(&mut attached.network, &network.interfaces);
    }
    if config.kind.machine().is_some() {
        for interface in attached.network.interfaces.iter().filter(|interface| !interface.neighbours.is_empty()) {
            let (name, neighbours) = (&interface.name, interface.neighbours.len());
            let why = "a machine's own system learns no permanent neighbours by DHCP or cloud-init; it asks for their addresses";
            tracing::warn!(pod = %id, name, neighbours, why);
        }
    }
    Ok((client, attached))
}

/// Joins the taps of the VM to the network. The pod process has dropped the privileges for it.
async fn join(
    services: &NodeServices,
    pod: &NewPod,
    attached: &Attachment,
    timeline: &Timeline,
) -> Result<(), LifecycleError> {
    if !pod.config.kind.has_guest() {
        return Ok(());
    }
    let known = attached.network.interfaces.iter().enumerate();
    let pairs = known.map(|(n, interface)| (nacelle_pod::tap_name(n), interface.name.clone())).collect();
    let joined = timeline.measure("taps joined to the network", services.networks.connect_taps(&pod.id, pairs)).await;
    joined.map_err(at("join the machine of the pod to its network"))
}

/// Returns the error of a VM that has ended before it was configured; `None` if it has not, or if its process does not say so in time.
async fn find_end(services: &NodeServices, id: &PodId, client: &PodClient) -> Option<LifecycleError> {
    let error = match timeout(END_LIMIT, client.state()).await.ok()? {
        Ok(state) if state.phase() == Phase::Stopped && !state.failure.is_empty() => {
            let message = format!("the VM has ended: {}", clip(&state.failure));
            ClientError::Rejected { kind: FailureKind::Unavailable, message }
        }
        Err(error @ (ClientError::Ended { .. } | ClientError::OutOfMemory { .. })) => error,
        _ => return None,
    };
    Some(at(BOOT)(with_memory(services, id, error).await))
}

/// Describes the pod for the network plugins.
fn pod_ref(services: &NodeServices, pod: &NewPod, spec: &PodSpec) -> PodRef {
    let config = &pod.config;
    let interfaces = spec.network.iter().flat_map(|network| &network.interfaces);
    PodRef {
        id: pod.id.clone(),
        name: config.name.name.clone(),
        namespace: config.name.namespace.clone(),
        uid: config.name.uid.clone(),
        port_mappings: config.ports.clone(),
        bandwidth: config.bandwidth,
        dns: config.dns.clone(),
        pod_cidrs: services.pod_cidrs(),
        additional_interfaces: interfaces.filter(|name| *name != INTERFACE).cloned().collect(),
        usage: match config.kind {
            PodKind::Host { .. } => InterfaceUsage::Namespace,
            PodKind::Machine { .. } => InterfaceUsage::GuestNeedsAll,
            PodKind::Containers { .. } => InterfaceUsage::Guest,
        },
    }
}

/// Configures the guest and waits until it is ready. Returns what the pod process says of it.
async fn configure(
    services: &NodeServices,
    pod: &NewPod,
    client: &PodClient,
    attached: &Attachment,
    cancel: &CancellationToken,
    timeline: &Timeline,
) -> Result<ConfigureResponse, LifecycleError> {
    let NewPod { id, config, .. } = pod;
    let node = blocking(|| std::fs::read_to_string("/etc/resolv.conf")).await.unwrap_or_default();
    let request = configuration(config, attached, &node);
    let (step, limit) = (BOOT, services.config.sandbox.boot_timeout);
    let configured = tokio::select! {
        () = cancel.cancelled() => return Err(LifecycleError::Cancelled),
        configured = timeout(limit, timeline.measure("guest ready", client.configure(request))) => configured,
    };
    let mut configured = match configured.map_err(|_elapsed| LifecycleError::TooSlow { step, limit })? {
        Ok(configured) => configured,
        Err(error) => return Err(at(step)(with_memory(services, id, error).await)),
    };
    if own_kernel(config).is_some()
        && let Err(error) = kernel::forget(&services.pod_dir(id)).await
    {
        tracing::warn!(pod = %id, "the kernel stays until the pod is removed: {}", Chain(&error));
    }
    // Measured by the pod process; its times are not verified.
    timeline.add(std::mem::take(&mut configured.steps).into_iter().map(|step| TimelineStep {
        what: name_of_step(&step.name),
        at: step.started_at,
        micros: step.micros,
        failed: false,
    }));
    Ok(configured)
}

/// The steps that the daemon measures itself.
const OWN_STEPS: [&str; 6] =
    ["kernel out of its image", "network namespace", "CNI", "pod process", "taps joined to the network", "guest ready"];

/// Returns the name of a step that a pod process has measured. It may not pass for one of the daemon's.
fn name_of_step(name: &str) -> String {
    match OWN_STEPS.contains(&name) {
        true => "a step of the pod process".to_owned(),
        false => clip(name).chars().take(STEP_NAME).collect(),
    }
}

/// Returns the error of a VM that has ended while it booted: that the node's kernel killed it for lack of memory, if it did.
async fn with_memory(services: &NodeServices, id: &PodId, error: ClientError) -> ClientError {
    let is_known = matches!(error, ClientError::OutOfMemory { .. });
    match !is_known && services.pods.out_of_memory(&services.pod_dir(id)).await {
        true => ClientError::OutOfMemory { why: Chain(&error).to_string() },
        false => error,
    }
}

async fn make_directories(dir: PathBuf, logs: Option<PathBuf>, bytes: u64) -> Result<(), LifecycleError> {
    let make = move || {
        if let Some(logs) = logs {
            std::fs::create_dir_all(&logs).map_err(files::at("create", &logs))?;
        }
        if let Some(pods) = dir.parent() {
            // The directory existed when the daemon started, but may have been removed since with its contents.
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(pods).map_err(files::at("create", pods))?;
        }
        run_dir::create(&dir, bytes)
    };
    blocking(make).await.map_err(at("make the directory of the pod"))
}
