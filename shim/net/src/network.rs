//! Manages the life of a pod's network: namespace, CNI chain, the configuration for the guest, and the cleanup.

use crate::cni::{Cni, CniError, CniResult, INTERFACE, InterfaceUsage, OwedDelete, PodRef};
use crate::inspect::{check_ethernet, inspect_addresses};
use crate::{NetError, NetNs, inspect, netns, tap};
use nacelle_base::net::PodNetwork;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, PodId};
use nacelle_model::network::DnsConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The names of our namespaces are this prefix and the pod's id.
const PREFIX: &str = "nacelle-";

/// The directories of the pod network, and the deadline of plugins.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// The directory of CNI configurations; the first file in lexical order is used. It is read again at each use.
    pub conf_dir: PathBuf,
    /// The directories of CNI plugins; the first one that has a plugin is used.
    pub bin_dirs: Vec<PathBuf>,
    /// The directory of the records of attachments, for DEL and CHECK. It must survive restarts of daemon and node.
    pub cache_dir: PathBuf,
    /// The directory of the namespaces' names: `nacelle-<pod id>`.
    pub netns_dir: PathBuf,
    /// The deadline of one plugin for one command.
    pub plugin_deadline: Duration,
}

impl Default for NetConfig {
    fn default() -> Self {
        NetConfig {
            conf_dir: "/etc/cni/net.d".into(),
            bin_dirs: vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()],
            cache_dir: "/var/lib/nacelle/cni".into(),
            netns_dir: "/run/netns".into(),
            plugin_deadline: Duration::from_secs(60),
        }
    }
}

/// The network of an attached pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The configuration for the guest. The first interface is the pod's default one, always named "eth0".
    pub network: PodNetwork,
    /// The resolver configuration from the CNI result; often empty.
    pub dns: DnsConfig,
    /// The pod's addresses in the order of the CNI result; never empty.
    pub ips: Vec<IpAddr>,
}

/// Returns the pods that the caller knows now, including those that are being created.
pub type KnownPods<'a> = dyn Fn() -> BTreeSet<PodId> + Send + Sync + 'a;

/// The networks of all pods of this node.
///
/// Calls for different pods may run at the same time. Calls for one pod must be sequential.
#[derive(Clone, Debug)]
pub struct NodeNetworks {
    config: NetConfig,
    cni: Arc<Cni>,
}

impl NodeNetworks {
    /// Returns the networks of this configuration. Accesses no file yet.
    pub fn new(config: NetConfig) -> NodeNetworks {
        NodeNetworks { cni: Arc::new(Cni::new(&config)), config }
    }

    /// The path that names the namespace of this pod, whether it exists or not.
    pub fn netns_path(&self, id: &PodId) -> PathBuf {
        self.config.netns_dir.join(format!("{PREFIX}{id}"))
    }

    /// Creates the pod's namespace with loopback up. Fails with `AlreadyExists` if it exists.
    pub async fn create_netns(&self, id: &PodId) -> Result<NetNs, NetError> {
        let path = self.netns_path(id);
        run_blocking("create a network namespace", move || netns::create(&path)).await?
    }

    /// Runs CNI ADD in the pod's namespace and reads the configuration for the guest. First removes the network of an
    /// earlier attempt. After a failure DEL has run; if DEL failed too, or the future was dropped, `teardown` cleans up. The namespace stays
    /// in any case.
    pub async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError> {
        let path = self.netns_path(&pod.id);
        let (opened, usage) = (path.clone(), pod.usage);
        let open = move || -> Result<NetNs, NetError> {
            let netns = NetNs::open(&opened)?;
            if usage != InterfaceUsage::Namespace {
                netns::disable_router_solicitations(&netns)?;
            }
            Ok(netns)
        };
        let netns = run_blocking("open a network namespace", open).await??;
        let result = self.cni.add(pod, &path).await?;
        let dns = result.dns.clone();
        let pod_ref = pod.clone();
        let read =
            run_blocking("inspect the network of a pod", move || read_attached_network(&netns, &result, &pod_ref));
        match read.await.map_err(NetError::from).flatten() {
            Ok(network) => Ok(Attachment { ips: network.ips().collect(), network, dns }),
            Err(error) => {
                if let Err(left) = self.cni.del(&pod.id).await {
                    tracing::warn!(pod = %pod.id, error = %Chain(&left), "cannot run CNI DEL after a failed network setup; the pod's teardown retries it");
                }
                Err(error)
            }
        }
    }

