//! Tests an upgrade and a downgrade with two builds: pods of one build's daemon are taken over by the daemon of the other. The
//! path of the other build's `nacelle` is in `NACELLE_OTHER_BIN`, as `ci/full versions-host` sets it; without it nothing is tested.

use nacelle_e2e::{ContainerRequest, NodeOptions, PodRequest, TestImage, TestNode, eventually, path_from_env};
use serde_json::json;
use std::path::{Path, PathBuf};

#[test]
fn pods_of_the_other_build_are_taken_over() {
    let Some(other) = other_build() else { return };
    take_over(&other, &path_from_env("NACELLE_BIN"));
}

#[test]
fn the_other_build_takes_over_pods_of_this_one() {
    let Some(other) = other_build() else { return };
    take_over(&path_from_env("NACELLE_BIN"), &other);
}

fn other_build() -> Option<PathBuf> {
    let other = std::env::var_os("NACELLE_OTHER_BIN").map(PathBuf::from);
    if other.is_none() {
        println!("skipped: NACELLE_OTHER_BIN names no other build");
    }
    other
}

/// Starts pods with one build and uses them with the other.
fn take_over(first: &Path, second: &Path) {
    let mut node = TestNode::with_options(NodeOptions { program: Some(first.to_owned()), ..Default::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let count = "trap 'exit 9' TERM; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.2; done";
    let request = PodRequest::new("kept", node.directory());
    let (pod_id, counter, idle) = {
        let pod = node.crictl.run_pod(PodRequest(request.0.clone()));
        let counter = pod.start(ContainerRequest::sh("counter", &image, count));
        let idle = pod.create(ContainerRequest::sh("idle", &image, "echo started by the other; sleep 1000"));
        counter.wait_for_output("tick 2");
        (pod.id.clone(), counter.id.clone(), idle.id.clone())
    };
    let processes = node.vm_pids();

    node.replace_daemon(second);
    assert_eq!(node.vm_pids(), processes, "the pod runs on");
    assert_eq!(node.crictl.call(["pods", "-q", "--state", "Ready"]), pod_id);
    assert_eq!(node.crictl.call(["exec", "--sync", &counter, "echo", "still here"]), "still here");
    let pod = node.crictl.pod_handle(&pod_id, request);
    let output = pod.start(ContainerRequest::sh("late", &image, "echo created by the other; sleep 1000"));
    output.wait_for_output("created by the other");
    node.crictl.call(["start", &idle]);
    eventually("the log goes on", || {
        let ticks = node.crictl.call(["logs", "--tail", "1", &counter]);
        ticks.strip_prefix("tick ")?.parse::<u32>().ok().filter(|tick| *tick > 10).map(drop)
    });
    assert!(node.crictl.call(["logs", &idle]).contains("started by the other"));
    node.crictl.call(["stop", "--timeout", "10", &counter]);
    let status = node.crictl.call_json(["inspect", &counter]);
    assert_eq!((&status["status"]["state"], &status["status"]["exitCode"]), (&json!("CONTAINER_EXITED"), &json!(9)));
    node.crictl.call(["stopp", &pod_id]);
    node.crictl.call(["rmp", &pod_id]);
}
