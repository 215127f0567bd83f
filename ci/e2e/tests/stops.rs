//! Stops containers several times, and while the pod process or the VM dies.

use nacelle_e2e::cri::container_config;
use nacelle_e2e::{CriClient, CriPod, TestImage, TestNode, eventually};
use nacelle_proto::cri;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// The grace period in seconds of a stop that is overtaken by a shorter one.
const LONG_GRACE_SECONDS: i64 = 600;
/// A stop that took less than this many seconds has not waited for [`LONG_GRACE_SECONDS`], however slow the node is.
const MAX_STOP_SECONDS: f64 = LONG_GRACE_SECONDS as f64 / 2.0;

/// Prints a line for each SIGTERM and does not exit.
const IGNORES_SIGTERM: &str = "trap 'echo term' TERM; echo ready; while true; do sleep 0.1; done";

/// A pod with one container.
#[derive(Clone)]
struct StubbornPod {
    pod: CriPod,
    container: String,
    log: PathBuf,
}

impl StubbornPod {
    async fn start(node: &TestNode, image: &str, name: &str) -> StubbornPod {
        let mut cri = CriClient::new(node.channel());
        let logs = node.directory().join("logs");
        let pod = CriPod::run(&mut cri, name, &logs).await.expect("the pod starts");
        let container = container_config("stubborn", image, &["sh", "-c", IGNORES_SIGTERM]);
        let container = pod.start_container(&mut cri, container).await.expect("the container starts");
        let running = StubbornPod { pod, container, log: logs.join(name).join("stubborn.log") };
        while !running.log().contains("ready") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        running
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns how often the container got its stop signal.
    fn stop_signals(&self) -> usize {
        self.log().matches(" term").count()
    }

    /// Begins a stop.
    fn stop(&self, node: &TestNode, timeout: i64) -> JoinHandle<Result<(), tonic::Status>> {
        let mut cri = CriClient::new(node.channel());
        let request = cri::StopContainerRequest { container_id: self.container.clone(), timeout };
        tokio::spawn(async move { cri.stop_container(request).await.map(drop) })
    }

    async fn remove(self, node: &TestNode) {
        let mut cri = CriClient::new(node.channel());
        self.pod.remove(&mut cri).await.expect("the pod is stopped and removed");
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// Returns the seconds since then.
fn seconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64()
}

#[test]
fn a_stop_signal_is_sent_once_and_the_shortest_grace_period_counts() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let runtime = runtime();
    runtime.block_on(async {
        let running = StubbornPod::start(&node, &image, "shorter").await;
        let start = Instant::now();
        let mut stops = Vec::new();
        for timeout in [3 * LONG_GRACE_SECONDS, 2 * LONG_GRACE_SECONDS, LONG_GRACE_SECONDS, 5, 6 * LONG_GRACE_SECONDS] {
            stops.push(running.stop(&node, timeout));
            pause(200).await;
        }
        for stop in stops {
            stop.await.expect("no panic").expect("it is stopped");
        }
        // The fourth stop began after 0.6 s with a grace period of 5 s.
        assert!((5.0..MAX_STOP_SECONDS).contains(&seconds(start)), "{} s", seconds(start));
        assert_eq!(running.stop_signals(), 1, "{}", running.log());
        running.stop(&node, 5).await.expect("no panic").expect("it has been stopped");
        running.remove(&node).await;

        let running = StubbornPod::start(&node, &image, "none").await;
        let stop = running.stop(&node, LONG_GRACE_SECONDS);
        while running.stop_signals() == 0 {
            pause(20).await;
        }
        let start = Instant::now();
        running.stop(&node, 0).await.expect("no panic").expect("it is killed");
        stop.await.expect("no panic").expect("it is stopped");
        assert!(seconds(start) < MAX_STOP_SECONDS, "{} s", seconds(start));
        assert_eq!(running.stop_signals(), 1, "{}", running.log());
        running.remove(&node).await;
    });
    // After a restart of the daemon the stop is repeated, as kubelet does.
    let running = runtime.block_on(async {
        let running = StubbornPod::start(&node, &image, "restart").await;
        let first = running.stop(&node, LONG_GRACE_SECONDS);
        while running.stop_signals() == 0 {
            pause(20).await;
        }
        first.abort();
        running
    });
    node.kill();
    node.start();
    runtime.block_on(async {
        let start = Instant::now();
        running.stop(&node, 3).await.expect("no panic").expect("it is stopped");
        assert!((2.0..MAX_STOP_SECONDS).contains(&seconds(start)), "{} s", seconds(start));
        assert_eq!(running.stop_signals(), 1, "{}", running.log());
        running.remove(&node).await;

        // The stop of the pod joins that of the container, and vice versa.
        let running = StubbornPod::start(&node, &image, "pod").await;
        let stop = running.stop(&node, 600);
        while running.stop_signals() == 0 {
            pause(20).await;
        }
        let pod = running.pod.id.clone();
        let mut cri = CriClient::new(node.channel());
        let stopping = tokio::spawn(async move {
            cri.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: pod }).await.map(drop)
        });
        pause(100).await;
        let again = running.stop(&node, 300);
        for one in [stop, stopping, again] {
            one.await.expect("no panic").expect("it is stopped");
        }
        assert_eq!(running.stop_signals(), 1, "{}", running.log());
        running.remove(&node).await;
    });
}

