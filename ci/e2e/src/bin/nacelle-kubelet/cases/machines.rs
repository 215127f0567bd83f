//! Tests machine pods under kubelet: kubectl on a machine pod, and a replica set of machine pods.

use super::Outcome;
use crate::cluster::{ApiPod, Cluster};
use crate::pods::{ObservedPod, condition, example, wait};
use crate::world::World;
use nacelle_e2e::Image;
use nacelle_e2e::machine::boot_disk;
use nacelle_e2e::run::feed;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::{Child, Stdio};

/// The image of the examples, and the memory of their VMs, with replacements: the disk here is smaller and needs less.
const SAID: [(&str, &str); 2] = [("registry.example/debian-disk:12", "boot:1"), ("memory: 1Gi", "memory: 64Mi")];

/// Returns the documents of an example of machine pods: the pods, and all others.
fn documents(world: &World, name: &str) -> Vec<String> {
    let image = Image::busybox().layer(|layer| layer.file("disk/boot.img", &boot_disk(), 0o440));
    world.node.registry.push(&image, "library/boot:1");
    let text = SAID.iter().fold(example(name), |text, (from, to)| text.replace(from, to));
    text.split("\n---\n").map(str::to_owned).collect()
}

fn cluster(world: &World) -> &Cluster {
    world.cluster.as_ref().expect("the node has joined")
}

/// Returns the output of kubectl for a verb of a pod's VM.
fn vm(cluster: &Cluster, pod: &str, verb: &str) -> String {
    cluster.kubectl(&["exec", pod, "--", "@vm", verb]).ok()
}

fn phase(cluster: &Cluster, pod: &str) -> String {
    let told: Value = serde_json::from_str(&vm(cluster, pod, "status")).expect("it is JSON");
    told["phase"].as_str().unwrap_or_default().to_owned()
}

/// A kubelet that has just joined may not serve logs yet.
fn says(cluster: &Cluster, pod: &str, text: &str) {
    wait(&format!("{pod} says {text:?}"), || {
        cluster.kubectl(&["logs", pod]).stdout.contains(text.trim_end()).then_some(())
    });
}

fn not_ready(pod: &ApiPod) {
    pod.until("it is not Ready", |pod| (!condition(pod, "Ready")).then_some(()));
}

fn told_to(cluster: &Cluster, power: &str) {
    let word = format!("vm.nacelle.dev/power={power}");
    cluster.kubectl(&["annotate", "--overwrite", "pod", "machine", &word]).ok();
}

pub fn a_machine(world: &World) -> Outcome {
    if nacelle_e2e::node::engine() == "host" {
        return Outcome::Skipped("a pod without a machine is none");
    }
    let cluster = cluster(world);
    let [class, manifest] = &documents(world, "machine")[..] else { panic!("a class and a pod") };
    cluster.apply(class);
    let pod = cluster.pod("machine", manifest);
    let object = pod.ready();
    says(cluster, "machine", "boot 1\n");
    assert_eq!(object["status"]["containerStatuses"][0]["started"], true, "{object}");
    // The VM's console is the container's.
    let mut attach = cluster.command(&["attach", "-i", "machine"]);
    let mut attached: Child =
        attach.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("kubectl");
    let typed = std::io::Write::write_all(attached.stdin.as_mut().expect("it is a pipe"), b"typed\n");
    typed.expect("kubectl reads");
    says(cluster, "machine", "typed");
    attached.kill().expect("kubectl is our child");
    attached.wait().expect("kubectl is our child");
    // A paused VM is not Ready.
    vm(cluster, "machine", "pause");
    not_ready(&pod);
    assert_eq!(phase(cluster, "machine"), "Paused");
    vm(cluster, "machine", "unpause");
    pod.ready();
    let refused = cluster.kubectl(&["exec", "machine", "--", "true"]).err();
    assert!(refused.contains("guest agent"), "{refused}");
    // The screen, by a port that the guest does not have.
    let mut forward = cluster.command(&["port-forward", "pod/machine", "15900:5900"]);
    let mut forward = forward.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("kubectl can be started");
    wait("the screen answers", || {
        let script = "exec 3<>/dev/tcp/127.0.0.1/15900 && head -c 4 <&3";
        (world.node.run("timeout", &["20", "bash", "-c", script]).stdout == "RFB").then_some(())
    });
    forward.kill().expect("kubectl is our child");
    forward.wait().expect("kubectl is our child");
    // By the pod's annotation, which kubelet writes into the volume.
    told_to(cluster, "off");
    wait("it is off", || (phase(cluster, "machine") == "Stopped").then_some(()));
    not_ready(&pod);
    says(cluster, "machine", "pressed");
    told_to(cluster, "on");
    pod.ready();
    says(cluster, "machine", "boot 2\n");
    let restarts = pod.object().expect("it is there")["status"]["containerStatuses"][0]["restartCount"].clone();
    assert_eq!(restarts, 0);
    let summary = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/stats/summary"]).ok();
    let summary: Value = serde_json::from_str(&summary).expect("it is JSON");
    let pods = summary["pods"].as_array().expect("there are some");
    let ours = pods.iter().find(|pod| pod["podRef"]["name"] == "machine").expect("it is one");
    let memory = ours["containers"][0]["memory"]["workingSetBytes"].as_u64();
    assert!(memory.is_some_and(|bytes| (1 << 20..=64 << 20).contains(&bytes)), "{ours}");
    // A pod of the same name runs the persistent VM of the last one.
    pod.delete();
    let pod = cluster.pod("machine", manifest);
    pod.ready();
    says(cluster, "machine", "boot 3\n");
    pod.delete();
    Outcome::Passed
}

