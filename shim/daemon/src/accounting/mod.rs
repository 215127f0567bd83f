//! Collects the resource use of pods: asks many pod processes at once, each with a time limit, keeps what the computation of
//! rates needs, and measures a VM's cost on the node. docs/reference/statistics.md has the source of each figure. It uses the
//! lifecycle for pods and their processes, and knows nothing of CRI. Functions may be called on any thread; the one lock is held
//! for look-ups only.

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

/// The number of pods that are asked at the same time.
const PARALLEL: usize = 64;
/// Time limit for one pod of many: a pod that hangs must not cost the caller the figures of the others.
const LIMIT: Duration = Duration::from_secs(10);

/// The resource use of a pod and its containers at one time.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The time on the node's clock, in nanoseconds since 1970.
    pub at: i64,
    /// All containers together.
    pub pod: Option<Used>,
    /// The containers by id.
    pub containers: HashMap<String, ContainerFigures>,
    /// The pod's interfaces, the default one first.
    pub interfaces: Vec<common::InterfaceUsage>,
    /// The file system of the containers' layers.
    pub scratch: Option<common::FileSystem>,
    /// The VM's memory that the guest does not report as free, in bytes.
    pub guest_used: Option<u64>,
}

/// The figures of a cgroup.
#[derive(Clone, Debug)]
pub struct Used {
    /// The figures as the guest reports them.
    pub usage: common::Usage,
    /// CPU nanoseconds per second since the previous measurement; `None` at the first one.
    pub nano_cores: Option<u64>,
}

/// The figures of a container.
#[derive(Clone, Debug)]
pub struct ContainerFigures {
    /// The use of its processes.
    pub used: Option<Used>,
    /// The size of its writable layer.
    pub layer: Option<common::Layer>,
    /// Further figures.
    pub details: Option<common::Details>,
    /// The largest use of huge pages that any request has seen, in bytes by page size: the kernel keeps no such maximum.
    pub most_hugepages: Pages,
}

/// Bytes by page size.
pub type Pages = BTreeMap<String, u64>;

/// The values of the previous measurement.
#[derive(Default)]
struct Past {
    rate: Rate,
    pages: Pages,
}

impl Past {
    /// Updates and returns the largest use of each page size that is in use now.
    fn most(&mut self, now: &common::Details) -> Pages {
        let most = |used: &common::HugepageUsage| {
            let before = self.pages.get(&used.size).copied().unwrap_or(0);
            (used.size.clone(), used.bytes.max(before))
        };
        self.pages = now.hugepages.iter().map(most).collect();
        self.pages.clone()
    }
}

/// Previous values by container id; the pod's own have an empty id.
type Pasts = HashMap<String, Past>;

/// Measures the resource use of pods.
#[derive(Clone)]
pub struct Accounting {
    node: Node,
    began: Instant,
    pasts: Arc<Mutex<BTreeMap<PodId, Pasts>>>,
}

impl Accounting {
    /// Creates the accounting for the pods of this node.
    pub fn new(node: Node) -> Accounting {
        Accounting { node, began: Instant::now(), pasts: Arc::default() }
    }

    /// Returns the use of a pod, which must be ready and respond within the limit.
    pub async fn of(&self, pod: &PodId, limit: Duration) -> Result<Figures, LifecycleError> {
        let (id, client) = self.node.ready(pod.as_str())?;
        self.asked(id, client, limit).await
    }

    /// Returns the use of those of these pods that are ready and respond.
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

    /// Returns the cost of a pod's VM on the node; `None` if there is none or it cannot be measured.
    pub async fn cost(&self, pod: &PodId) -> Option<Cost> {
        let (_, client) = self.node.ready(pod.as_str()).ok()?;
        let identity = client.identity().clone();
        run_blocking("measure the cost of a pod", move || cost::of(&identity)).await.ok().flatten()
    }

    /// Returns the cost of a pod's VM and its parts; `None` as in [`Accounting::cost`].
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
