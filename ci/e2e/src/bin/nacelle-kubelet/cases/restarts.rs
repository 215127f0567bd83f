//! Tests cases in which kubelet or Nacelle is killed.

use super::CaseResult;
use super::pod_features::waiting;
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, StaticPod, container_status, wait_for};

/// Checks that a running pod is unchanged after `kill`, and that new pods can start.
fn survive(fixture: &mut KubeletFixture, name: &str, kill: impl FnOnce(&mut KubeletFixture)) -> CaseResult {
    let manifest = waiting(name, "", "    readinessProbe: {exec: {command: [\"true\"]}, periodSeconds: 1}\n");
    let pod = StaticPod::new(fixture, name, &manifest);
    let before = pod.wait_until_ready();
    pod.keep_manifest();
    kill(fixture);
    // The same manifest again: returns a handle of the existing pod.
    let pod = StaticPod::new(fixture, name, &manifest);
    let later = StaticPod::new(fixture, "later", &waiting("later", "", ""));
    later.wait_until_ready();
    let after = pod.wait_until_ready();
    for field in ["containerID", "restartCount"] {
        assert_eq!(container_status(&after, "main")[field], container_status(&before, "main")[field]);
    }
    assert_eq!(after["status"]["podIP"], before["status"]["podIP"]);
    assert_eq!(pod.run("main", &["echo", "still here"]), "still here");
    later.remove();
    pod.remove();
    CaseResult::Passed
}

pub fn kubelet_killed(fixture: &mut KubeletFixture) -> CaseResult {
    survive(fixture, "outlives-kubelet", |fixture| {
        fixture.kubelet.kill();
        fixture.kubelet.start_process();
    })
}

pub fn nacelle_killed(fixture: &mut KubeletFixture) -> CaseResult {
    survive(fixture, "outlives-nacelle", |fixture| {
        fixture.node.kill();
        fixture.node.start();
    })
}

pub fn both_killed(fixture: &mut KubeletFixture) -> CaseResult {
    survive(fixture, "outlives-both", |fixture| {
        fixture.node.kill();
        fixture.kubelet.kill();
        fixture.node.start();
        fixture.kubelet.start_process();
    })
}

pub fn a_pod_removed_while_both_daemons_are_dead(fixture: &mut KubeletFixture) -> CaseResult {
    let manifest = waiting("forgotten", "", "");
    let pod = StaticPod::new(fixture, "forgotten", &manifest);
    pod.wait_until_ready();
    let name = pod.full_name();
    pod.remove_manifest();
    pod.keep_manifest();
    fixture.kubelet.kill();
    fixture.node.kill();
    fixture.node.start();
    fixture.kubelet.start_process();
    wait_for("kubelet has taken down what has no manifest", || {
        fixture.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", &name]).is_empty().then_some(())
    });
    CaseResult::Passed
}
