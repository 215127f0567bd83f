//! Owns: the life of a pod's network: namespace, CNI chain, what the guest must have, and the way back.

use crate::cni::{Cni, CniError, CniResult, INTERFACE, InterfaceUsage, OwedDelete, PodRef};
use crate::inspect::{check_card, inspect_addresses};
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

/// Namespaces of ours are named this and the pod's id.
const PREFIX: &str = "nacelle-";

/// Where things are, and how long a plugin may take.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// CNI configurations; the first file in lexical order counts. Read again at each use.
    pub conf_dir: PathBuf,
    /// CNI plugins; the first folder that has one counts.
    pub bin_dirs: Vec<PathBuf>,
    /// What is remembered of each pod, for DEL and CHECK: survives restarts of daemon and node.
    pub cache_dir: PathBuf,
    /// Where namespaces are named: `nacelle-<pod id>`.
    pub netns_dir: PathBuf,
    /// How long one plugin may take for one command.
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

/// The network that a pod got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// What the guest must have. The first interface is the pod's default one, always named "eth0".
    pub network: PodNetwork,
    /// The resolver configuration that CNI answered; often empty.
    pub dns: DnsConfig,
    /// The pod's addresses, the first one first as CNI gave them; never empty.
    pub ips: Vec<IpAddr>,
}

/// The networks of all pods of this node.
///
/// Calls for different pods may run at the same time. Calls for one pod must come one after the other.
#[derive(Clone, Debug)]
pub struct Network {
    config: NetConfig,
    cni: Arc<Cni>,
}

impl Network {
    /// Touches nothing yet.
    pub fn new(config: NetConfig) -> Network {
        Network { cni: Arc::new(Cni::new(&config)), config }
    }

    /// The file that names the namespace of this pod, there or not.
    pub fn netns_path(&self, id: &PodId) -> PathBuf {
        self.config.netns_dir.join(format!("{PREFIX}{id}"))
    }

    /// Makes the pod's namespace with loopback up. `AlreadyExists` if it is there.
    pub async fn create_netns(&self, id: &PodId) -> Result<NetNs, NetError> {
        let path = self.netns_path(id);
        run_blocking("create a network namespace", move || netns::create(&path)).await?
    }

    /// Runs CNI ADD in the pod's namespace and reads what the guest must have. What an earlier attempt left is
    /// taken back first. On failure DEL was run; if that failed too, or the caller gave up waiting, `teardown`
    /// cleans up. The namespace stays in any case.
    pub async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError> {
        let path = self.netns_path(&pod.id);
        let opened = path.clone();
        let netns = run_blocking("open a network namespace", move || NetNs::open(&opened)).await??;
        let result = self.cni.add(pod, &path).await?;
        let dns = result.dns.clone();
        let wanted = pod.clone();
        let attached = run_blocking("inspect the network of a pod", move || attached(&netns, &result, &wanted));
        match attached.await.map_err(NetError::from).flatten() {
            Ok(network) => Ok(Attachment { ips: network.ips().collect(), network, dns }),
            Err(error) => {
                if let Err(left) = self.cni.del(&pod.id).await {
                    tracing::warn!(pod = %pod.id, error = %Chain(&left), "a failed network could not be taken back");
                }
                Err(error)
            }
        }
    }

