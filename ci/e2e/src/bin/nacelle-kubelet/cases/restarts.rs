//! Tests cases in which kubelet or Nacelle is killed.

use super::Outcome;
use super::runs::waiting;
use crate::pods::{ObservedPod, StaticPod, container, wait};
use crate::world::World;

/// Checks that a running pod is unchanged after `kill`, and that new pods can start.
fn survive(world: &mut World, name: &str, kill: impl FnOnce(&mut World)) -> Outcome {
    let manifest = waiting(name, "", "    readinessProbe: {exec: {command: [\"true\"]}, periodSeconds: 1}\n");
    let pod = StaticPod::new(world, name, &manifest);
    let before = pod.ready();
    pod.stays();
    kill(world);
    // The same manifest again: returns a handle of the existing pod.
    let pod = StaticPod::new(world, name, &manifest);
    let later = StaticPod::new(world, "later", &waiting("later", "", ""));
    later.ready();
    let after = pod.ready();
    for field in ["containerID", "restartCount"] {
        assert_eq!(container(&after, "main")[field], container(&before, "main")[field]);
    }
    assert_eq!(after["status"]["podIP"], before["status"]["podIP"]);
    assert_eq!(pod.run("main", &["echo", "still here"]), "still here");
    later.remove();
    pod.remove();
    Outcome::Passed
}

pub fn kubelet_killed(world: &mut World) -> Outcome {
    survive(world, "outlives-kubelet", |world| {
        world.kubelet.kill();
        world.kubelet.again();
    })
}

pub fn nacelle_killed(world: &mut World) -> Outcome {
    survive(world, "outlives-nacelle", |world| {
        world.node.kill();
        world.node.start();
    })
}

pub fn both_killed(world: &mut World) -> Outcome {
    survive(world, "outlives-both", |world| {
        world.node.kill();
        world.kubelet.kill();
        world.node.start();
        world.kubelet.again();
    })
}

pub fn a_pod_removed_while_all_are_dead(world: &mut World) -> Outcome {
    let manifest = waiting("forgotten", "", "");
    let pod = StaticPod::new(world, "forgotten", &manifest);
    pod.ready();
    let name = pod.full_name();
    pod.withdraw();
    pod.stays();
    world.kubelet.kill();
    world.node.kill();
    world.node.start();
    world.kubelet.again();
    wait("kubelet has taken down what has no manifest", || {
        world.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", &name]).is_empty().then_some(())
    });
    Outcome::Passed
}
