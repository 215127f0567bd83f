//! Tests machine pods under kubelet: kubectl on a machine pod, and a replica set of machine pods.

use super::CaseResult;
use crate::cluster::{ApiPod, TestCluster};
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, example, has_condition, wait_for};
use nacelle_e2e::TestImage;
use nacelle_e2e::machine::boot_disk;
use nacelle_e2e::run::run_with_input;
use serde_json::Value;
use std::process::{Child, Stdio};

/// The image of the examples, and the memory of their VMs, with replacements: the disk here is smaller and needs less.
const REPLACEMENTS: [(&str, &str); 2] =
    [("registry.example/debian-disk:12", "boot:1"), ("memory: 1Gi", "memory: 64Mi")];

/// Returns the documents of an example of machine pods: the pods, and all others.
fn documents(fixture: &KubeletFixture, name: &str) -> Vec<String> {
    let image = TestImage::busybox().with_layer(|layer| layer.add_file("disk/boot.img", &boot_disk(), 0o440));
    fixture.node.registry.push(&image, "library/boot:1");
    let text = REPLACEMENTS.iter().fold(example(name), |text, (from, to)| text.replace(from, to));
    text.split("\n---\n").map(str::to_owned).collect()
}

fn joined_cluster(fixture: &KubeletFixture) -> &TestCluster {
    fixture.cluster.as_ref().expect("the node has joined")
}

/// Returns the output of kubectl for a verb of a pod's VM.
fn run_vm_verb(cluster: &TestCluster, pod: &str, verb: &str) -> String {
    cluster.kubectl(&["exec", pod, "--", "@vm", verb]).ok()
}

fn vm_phase(cluster: &TestCluster, pod: &str) -> String {
    let status: Value = serde_json::from_str(&run_vm_verb(cluster, pod, "status")).expect("it is JSON");
    status["phase"].as_str().unwrap_or_default().to_owned()
}

/// A kubelet that has just joined may not serve logs yet.
fn wait_for_log(cluster: &TestCluster, pod: &str, text: &str) {
    wait_for(&format!("{pod} says {text:?}"), || {
        cluster.kubectl(&["logs", pod]).stdout.contains(text.trim_end()).then_some(())
    });
}

fn wait_until_not_ready(pod: &ApiPod) {
    pod.wait_until("it is not Ready", |pod| (!has_condition(pod, "Ready")).then_some(()));
}

fn set_power(cluster: &TestCluster, power: &str) {
    let word = format!("vm.nacelle.dev/power={power}");
    cluster.kubectl(&["annotate", "--overwrite", "pod", "machine", &word]).ok();
}

/// Checks that kubelet reports memory of the VM, and at most its size.
fn check_memory_statistics(cluster: &TestCluster) {
    let summary = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/stats/summary"]).ok();
    let summary: Value = serde_json::from_str(&summary).expect("it is JSON");
    let pods = summary["pods"].as_array().expect("there are some");
    let ours = pods.iter().find(|pod| pod["podRef"]["name"] == "machine").expect("it is one");
    let memory = ours["containers"][0]["memory"]["workingSetBytes"].as_u64();
    assert!(memory.is_some_and(|bytes| (1 << 20..=64 << 20).contains(&bytes)), "{ours}");
}