    /// Joins taps in the pod's namespace to interfaces that ADD made: pairs of names, the tap first. May be repeated.
    pub async fn join_taps(&self, id: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError> {
        let path = self.netns_path(id);
        run_blocking("connect the taps of a pod", move || {
            let netns = NetNs::open(&path)?;
            pairs.iter().try_for_each(|(tap, interface)| tap::join(&netns, tap, interface))
        })
        .await?
    }

    /// Runs CNI DEL from what was remembered, and removes the namespace. A pod without either is no failure.
    /// When DEL fails the namespace stays, and this may be called again.
    pub async fn teardown(&self, id: &PodId) -> Result<(), NetError> {
        self.cni.del(id).await?;
        let path = self.netns_path(id);
        remove_netns(path).await
    }

    /// As `teardown`, of a pod that ends, which does not wait for its plugins longer than `limit`. If DEL does not succeed by then,
    /// it is owed: the answer is why, the namespace is removed all the same, and `settle` tries again. May be repeated.
    pub async fn release(&self, id: &PodId, limit: Duration) -> Result<Option<CniError>, NetError> {
        let owed = self.cni.release(id, limit).await;
        let path = self.netns_path(id);
        remove_netns(path).await.map(|()| owed)
    }

    /// Tries the owed DELs whose time has come, each for at most `limit`. To be called again and again, and not while another call
    /// is under way.
    pub async fn settle(&self, limit: Duration) {
        self.cni.settle(limit).await;
    }

    /// The DELs that are owed, by what is remembered: also those that another process owes.
    pub async fn owed(&self) -> Result<Vec<OwedDelete>, NetError> {
        Ok(self.cni.owed().await?)
    }

    /// Asks the plugins whether the pod's network is still as they made it (CNI CHECK).
    pub async fn check(&self, id: &PodId) -> Result<(), NetError> {
        Ok(self.cni.check(id).await?)
    }

    /// Whether pods can get a network now: a valid configuration, its plugins present and of its version,
    /// and STATUS (from 1.1.0) without complaint. An error is the reason for CRI's NetworkReady=false.
    pub async fn status(&self) -> Result<(), NetError> {
        Ok(self.cni.status().await?)
    }

    /// The pods that have a namespace or a CNI attachment here, known to the caller or not.
    pub async fn pods(&self) -> Result<BTreeSet<PodId>, NetError> {
        let dir = self.config.netns_dir.clone();
        let mut ids = run_blocking("list the network namespaces", move || named(&dir)).await??;
        ids.extend(self.cni.ids().await?);
        Ok(ids)
    }

    /// Releases all pods that are not in `keep`, all at once, then sends the plugins the attachments that are valid (CNI GC, from
    /// 1.1.0). Each of the two takes at most `limit`. A DEL that is owed already is left to `settle`, so that a plugin that hangs
    /// does not delay each start of the daemon. Goes on after failures and returns the first one. A pod that is being made must be
    /// in `keep`.
    pub async fn gc(&self, keep: &BTreeSet<PodId>, limit: Duration) -> Result<(), NetError> {
        let owed: BTreeSet<PodId> = self.owed().await?.into_iter().map(|owed| owed.pod).collect();
        let mut releases = JoinSet::new();
        for id in self.pods().await?.difference(keep) {
            let (network, id, is_owed) = (self.clone(), id.clone(), owed.contains(id));
            releases.spawn(async move {
                if is_owed {
                    let path = network.netns_path(&id);
                    return remove_netns(path).await;
                }
                if let Some(error) = network.release(&id, limit).await? {
                    tracing::warn!(pod = %id, error = %Chain(&error), "the CNI DEL of a pod without a record is owed");
                }
                Ok(())
            });
        }
        let mut first = self.cni.take_over_debts().await.map_err(NetError::from);
        while let Some(done) = releases.join_next().await {
            first = first
                .and(done.unwrap_or_else(|error| Err(TaskError::new("release the network of a pod", error).into())));
        }
        let too_slow = CniError::TooSlow { command: "GC", seconds: limit.as_secs() };
        let collected = timeout(limit, self.cni.gc(keep)).await.unwrap_or(Err(too_slow));
        first.and(collected.map_err(NetError::from))
    }
}

/// What the guest must have after ADD: the default interface, then the others that it shall have. They need not be in the result: a
/// plugin that calls others tells of the first one's alone.
fn attached(netns: &NetNs, result: &CniResult, pod: &PodRef) -> Result<PodNetwork, NetError> {
    let (guest, all_needed) = (pod.usage != InterfaceUsage::Namespace, pod.usage == InterfaceUsage::GuestNeedsAll);
    let mut names = vec![INTERFACE.to_owned()];
    for name in &pod.further {
        tap::check_name(name)?;
        match check_card(netns, name) {
            Ok(()) if names.contains(name) => {}
            Ok(()) => names.push(name.clone()),
            Err(NetError::NoInterface { name }) if all_needed => return Err(NetError::NotMade { name }),
            Err(NetError::NoInterface { .. } | NetError::NotEthernet { .. }) if !all_needed => {
                tracing::warn!(%name, "the plugins made no such interface for the guest, which the pod's annotations ask for");
            }
            Err(error) => return Err(error),
        }
    }
    if let Some(name) = result.interfaces.iter().find(|name| guest && !names.contains(name)) {
        tracing::info!(%name, "the plugins made an interface that the guest does not get: nothing of the pod asks for it");
    }
    let mut network = if guest { inspect(netns, &names)? } else { inspect_addresses(netns, &names)? };
    // The kernel's order is not the plugins': the first address in the result is the pod's first one.
    let place = |ip| result.ips.iter().position(|other| *other == ip).unwrap_or(usize::MAX);
    for interface in &mut network.interfaces {
        interface.addresses.sort_by_key(|net| place(net.addr()));
    }
    match network.interfaces.first() {
        Some(default) if !default.addresses.is_empty() => Ok(network),
        _ => Err(NetError::NoAddress { name: INTERFACE.to_owned() }),
    }
}

async fn remove_netns(path: PathBuf) -> Result<(), NetError> {
    run_blocking("remove a network namespace", move || netns::remove(&path)).await?
}

/// The pods that have a namespace in this folder.
fn named(dir: &Path) -> Result<BTreeSet<PodId>, NetError> {
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
