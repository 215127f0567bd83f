//! Collects the resource use of pods: queries many pod processes at once, each with a time limit, keeps what the computation of
//! rates needs, and measures a VM's cost on the node. docs/reference/statistics.md has the source of each figure. It uses the
//! lifecycle for pods and their processes, and knows nothing of CRI. Functions may be called on any thread; the one lock is held
//! for look-ups only.

mod cost;
mod rate;

pub use cost::{ProcessCost, VmCost};

use crate::lifecycle::{LifecycleError, Node, View, ask, unix_nanos};
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

/// The number of pods that are queried at the same time.
const MAX_PARALLEL: usize = 64;
/// Time limit for one pod of many: a pod that hangs must not cost the caller the figures of the others.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// The resource use of a pod and its containers at one time.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The time on the node's clock, in nanoseconds since 1970.
    pub at: i64,
    /// All containers together.
    pub pod: Option<CgroupFigures>,
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
pub struct CgroupFigures {
    /// The figures as the guest reports them.
    pub usage: common::Usage,
    /// CPU nanoseconds per second since the previous measurement; `None` at the first one.
    pub nano_cores: Option<u64>,
}

/// The figures of a container.
#[derive(Clone, Debug)]
pub struct ContainerFigures {
    /// The use of its processes.
    pub used: Option<CgroupFigures>,
    /// The size of its writable layer.
    pub layer: Option<common::Layer>,
    /// Further figures.
    pub details: Option<common::Details>,
    /// The largest use of huge pages that any request has seen, in bytes by page size: the kernel keeps no such maximum.
    pub max_hugepages: HugepageBytes,
}

/// Bytes by page size.
pub type HugepageBytes = BTreeMap<String, u64>;

/// The values of the previous measurement.
#[derive(Default)]
struct ContainerHistory {
    rate: Rate,
    pages: HugepageBytes,
}

impl ContainerHistory {
    /// Updates and returns the largest use of each page size that is in use now.
    fn update_max_hugepages(&mut self, now: &common::Details) -> HugepageBytes {
        let most = |used: &common::HugepageUsage| {
            let before = self.pages.get(&used.size).copied().unwrap_or(0);
            (used.size.clone(), used.bytes.max(before))
        };
        self.pages = now.hugepages.iter().map(most).collect();
        self.pages.clone()
    }
}

/// Previous values by container id; the pod's own have an empty id.
type PodHistory = HashMap<String, ContainerHistory>;

/// Measures the resource use of pods.
#[derive(Clone)]
pub struct Accounting {
    node: Node,
    began: Instant,
    history: Arc<Mutex<BTreeMap<PodId, PodHistory>>>,
}

impl Accounting {
    /// Creates the accounting for the pods of this node.
    pub fn new(node: Node) -> Accounting {
        Accounting { node, began: Instant::now(), history: Arc::default() }
    }

    /// Returns the use of a pod, which must be ready and respond within the limit.
    pub async fn query(&self, pod: &PodId, limit: Duration) -> Result<Figures, LifecycleError> {
        let (view, client) = self.node.ready(pod.as_str())?;
        self.query_pod(view.pod.id.clone(), client, limit).await
    }

    /// Returns the use of those of these pods that are ready and respond.
    pub async fn query_all(&self, pods: impl Iterator<Item = &View>) -> HashMap<PodId, Figures> {
        let permits = Arc::new(Semaphore::new(MAX_PARALLEL));
        let mut queries = JoinSet::new();
        for (view, client) in pods.filter_map(|view| self.node.ready(view.pod.id.as_str()).ok()) {
            let (id, own, permits) = (view.pod.id.clone(), self.clone(), Arc::clone(&permits));
            queries.spawn(async move {
                let _permit = permits.acquire_owned().await;
                (id.clone(), own.query_pod(id, client, QUERY_TIMEOUT).await)
            });
        }
        let mut figures = HashMap::new();
        while let Some(result) = queries.join_next().await {
            match result {
                Ok((id, Ok(found))) => drop(figures.insert(id, found)),
                Ok((id, Err(error))) => tracing::debug!(pod = %id, "no statistics of the pod: {}", Chain(&error)),
                Err(error) => tracing::error!(%error, "BUG: a task that queries a pod's statistics panicked"),
            }
        }
        figures
    }