    /// Connects taps in the pod's namespace to interfaces that ADD created: pairs of names, the tap first. May be repeated.
    pub async fn connect_taps(&self, id: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError> {
        let path = self.netns_path(id);
        run_blocking("connect the taps of a pod", move || {
            let netns = NetNs::open(&path)?;
            pairs.iter().try_for_each(|(tap, interface)| tap::connect(&netns, tap, interface))
        })
        .await?
    }

    /// Runs CNI DEL from the record, and removes the namespace. Succeeds for a pod without either. If DEL fails, the namespace
    /// stays, and the caller may try again.
    pub async fn teardown(&self, id: &PodId) -> Result<(), NetError> {
        self.cni.del(id).await?;
        let path = self.netns_path(id);
        remove_netns(path).await
    }

    /// Like `teardown`, for a pod that ends; waits for its plugins at most `limit`. If DEL does not succeed by then, it is
    /// owed and its error is returned; the namespace is removed all the same, and `retry_owed_deletes` retries DEL. May be
    /// repeated.
    pub async fn release(&self, id: &PodId, limit: Duration) -> Result<Option<CniError>, NetError> {
        let owed = self.cni.release(id, limit).await;
        let path = self.netns_path(id);
        remove_netns(path).await.map(|()| owed)
    }

    /// Retries the owed DELs that are due, each for at most `limit`. The caller calls it periodically, and never concurrently.
    pub async fn retry_owed_deletes(&self, limit: Duration) {
        self.cni.retry_owed_deletes(limit).await;
    }

    /// Returns the number of owed DELs that this process knows: those of earlier processes after the first `gc`. Does not block.
    pub fn count_owed_deletes(&self) -> usize {
        self.cni.count_owed_deletes()
    }

    /// Returns the owed DELs from the records, including those of other processes.
    pub async fn owed_deletes(&self) -> Result<Vec<OwedDelete>, NetError> {
        Ok(self.cni.owed_deletes().await?)
    }

    /// Runs CNI CHECK: whether the pod's network is as the plugins made it.
    pub async fn check(&self, id: &PodId) -> Result<(), NetError> {
        Ok(self.cni.check(id).await?)
    }

    /// Returns an error unless pods can get a network now, which requires a valid configuration, its plugins present and of its
    /// version, and a successful STATUS (since 1.1.0). The error is the reason for CRI's NetworkReady=false.
    pub async fn status(&self) -> Result<(), NetError> {
        Ok(self.cni.status().await?)
    }

    /// Returns the pods that have a namespace or a CNI attachment on this node, whether the caller knows them or not.
    pub async fn pods(&self) -> Result<BTreeSet<PodId>, NetError> {
        let dir = self.config.netns_dir.clone();
        let mut ids = run_blocking("list the network namespaces", move || list_named_pods(&dir)).await??;
        ids.extend(self.cni.ids().await?);
        Ok(ids)
    }

    /// Releases all pods that are not known, all at once, then sends the plugins the valid attachments (CNI GC, since 1.1.0).
    /// Each of the two takes at most `limit`. A DEL that is owed already is left to `retry_owed_deletes`, so that a
    /// hanging plugin does not delay each start of the daemon. Continues after failures and returns the first one. Pods may be
    /// created and removed meanwhile: `known` is asked after the pods of the node are listed, and again when no plugin runs. A
    /// pod is known from before its namespace is created until it is released.
    pub async fn gc(&self, known: &KnownPods<'_>, limit: Duration) -> Result<(), NetError> {
        let owed: BTreeSet<PodId> = self.owed_deletes().await?.into_iter().map(|owed| owed.pod).collect();
        let mut releases = JoinSet::new();
        let there = self.pods().await?;
        for id in there.difference(&known()) {
            let (network, id, is_owed) = (self.clone(), id.clone(), owed.contains(id));
            releases.spawn(async move {
                if is_owed {
                    let path = network.netns_path(&id);
                    return remove_netns(path).await.map(|()| None);
                }
                if let Some(error) = network.release(&id, limit).await? {
                    tracing::warn!(pod = %id, error = %Chain(&error), "the CNI DEL of a pod without a record is owed");
                }
                Ok(Some(id))
            });
        }
        let mut released = Vec::new();
        let mut first = self.cni.load_owed_deletes().await.map_err(NetError::from);
        while let Some(done) = releases.join_next().await {
            match done.unwrap_or_else(|error| Err(TaskError::new("release the network of a pod", error).into())) {
                Ok(id) => released.extend(id),
                Err(error) => first = first.and(Err(error)),
            }
        }
        if !released.is_empty() {
            tracing::info!(pods = %join_some(&released), count = released.len(), "released the networks of pods that do not exist");
        }
        let too_slow = CniError::TooSlow { command: "GC", seconds: limit.as_secs() };
        let collected = timeout(limit, self.cni.gc(known)).await.unwrap_or(Err(too_slow));
        first.and(collected.map_err(NetError::from))
    }
}

/// Returns the configuration for the guest after ADD: the default interface, then the further ones. These need not be in the
/// result: a plugin that delegates to others reports only the first one's interface.
fn read_attached_network(netns: &NetNs, result: &CniResult, pod: &PodRef) -> Result<PodNetwork, NetError> {
    let (guest, all_needed) = (pod.usage != InterfaceUsage::Namespace, pod.usage == InterfaceUsage::GuestNeedsAll);
    let mut names = vec![INTERFACE.to_owned()];
    for name in &pod.additional_interfaces {
        tap::check_name(name)?;
        match check_ethernet(netns, name) {
            Ok(()) if names.contains(name) => {}
            Ok(()) => names.push(name.clone()),
            Err(NetError::NoInterface { name }) if all_needed => return Err(NetError::MissingInterface { name }),
            Err(NetError::NoInterface { .. } | NetError::NotEthernet { .. }) if !all_needed => {
                tracing::warn!(%name, "the CNI plugins did not create an interface that the pod's annotations request");
            }
            Err(error) => return Err(error),
        }
    }
    if let Some(name) = result.interfaces.iter().find(|name| guest && !names.contains(name)) {
        tracing::info!(%name, "the guest does not get an interface that the CNI plugins created: the pod does not request it");
    }
    let mut network = if guest { inspect(netns, &names)? } else { inspect_addresses(netns, &names)? };
    // The kernel's order differs from the plugins': the first address in the result is the pod's first one.
    let place = |ip| result.ips.iter().position(|other| *other == ip).unwrap_or(usize::MAX);
    for interface in &mut network.interfaces {
        interface.addresses.sort_by_key(|net| place(net.addr()));
    }
    match network.interfaces.first() {
        Some(default) if !default.addresses.is_empty() => Ok(network),
        _ => Err(NetError::NoAddress { name: INTERFACE.to_owned() }),
    }
}

/// Returns the first ids, for a log.
fn join_some(ids: &[PodId]) -> String {
    ids.iter().take(5).map(PodId::short).collect::<Vec<_>>().join(" ")
}

async fn remove_netns(path: PathBuf) -> Result<(), NetError> {
    run_blocking("remove a network namespace", move || netns::remove(&path)).await?
}

/// Returns the pods that have a namespace in this directory.
fn list_named_pods(dir: &Path) -> Result<BTreeSet<PodId>, NetError> {
    let failed = |source| NetError::Netns { what: "list", path: dir.to_owned(), source };
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        other => other.map_err(failed)?,
    };
    let mut ids = BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        ids.extend(name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<PodId>().ok()));
    }
    Ok(ids)
}
