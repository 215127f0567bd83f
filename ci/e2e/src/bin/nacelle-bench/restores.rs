//! Measures pods that continue from a checkpoint, against new pods that reach the same point: a program that has filled 60 MiB in a VM with
//! 256 MiB.

use crate::cri::milliseconds;
use crate::memory::{self, MIB};
use crate::{BenchResult, median};
use nacelle_e2e::cri::{CriClient, CriPod, checkpoint, container_config, exec, pod_config, restore};
use nacelle_e2e::node::{NodeOptions, handler_config};
use nacelle_e2e::{TestImage, TestNode};
use nacelle_proto::cri::{ContainerConfig, PodSandboxConfig, RunPodSandboxRequest, StartContainerRequest};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// The handler of the pods.
const HANDLER: &str = "large";
/// What the program does before it is ready. No page is zero, and no two are equal.
const FILL: &str = "seq 1 9000000 | head -c 62914560 >/dev/shm/filled; echo ready; exec sleep 1000000";
/// Longer than any checkpoint or restore.
const LIMIT: Duration = Duration::from_secs(600);
/// How many pods run at a time when their memory is measured.
const COPIES: usize = 4;
/// How long the node is left alone before its memory is measured.
const SETTLE_TIME: Duration = Duration::from_secs(5);

/// The pods of one daemon.
struct Bench {
    node: TestNode,
    client: CriClient,
    image: String,
    pods: usize,
}

impl Bench {
    fn next_config(&mut self) -> PodSandboxConfig {
        self.pods += 1;
        let config = pod_config("bench", &format!("pod-{}", self.pods), self.node.directory());
        std::fs::create_dir_all(&config.log_directory).expect("the bench's directory is writable");
        config
    }

    fn container(&self) -> ContainerConfig {
        container_config("filled", &self.image, &["sh", "-c", FILL])
    }

    /// Starts a new pod, until the first command in its container after the program is ready.
    async fn start(&mut self) -> (CriPod, String, f64) {
        let config = self.next_config();
        let start = Instant::now();
        let request = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: HANDLER.to_owned() };
        let id = self.client.run_pod_sandbox(request).await.expect("RunPodSandbox").into_inner().pod_sandbox_id;
        let pod = CriPod { id, config };
        let container = self.container();
        let container = pod.start_container(&mut self.client, container).await.expect("a container");
        let log = Path::new(&pod.config.log_directory).join("filled.log");
        while std::fs::metadata(&log).map_or(0, |log| log.len()) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert!(start.elapsed() < LIMIT, "no output in {}", log.display());
        }
        exec(&mut self.client, &container, &["/bin/true"], 600).await.expect("ExecSync");
        (pod, container, milliseconds(start))
    }

    /// Restores a pod, until the first command in its container.
    async fn restore(&mut self, saved: &Path) -> (CriPod, f64) {
        let (config, container) = (self.next_config(), self.container());
        let start = Instant::now();
        let restored = restore(&mut self.client, saved, HANDLER, config, &[container], LIMIT).await;
        let (pod, ids) = restored.expect("RestorePod");
        let container_id = ids["filled"].clone();
        let request = StartContainerRequest { container_id: container_id.clone() };
        self.client.start_container(request).await.expect("StartContainer");
        exec(&mut self.client, &container_id, &["/bin/true"], 600).await.expect("ExecSync");
        (pod, milliseconds(start))
    }

    async fn remove(&mut self, pods: Vec<CriPod>) {
        for pod in pods {
            pod.remove(&mut self.client).await.expect("to remove the pod");
        }
    }
}

/// Starts new pods and restores pods, alternating. The details have the source's time for the checkpoint, and the node's memory for each
/// pod of both kinds in MiB.
pub fn measure(runs: usize) -> BenchResult {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(measure_pods(runs))
}

async fn measure_pods(runs: usize) -> BenchResult {
    let extra = handler_config(HANDLER, "memory_mib = 256\n");
    let node = TestNode::with_options(NodeOptions { ipv6: false, extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let client = CriClient::new(node.channel());
    let mut bench = Bench { node, client, image, pods: 0 };
    // On a disk: a checkpoint in memory would count as the pod's.
    let saved = tempfile::tempdir_in("/var/tmp").expect("/var/tmp is writable");
    let (source, container, _) = bench.start().await;
    let mut checkpoints = Vec::new();
    let mut measured = BenchResult::new("ms", "a new pod");
    for run in 0..=runs {
        let directory = saved.path().join(run.to_string());
        std::fs::create_dir(&directory).expect("/var/tmp is writable");
        let start = Instant::now();
        let done = checkpoint(&mut bench.client, &source, &[&container], &directory, LIMIT).await;
        done.expect("CheckpointPod");
        let saving = milliseconds(start);
        let (restored, took) = bench.restore(&directory).await;
        let (new, _, peer) = bench.start().await;
        bench.remove(vec![restored, new]).await;
        // The first run fills the page cache.
        if run > 0 {
            checkpoints.push(saving);
            measured.ours.push(took);
            measured.peers.push(peer);
        }
    }
    let memory = async |bench: &mut Bench, from: Option<&Path>| {
        tokio::time::sleep(SETTLE_TIME).await;
        let (before, mut pods) = (memory::node_memory_in_use().all, Vec::new());
        for _ in 0..COPIES {
            pods.push(match from {
                Some(saved) => bench.restore(saved).await.0,
                None => bench.start().await.0,
            });
        }
        tokio::time::sleep(SETTLE_TIME).await;
        let each = (memory::node_memory_in_use().all - before) / COPIES as f64 / MIB;
        bench.remove(pods).await;
        each
    };
    let copies = memory(&mut bench, Some(&saved.path().join("0"))).await;
    let new = memory(&mut bench, None).await;
    bench.remove(vec![source]).await;
    measured.details = json!([
        {"checkpoint": "CheckpointPod until its answer", "ms": median(&checkpoints)},
        {"memory": "of the node for each of the pods, without page cache", "restored MiB": copies, "new MiB": new},
    ]);
    measured
}