/// Requests while the pod is being stopped.
#[derive(Clone, Copy, Debug)]
enum StopRequest {
    StopContainer,
    RemoveContainer,
    StopPod,
    RemovePod,
}

async fn send_request(mut cri: CriClient, running: StubbornPod, request: StopRequest) -> Result<(), tonic::Status> {
    let StubbornPod { pod: CriPod { id: pod_sandbox_id, .. }, container: container_id, .. } = running;
    match request {
        StopRequest::StopContainer => {
            cri.stop_container(cri::StopContainerRequest { container_id, timeout: 60 }).await.map(drop)
        }
        StopRequest::RemoveContainer => {
            cri.remove_container(cri::RemoveContainerRequest { container_id }).await.map(drop)
        }
        StopRequest::StopPod => cri.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id }).await.map(drop),
        StopRequest::RemovePod => {
            cri.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await.map(drop)
        }
    }
}

#[test]
fn dead_pods_and_containers_are_stopped_and_removed_without_an_error() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    runtime().block_on(async {
        for process in [true, false] {
            for request in
                [StopRequest::StopContainer, StopRequest::RemoveContainer, StopRequest::StopPod, StopRequest::RemovePod]
            {
                // Milliseconds from the request to the kill, or from the kill to the request.
                for (before, after) in [(400, 0), (5, 0), (0, 0), (0, 20)] {
                    let name = format!("{request:?}-{process}-{before}-{after}").to_lowercase();
                    let running = StubbornPod::start(&node, &image, &name).await;
                    let victims = if process { node.pids_matching("nacelle-pod --dir ") } else { node.vm_pids() };
                    assert!(!victims.is_empty(), "{name}");
                    let die = || {
                        for pid in &victims {
                            // One process may have ended with another.
                            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
                        }
                    };
                    let cri = CriClient::new(node.channel());
                    if before == 0 {
                        die();
                        pause(after).await;
                    }
                    let requested = tokio::spawn(send_request(cri, running.clone(), request));
                    if before > 0 {
                        pause(before).await;
                        die();
                    }
                    let answer = tokio::time::timeout(Duration::from_secs(50), requested).await;
                    let answer = answer.unwrap_or_else(|_late| panic!("{name}: no answer")).expect("no panic");
                    answer.unwrap_or_else(|error| panic!("{name}: {:?}: {}", error.code(), error.message()));
                    // Each request once more, in kubelet's order.
                    for request in [
                        StopRequest::StopContainer,
                        StopRequest::RemoveContainer,
                        StopRequest::StopPod,
                        StopRequest::RemovePod,
                    ] {
                        let answer = send_request(CriClient::new(node.channel()), running.clone(), request).await;
                        answer.unwrap_or_else(|error| panic!("{name}: then {request:?}: {}", error.message()));
                    }
                }
            }
        }
    });
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}