/// Returns the names of the live pods of the set.
fn members(cluster: &Cluster) -> BTreeSet<String> {
    let pods = cluster.object("/api/v1/namespaces/default/pods?labelSelector=app%3Dmachines").unwrap_or_default();
    let living =
        pods["items"].as_array().into_iter().flatten().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    living.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect()
}

pub fn a_set_of_machines(world: &World) -> Outcome {
    if nacelle_e2e::node::engine() == "host" {
        return Outcome::Skipped("a pod without a machine is none");
    }
    let cluster = cluster(world);
    cluster.apply(&documents(world, "machine")[0]);
    cluster.apply(&documents(world, "replica-set")[0]);
    // Binds the pods in place of a scheduler.
    let ready = |wanted: u64| {
        wait(&format!("{wanted} machines are Ready"), || {
            for name in members(cluster) {
                cluster.bind(&name);
            }
            let set = cluster.object("/apis/apps/v1/namespaces/default/replicasets/machines")?;
            let found = members(cluster);
            let status = &set["status"];
            (status["readyReplicas"] == wanted && status["replicas"] == wanted && found.len() as u64 == wanted)
                .then_some(found)
        })
    };
    let three = ready(3);
    for name in &three {
        says(cluster, name, "boot 1\n");
    }
    // A deleted member is replaced by another one, which starts anew.
    let gone = three.first().expect("there are three");
    cluster.kubectl(&["delete", "pod", gone, "--timeout=240s"]).ok();
    let after = ready(3);
    assert!(!after.contains(gone) && after.intersection(&three).count() == 2, "{three:?} {after:?}");
    for name in &after {
        says(cluster, name, "boot 1\n");
    }
    // A VM that powers itself off has ended, and its container is restarted: the pod stays.
    let member = after.first().expect("there are three");
    feed(&mut cluster.command(&["attach", "-i", member]), b"q");
    wait("its container has been started again", || {
        let pod = cluster.object(&format!("/api/v1/namespaces/default/pods/{member}"))?;
        (pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)).then_some(())
    });
    assert_eq!(ready(3), after);
    cluster.kubectl(&["scale", "replicaset", "machines", "--replicas=1"]).ok();
    assert!(ready(1).is_subset(&after));
    cluster.kubectl(&["scale", "replicaset", "machines", "--replicas=0"]).ok();
    wait("all are gone", || members(cluster).is_empty().then_some(()));
    cluster.kubectl(&["delete", "replicaset", "machines"]).ok();
    Outcome::Passed
}
