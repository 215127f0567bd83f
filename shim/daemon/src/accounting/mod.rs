//! Owns: what pods use: asks their processes, many at once and each within a limit, keeps what rates are computed from,
//! and reads what a machine costs the node. docs/reference/statistics.md says where each figure is from.
//! May use: the lifecycle, for pods and their processes. Knows no CRI.
//! Threads: any; one lock, held for look-ups only.

mod cost;
mod rate;

pub use cost::{Account, Cost};

use crate::lifecycle::{LifecycleError, Node, View, ask, now};
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, PodId};
use nacelle_pod::client::PodClient;
use nacelle_proto::common;
use rate::Rate;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Pods that are asked at the same time.
const PARALLEL: usize = 64;
/// How long one pod among many may take: one that hangs must not cost its caller the others.
const LIMIT: Duration = Duration::from_secs(10);

/// What a pod and its containers have used, at one time.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The node's clock, in nanoseconds since 1970.
    pub at: i64,
    /// All containers together.
    pub pod: Option<Used>,
    /// Each container, by its id.
    pub containers: HashMap<String, ContainerFigures>,
    /// The pod's interfaces, the default one first.
    pub interfaces: Vec<common::InterfaceUsage>,
    /// Where the layers of containers lie.
    pub scratch: Option<common::FileSystem>,
    /// Of the machine's memory, what the guest does not call free, in bytes.
    pub guest_used: Option<u64>,
}

/// The figures of a control group.
#[derive(Clone, Debug)]
pub struct Used {
    /// As the guest says.
    pub usage: common::Usage,
    /// Processor nanoseconds per second since the time before, once it was asked for twice.
    pub nano_cores: Option<u64>,
}

/// The figures of a container.
#[derive(Clone, Debug)]
pub struct ContainerFigures {
    /// What its processes have used.
    pub used: Option<Used>,
    /// What it wrote.
    pub layer: Option<common::Layer>,
    /// What is known of it beside.
    pub details: Option<common::Details>,
    /// The most huge pages that any request has seen it use, in bytes by size: the kernel keeps no such figure.
    pub most_hugepages: Pages,
}

/// Bytes by size.
pub type Pages = BTreeMap<String, u64>;

/// What was so when somebody asked before.
#[derive(Default)]
struct Past {
    rate: Rate,
    pages: Pages,
}

impl Past {
    /// The most of each size that is used now.
    fn most(&mut self, now: &common::Details) -> Pages {
        let most = |used: &common::HugepageUsage| {
            let before = self.pages.get(&used.size).copied().unwrap_or(0);
            (used.size.clone(), used.bytes.max(before))
        };
        self.pages = now.hugepages.iter().map(most).collect();
        self.pages.clone()
    }
}

/// By container; the pod's own is under the empty id.
type Pasts = HashMap<String, Past>;

/// Asks pods what they use.
#[derive(Clone)]
pub struct Accounting {
    node: Node,
    began: Instant,
    pasts: Arc<Mutex<BTreeMap<PodId, Pasts>>>,
}

impl Accounting {
    /// For the pods of this node.
    pub fn new(node: Node) -> Accounting {
        Accounting { node, began: Instant::now(), pasts: Arc::default() }
    }

    /// What a pod uses, which must be ready and answer within the limit.
    pub async fn of(&self, pod: &PodId, limit: Duration) -> Result<Figures, LifecycleError> {
        let (id, client) = self.node.ready(pod.as_str())?;
        self.asked(id, client, limit).await
    }

