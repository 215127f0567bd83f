//! Tests what happens to VMs when the memory of the node's pods runs out: which of them the kernel ends first, what is reported, and
//! that the others run on.

use nacelle_e2e::census::cgroup_parent;
use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::failure_answer::check_end;
use nacelle_e2e::node::engine;
use nacelle_e2e::run::eventually;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The memory that the first VM uses beyond what all VMs use, in MiB.
const USED_MIB: u32 = 40;
/// By how much the limit falls below what is in use, in bytes.
const STEP: u64 = 4 << 20;

/// The memory limit of the cgroup that all pods of a test are in, which stands for that of kubelet's pods.
struct Limit(PathBuf);

impl Limit {
    /// Finds the cgroup. `None` where the node does not limit memory by cgroup v2.
    fn find(node: &TestNode) -> Option<Limit> {
        let parent = cgroup_parent(node.directory());
        let directory = Path::new("/sys/fs/cgroup").join(parent.trim_start_matches('/'));
        directory.join("memory.max").exists().then_some(Limit(directory))
    }

    fn used(&self) -> u64 {
        let text = fs::read_to_string(self.0.join("memory.current")).expect("the cgroup has pods");
        text.trim().parse().expect("a number of bytes")
    }

    /// Lowers the limit below what is in use until the OOM killer has ended a process, and lifts it.
    ///
    /// The write lasts until enough memory is free, and while it lasts the kernel may choose another process: it does not see the one
    /// that it has ended between the end of its last thread and that of its memory. So another process writes and is killed at once.
    fn exceed(&self) {
        let before = self.kills();
        eventually("the OOM killer ends a process", || {
            let limit = self.used().saturating_sub(STEP).to_string();
            let script = r#"echo "$0" >"$1""#;
            let mut writer = Command::new("sh")
                .args(["-c", script, &limit])
                .arg(self.0.join("memory.max"))
                .spawn()
                .expect("a shell");
            while self.kills() == before && writer.try_wait().expect("a child").is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            writer.kill().and_then(|()| writer.wait()).expect("the child ends");
            (self.kills() > before).then_some(())
        });
        fs::write(self.0.join("memory.max"), "max").expect("the test may limit its own cgroup");
    }

    /// Returns how many processes of the cgroup and those below it the OOM killer has ended.
    fn kills(&self) -> u64 {
        let events = fs::read_to_string(self.0.join("memory.events")).expect("the cgroup has pods");
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.parse().ok()).expect("the number of kills")
    }

    /// Makes the OOM killer end a process, and returns which of these containers end.
    fn end_one(&self, containers: &[(&str, &RunningContainer)]) -> Vec<String> {
        self.exceed();
        eventually("the end of a container is reported", || {
            let ended = containers.iter().filter(|(_, container)| container.status()["state"] != "CONTAINER_RUNNING");
            let names: Vec<_> = ended.map(|(name, _)| (*name).to_owned()).collect();
            (!names.is_empty()).then_some(names)
        })
    }
}

/// Runs a pod whose container has the OOM score adjustment that kubelet gives to a QoS class.
fn run_pod<'a>(node: &'a TestNode, image: &str, name: &str, score: i64) -> (RunningPod<'a>, RunningContainer<'a>) {
    let mut request = PodRequest::new(name, node.directory());
    // Without an overhead, a VM does not share a cgroup that is too small for it.
    request.0["linux"]["overhead"] = json!({"memory_limit_in_bytes": 256 << 20});
    let pod = node.crictl.run_pod(request);
    let resources: Value = json!({"resources": {"oom_score_adj": score}});
    let container = pod.start(ContainerRequest::sh("c", image, "sleep 6000").set("linux", resources));
    (pod, container)
}

#[test]
fn the_oom_killer_ends_vms_in_the_order_of_their_qos_classes() {
    if engine() == "host" {
        println!("skipped: without a guest the containers' own processes are killed");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (guaranteed, first) = run_pod(&node, &image, "guaranteed", -997);
    let Some(limit) = Limit::find(&node) else {
        println!("skipped: this node does not limit memory by cgroup v2");
        guaranteed.remove();
        return;
    };
    let (burstable, second) = run_pod(&node, &image, "burstable", 500);
    let (best_effort, third) = run_pod(&node, &image, "best-effort", 1000);
    // The VM that is worth most is the one that uses most.
    first.exec(&format!("dd if=/dev/urandom of=/dev/shm/blob bs=1M count={USED_MIB}")).ok();

    let all = [("guaranteed", &first), ("burstable", &second), ("best-effort", &third)];
    assert_eq!(limit.end_one(&all), ["best-effort"]);
    check_end(&node, "pod's cgroup or node out of memory", &best_effort.id, &third.status());
    assert_eq!(best_effort.inspect()["status"]["state"], "SANDBOX_NOTREADY");
    assert_eq!(limit.end_one(&all[..2]), ["burstable"]);
    assert_eq!(first.exec("wc -c </dev/shm/blob").ok(), (u64::from(USED_MIB) << 20).to_string());

    // With the memory that it left, another pod starts.
    best_effort.remove();
    burstable.remove();
    let (again, container) = run_pod(&node, &image, "again", 1000);
    assert_eq!(container.exec("echo runs").ok(), "runs");
    again.remove();
    guaranteed.remove();
}