    async fn query_pod(&self, pod: PodId, client: PodClient, limit: Duration) -> Result<Figures, LifecycleError> {
        let stats = ask("read the pod's resource usage", limit, client.stats()).await?;
        let at = self.began.elapsed();
        let known: Vec<PodId> = self.node.views().iter().map(|view| view.pod.id.clone()).collect();
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.retain(|id, _| known.contains(id));
        let history = history.entry(pod).or_default();
        history.retain(|id, _| id.is_empty() || stats.containers.iter().any(|container| container.id == *id));
        let used = |past: &mut ContainerHistory, usage: common::Usage| {
            let nano_cores = past.rate.update(at, usage.cpu_nanos);
            CgroupFigures { usage, nano_cores }
        };
        let pod = stats.pod.map(|usage| used(history.entry(String::new()).or_default(), usage));
        let container = |container: common::ContainerUsage| {
            let past = history.entry(container.id.clone()).or_default();
            let figures = ContainerFigures {
                used: container.usage.map(|usage| used(past, usage)),
                layer: container.layer,
                max_hugepages: container
                    .details
                    .as_ref()
                    .map(|details| past.update_max_hugepages(details))
                    .unwrap_or_default(),
                details: container.details,
            };
            (container.id, figures)
        };
        let containers = stats.containers.into_iter().map(container).collect();
        let (interfaces, scratch, guest_used) = (stats.interfaces, stats.scratch, stats.used_bytes);
        Ok(Figures { at: unix_nanos(), pod, containers, interfaces, scratch, guest_used })
    }

    /// Returns the cost of a pod's VM on the node; `None` if there is none or it cannot be measured.
    pub async fn measure_processes(&self, pod: &PodId) -> Option<ProcessCost> {
        let (_, client) = self.node.ready(pod.as_str()).ok()?;
        let identity = client.identity().clone();
        run_blocking("measure the cost of a pod", move || cost::measure_processes(&identity)).await.ok().flatten()
    }

    /// Returns the resident memory of the processes of these pods in bytes, by handler. Pods that are not ready are left out.
    pub async fn measure_memory(&self, pods: &[Arc<View>]) -> BTreeMap<String, u64> {
        let of = |view: &Arc<View>| {
            let (view, client) = self.node.ready(view.pod.id.as_str()).ok()?;
            Some((view.pod.handler.clone(), client.identity().clone()))
        };
        let processes: Vec<_> = pods.iter().filter_map(of).collect();
        let measure = move || {
            let mut sums = BTreeMap::<String, u64>::new();
            for (handler, process) in processes {
                let bytes = cost::measure_processes(&process).map_or(0, |cost| cost.memory_bytes);
                let sum = sums.entry(handler).or_default();
                *sum = sum.saturating_add(bytes);
            }
            sums
        };
        run_blocking("measure the memory of pods", measure).await.unwrap_or_default()
    }

    /// Returns the cost of a pod's VM and its parts; `None` as in [`Accounting::measure_processes`].
    pub async fn measure_vm_cost(&self, pod: &PodId) -> Option<VmCost> {
        let (_, client) = self.node.ready(pod.as_str()).ok()?;
        let identity = client.identity().clone();
        run_blocking("measure the cost of a pod", move || cost::measure_vm(&identity)).await.ok().flatten()
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
        let mut past = ContainerHistory::default();
        let pages = |pages: &[(&str, u64)]| pages.iter().map(|(size, bytes)| ((*size).to_owned(), *bytes)).collect();
        assert_eq!(past.update_max_hugepages(&now(&[("2MB", 4), ("1GB", 0)])), pages(&[("2MB", 4), ("1GB", 0)]));
        assert_eq!(past.update_max_hugepages(&now(&[("2MB", 2), ("1GB", 1)])), pages(&[("2MB", 4), ("1GB", 1)]));
        assert_eq!(past.update_max_hugepages(&now(&[("1GB", 0)])), pages(&[("1GB", 1)]));
        assert_eq!(past.update_max_hugepages(&now(&[("2MB", 2)])), pages(&[("2MB", 2)]));
    }
}
