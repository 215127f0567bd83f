//! Tests kubelet's eviction of a pod when the memory that the node has for pods runs out.
//!
//! kubelet evicts when the control group of all pods has less memory available than `evictionHard` says. That group's limit is the
//! node's capacity without what is reserved, so a large reservation makes a node on which one VM causes the pressure.

use super::CaseResult;
use super::cluster::cluster;
use super::pod_features::waiting;
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, container_status, has_condition, wait_for};
use serde_json::{Value, json};

/// The memory limit in MiB of the control group of all pods. Both pods fit into it without pressure, also with QEMU's own memory.
const LIMIT_MIB: u64 = 1280;
/// kubelet evicts a pod while less than this is available, in MiB. What is left for requests has place for one overhead more than
/// the pods have: when kubelet 1.37.2 admits a pod, it counts the overhead of each running pod twice, because
/// `status.allocatedResources` contains it already.
const THRESHOLD_MIB: u64 = 320;

/// A RuntimeClass with an overhead: without one, a VM may run beside the control group of its pod, where kubelet does not see it.
const CLASS: &str = "apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: counted}
handler: nacelle
overhead:
  podFixed: {memory: 256Mi}
";

/// A pod's lines for that RuntimeClass.
const OF_CLASS: &str = "  runtimeClassName: counted\n";

/// The command of a container that waits for a number of MiB in a file, and then holds that much memory.
const HOLD: &str = "until [ -e /amount ]; do sleep 0.2; done; read amount </amount; \
    { dd if=/dev/zero bs=1M count=$amount; sleep 1000000; } | tail >/dev/null";

pub fn eviction_under_memory_pressure(fixture: &mut KubeletFixture) -> CaseResult {
    if !nacelle_e2e::node::supports_limits() {
        return CaseResult::Skipped("without machines kubelet has no memory figures of pods on a node with cgroup v1");
    }
    let node = cluster(fixture).node_object().expect("the node has joined");
    let capacity = node["status"]["capacity"]["memory"].as_str().and_then(|text| text.strip_suffix("Ki"));
    let capacity = capacity.and_then(|kib| kib.parse::<u64>().ok());
    let reserved = capacity.and_then(|kib| kib.checked_sub(LIMIT_MIB << 10)).expect("the node has enough memory");
    fixture.kubelet.restart_with(&[
        ("systemReserved", json!({"memory": format!("{reserved}Ki")})),
        (
            "evictionHard",
            json!({
                "memory.available": format!("{THRESHOLD_MIB}Mi"), "nodefs.available": "1%", "imagefs.available": "1%",
            }),
        ),
        ("evictionPressureTransitionPeriod", json!("30s")),
    ]);
    check_eviction(fixture, &node["status"]["allocatable"]["memory"]);
    fixture.kubelet.restart_with(&[]);
    CaseResult::Passed
}

/// Checks that the pod that exceeds its request is evicted, and the other one is not. `allocatable` is the node's allocatable memory
/// before kubelet was restarted.
fn check_eviction(fixture: &KubeletFixture, allocatable: &Value) {
    let cluster = cluster(fixture);
    wait_for("kubelet has announced less allocatable memory", || {
        (cluster.node_object()?["status"]["allocatable"]["memory"] != *allocatable).then_some(())
    });
    cluster.apply(CLASS);
    let modest = waiting("modest", OF_CLASS, "    resources: {limits: {memory: 64Mi}}\n");
    let modest = cluster.create_pod("modest", &modest);
    let hungry = waiting("hungry", OF_CLASS, "    resources: {requests: {memory: 32Mi}, limits: {memory: 1152Mi}}\n")
        .replace("trap 'exit 0' TERM; sleep 1000000 & wait", HOLD);
    let hungry = cluster.create_pod("hungry", &hungry);
    let (before, started) = (modest.wait_until_ready(), hungry.wait_until_ready());
    let uid = started["metadata"]["uid"].as_str().expect("a pod has a UID").to_owned();
    let id = fixture.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", "hungry"]);
    // The name of the pod's run directory, which the command lines of its processes contain.
    let processes = || fixture.node.pids_matching(&id.chars().take(13).collect::<String>());
    assert!(!processes().is_empty() && !fixture.kubelet.pod_cgroups(&uid).is_empty(), "{id}, {uid}");

    // Half of the threshold stays available: below it, and far from the limit, at which the OOM killer would act.
    let available = measure_available_mib(fixture);
    let amount = available.checked_sub(THRESHOLD_MIB / 2).filter(|_| available > THRESHOLD_MIB);
    let amount = amount.unwrap_or_else(|| panic!("there is pressure already: {available} MiB are available"));
    let pressure = || cluster.node_object().map(|node| has_condition(&node, "MemoryPressure"));
    assert_eq!(pressure(), Some(false));
    hungry.shell(&format!("echo {amount} >/draft && mv /draft /amount"));
    wait_for("the node is under memory pressure", || pressure()?.then_some(()));

    let evicted = hungry.wait_for_phase("Failed");
    assert_eq!(evicted["status"]["reason"], "Evicted", "{}", evicted["status"]);
    let message = evicted["status"]["message"].as_str().unwrap_or_default();
    let expected = ["low on resource: memory", "Container main was using", "request is 32Mi"];
    assert!(expected.iter().all(|words| message.contains(words)), "{message}");
    wait_for("its VM and its control group are gone", || {
        let ready = fixture.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", "hungry"]);
        (ready.is_empty() && processes().is_empty() && fixture.kubelet.pod_cgroups(&uid).is_empty()).then_some(())
    });
    wait_for("the node is no longer under memory pressure", || (!pressure()?).then_some(()));
    let after = modest.wait_until_ready();
    for field in ["containerID", "restartCount"] {
        assert_eq!(container_status(&after, "main")[field], container_status(&before, "main")[field]);
    }
    assert_eq!(modest.shell("echo still here"), "still here");
    modest.delete();
    hungry.delete();
}

/// Returns the memory in MiB that kubelet finds available in the control group of all pods, measured after this call began.
fn measure_available_mib(fixture: &KubeletFixture) -> u64 {
    let measured = || -> Option<Value> {
        let summary = fixture.kubelet.get_json("/stats/summary");
        let groups = summary["node"]["systemContainers"].as_array()?;
        Some(groups.iter().find(|group| group["name"] == "pods")?["memory"].clone())
    };
    let before = wait_for("kubelet measures the control group of pods", measured);
    wait_for("kubelet measures it again", || {
        let memory = measured().filter(|memory| memory["time"] != before["time"])?;
        memory["availableBytes"].as_u64().map(|bytes| bytes >> 20)
    })
}
