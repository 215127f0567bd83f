//! Owns: the life of a pod's network: namespace, CNI chain, what the guest must have, and the way back.

use crate::cni::{Dns, PodRef};
use crate::{NetError, NetNs};
use nacelle_base::PodId;
use nacelle_base::net::PodNetwork;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// What the guest must have. The first interface is the pod's default one, always named "eth0".
    pub network: PodNetwork,
    /// The resolver configuration that CNI answered; often empty.
    pub dns: Dns,
    /// The pod's addresses, the first one first as CNI gave them; never empty.
    pub ips: Vec<IpAddr>,
}

/// The networks of all pods of this node.
///
/// Calls for different pods may run at the same time. Calls for one pod must come one after the other.
#[derive(Debug)]
pub struct Network {
    config: NetConfig,
}

impl Network {
    /// Touches nothing yet.
    pub fn new(config: NetConfig) -> Network {
        Network { config }
    }

    /// The file that names the namespace of this pod, there or not.
    pub fn netns_path(&self, id: &PodId) -> PathBuf {
        self.config.netns_dir.join(format!("nacelle-{id}"))
    }

    /// Makes the pod's namespace with loopback up. `AlreadyExists` if it is there.
    pub async fn create_netns(&self, id: &PodId) -> Result<NetNs, NetError> {
        let path = self.netns_path(id);
        blocking(move || crate::netns::create(&path)).await
    }

    /// Runs CNI ADD in the pod's namespace and reads what the guest must have. On failure DEL was run; if
    /// that failed too, `teardown` tries again. If the caller gives up waiting, `teardown` cleans up.
    pub async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError> {
        let path = self.netns_path(&pod.id);
        blocking(move || NetNs::open(&path)).await?;
        Err(NetError::NoInterface { name: "eth0".into() })
    }

    /// Runs CNI DEL from what was remembered, and removes the namespace. A pod without either is no failure.
    pub async fn teardown(&self, id: &PodId) -> Result<(), NetError> {
        let path = self.netns_path(id);
        blocking(move || crate::netns::remove(&path)).await
    }

    /// Asks the plugins whether the pod's network is still as they made it (CNI CHECK).
    pub async fn check(&self, id: &PodId) -> Result<(), NetError> {
        let path = self.netns_path(id);
        blocking(move || NetNs::open(&path)).await.map(drop)
    }

    /// Whether pods can get a network now: a valid configuration, its plugins present and of its version,
    /// and STATUS (from 1.1.0) without complaint. An error is the reason for CRI's NetworkReady=false.
    pub async fn status(&self) -> Result<(), NetError> {
        Ok(())
    }

    /// Tears down all that is remembered or named of pods not in `keep`, then tells the plugins which
    /// attachments are valid (CNI GC, from 1.1.0). Goes on after failures and returns the first one.
    pub async fn gc(&self, keep: &BTreeSet<PodId>) -> Result<(), NetError> {
        let _ = keep;
        Ok(())
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NetError> + Send + 'static,
) -> Result<T, NetError> {
    tokio::task::spawn_blocking(work).await.map_err(|source| NetError::GivenUp { source })?
}