    /// What those of these pods use that are ready and answer.
    pub async fn of_all(&self, pods: impl Iterator<Item = &View>) -> HashMap<PodId, Figures> {
        let places = Arc::new(Semaphore::new(PARALLEL));
        let mut asking = JoinSet::new();
        for (id, client) in pods.filter_map(|view| self.node.ready(view.pod.id.as_str()).ok()) {
            let (own, places) = (self.clone(), Arc::clone(&places));
            asking.spawn(async move {
                let _place = places.acquire_owned().await;
                (id.clone(), own.asked(id, client, LIMIT).await)
            });
        }
        let mut figures = HashMap::new();
        while let Some(asked) = asking.join_next().await {
            match asked {
                Ok((id, Ok(found))) => drop(figures.insert(id, found)),
                Ok((id, Err(error))) => tracing::debug!(pod = %id, "no figures: {}", Chain(&error)),
                Err(error) => tracing::error!(%error, "a task that asks a pod broke off"),
            }
        }
        figures
    }

    async fn asked(&self, pod: PodId, client: PodClient, limit: Duration) -> Result<Figures, LifecycleError> {
        let said = ask("ask the pod what it uses", limit, client.stats()).await?;
        let at = self.began.elapsed();
        let known: Vec<PodId> = self.node.views().iter().map(|view| view.pod.id.clone()).collect();
        let mut pasts = self.pasts.lock().unwrap_or_else(PoisonError::into_inner);
        pasts.retain(|id, _| known.contains(id));
        let pasts = pasts.entry(pod).or_default();
        pasts.retain(|id, _| id.is_empty() || said.containers.iter().any(|container| container.id == *id));
        let used = |past: &mut Past, usage: common::Usage| {
            let nano_cores = past.rate.update(at, usage.cpu_nanos);
            Used { usage, nano_cores }
        };
        let pod = said.pod.map(|usage| used(pasts.entry(String::new()).or_default(), usage));
        let container = |container: common::ContainerUsage| {
            let past = pasts.entry(container.id.clone()).or_default();
            let figures = ContainerFigures {
                used: container.usage.map(|usage| used(past, usage)),
                layer: container.layer,
                most_hugepages: container.details.as_ref().map(|details| past.most(details)).unwrap_or_default(),
                details: container.details,
            };
            (container.id, figures)
        };
        let containers = said.containers.into_iter().map(container).collect();
        let (interfaces, scratch, guest_used) = (said.interfaces, said.scratch, said.used_bytes);
        Ok(Figures { at: now(), pod, containers, interfaces, scratch, guest_used })
    }

    /// What a pod's machine costs the node, if it has one and can be looked at.
    pub async fn cost(&self, pod: &PodId) -> Option<Cost> {
        let (_, client) = self.node.ready(pod.as_str()).ok()?;
        let identity = client.identity().clone();
        run_blocking("measure the cost of a pod", move || cost::of(&identity)).await.ok().flatten()
    }

    /// The same, and for what.
    pub async fn account(&self, pod: &PodId) -> Option<Account> {
        let (_, client) = self.node.ready(pod.as_str()).ok()?;
        let identity = client.identity().clone();
        run_blocking("measure the cost of a pod", move || cost::account(&identity)).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_huge_pages_are_remembered_for_sizes_that_are_there() {
        let now = |pages: &[(&str, u64)]| {
            let page = |(size, bytes): &(&str, u64)| common::HugepageUsage { size: (*size).into(), bytes: *bytes };
            common::Details { hugepages: pages.iter().map(page).collect(), ..Default::default() }
        };
        let mut past = Past::default();
        let pages = |pages: &[(&str, u64)]| pages.iter().map(|(size, bytes)| ((*size).to_owned(), *bytes)).collect();
        assert_eq!(past.most(&now(&[("2MB", 4), ("1GB", 0)])), pages(&[("2MB", 4), ("1GB", 0)]));
        assert_eq!(past.most(&now(&[("2MB", 2), ("1GB", 1)])), pages(&[("2MB", 4), ("1GB", 1)]));
        assert_eq!(past.most(&now(&[("1GB", 0)])), pages(&[("1GB", 1)]));
        assert_eq!(past.most(&now(&[("2MB", 2)])), pages(&[("2MB", 2)]));
    }
}