pub fn machine_pod(fixture: &KubeletFixture) -> CaseResult {
    if nacelle_e2e::node::engine() == "host" {
        return CaseResult::Skipped("a pod without a machine is none");
    }
    let cluster = joined_cluster(fixture);
    let [class, manifest] = &documents(fixture, "machine")[..] else { panic!("a class and a pod") };
    cluster.apply(class);
    let pod = cluster.create_pod("machine", manifest);
    let object = pod.wait_until_ready();
    wait_for_log(cluster, "machine", "boot 1\n");
    assert_eq!(object["status"]["containerStatuses"][0]["started"], true, "{object}");
    // The VM's console is the container's.
    let mut attach = cluster.command(&["attach", "-i", "machine"]);
    let mut attached: Child =
        attach.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("kubectl");
    let typed = std::io::Write::write_all(attached.stdin.as_mut().expect("it is a pipe"), b"typed\n");
    typed.expect("kubectl reads");
    wait_for_log(cluster, "machine", "typed");
    attached.kill().expect("kubectl is our child");
    attached.wait().expect("kubectl is our child");
    // A paused VM is not Ready.
    run_vm_verb(cluster, "machine", "pause");
    wait_until_not_ready(&pod);
    assert_eq!(vm_phase(cluster, "machine"), "Paused");
    run_vm_verb(cluster, "machine", "unpause");
    pod.wait_until_ready();
    let refused = cluster.kubectl(&["exec", "machine", "--", "true"]).err();
    assert!(refused.contains("guest agent"), "{refused}");
    // The screen, by a port that the guest does not have.
    let mut forward = cluster.command(&["port-forward", "pod/machine", "15900:5900"]);
    let mut forward = forward.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("kubectl can be started");
    wait_for("the screen answers", || {
        let script = "exec 3<>/dev/tcp/127.0.0.1/15900 && head -c 4 <&3";
        (fixture.node.run_in_netns("timeout", &["20", "bash", "-c", script]).stdout == "RFB").then_some(())
    });
    forward.kill().expect("kubectl is our child");
    forward.wait().expect("kubectl is our child");
    // By the pod's annotation, which kubelet writes into the volume.
    set_power(cluster, "off");
    wait_for("it is stopped", || (vm_phase(cluster, "machine") == "Stopped").then_some(()));
    wait_until_not_ready(&pod);
    wait_for_log(cluster, "machine", "pressed");
    set_power(cluster, "on");
    pod.wait_until_ready();
    wait_for_log(cluster, "machine", "boot 2\n");
    let restarts = pod.object().expect("it is there")["status"]["containerStatuses"][0]["restartCount"].clone();
    assert_eq!(restarts, 0);
    check_memory_statistics(cluster);
    // A pod of the same name runs the persistent VM of the last one.
    pod.delete();
    let pod = cluster.create_pod("machine", manifest);
    pod.wait_until_ready();
    wait_for_log(cluster, "machine", "boot 3\n");
    pod.delete();
    CaseResult::Passed
}

pub fn replica_set_of_machine_pods(fixture: &KubeletFixture) -> CaseResult {
    if nacelle_e2e::node::engine() == "host" {
        return CaseResult::Skipped("a pod without a machine is none");
    }
    let cluster = joined_cluster(fixture);
    cluster.apply(&documents(fixture, "machine")[0]);
    cluster.apply(&documents(fixture, "replica-set")[0]);
    let ready = |wanted| cluster.wait_for_members("machines", wanted);
    let three = ready(3);
    for name in &three {
        wait_for_log(cluster, name, "boot 1\n");
    }
    // A deleted member is replaced by another one, which starts anew.
    let gone = three.first().expect("there are three");
    cluster.kubectl(&["delete", "pod", gone, "--timeout=240s"]).ok();
    let after = ready(3);
    assert!(!after.contains(gone) && after.intersection(&three).count() == 2, "{three:?} {after:?}");
    for name in &after {
        wait_for_log(cluster, name, "boot 1\n");
    }
    // A VM that powers itself off has ended, and its container is restarted: the pod stays.
    let member = after.first().expect("there are three");
    run_with_input(&mut cluster.command(&["attach", "-i", member]), b"q");
    wait_for("its container has been started again", || {
        let pod = cluster.object(&format!("/api/v1/namespaces/default/pods/{member}"))?;
        (pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)).then_some(())
    });
    assert_eq!(ready(3), after);
    cluster.kubectl(&["scale", "replicaset", "machines", "--replicas=1"]).ok();
    assert!(ready(1).is_subset(&after));
    cluster.delete_set("machines");
    CaseResult::Passed
}
