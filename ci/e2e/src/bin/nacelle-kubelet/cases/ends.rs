//! Tests containers and pods that end: jobs, crashes, limits, hooks, deadlines.

use super::Outcome;
use super::runs::{waiting, with_directory};
use crate::pods::{ObservedPod, StaticPod, container};
use crate::world::World;
use std::fs;

pub fn a_job_that_is_tried_again(world: &World) -> Outcome {
    let pod = StaticPod::example(world, "job");
    let status = pod.phase("Succeeded");
    let job = container(&status, "job");
    assert_eq!(job["restartCount"], 1);
    assert_eq!(job["state"]["terminated"]["reason"], "Completed");
    assert_eq!(job["lastState"]["terminated"]["exitCode"], 3);
    assert_eq!(pod.log("job"), "the result is 42");
    // kubelet stopped the sidecar after the job was done.
    assert_eq!(container(&status, "helper")["state"]["terminated"]["exitCode"], 0);
    pod.remove();
    Outcome::Passed
}

pub fn memory_hog(world: &World) -> Outcome {
    if !nacelle_e2e::node::limits() {
        return Outcome::Skipped("limits of engine host need cgroup v2 with the memory controller");
    }
    let pod = StaticPod::example(world, "memory-hog");
    let status = pod.until("the hog was killed", |pod| {
        container(pod, "hog")["state"]["terminated"].is_object().then(|| pod.clone())
    });
    let hog = &container(&status, "hog")["state"]["terminated"];
    assert_eq!((&hog["reason"], &hog["exitCode"]), (&"OOMKilled".into(), &137.into()));
    assert!(container(&status, "neighbour")["state"]["running"].is_object());
    assert_eq!(pod.run("neighbour", &["echo", "still here"]), "still here");
    pod.remove();
    Outcome::Passed
}

pub fn crash_loop(world: &World) -> Outcome {
    let pod = StaticPod::example(world, "crash-loop");
    let status = pod.until("kubelet waits longer", |pod| {
        let main = container(pod, "main");
        let loops = main["state"]["waiting"]["reason"] == "CrashLoopBackOff";
        (loops && main["restartCount"].as_u64() >= Some(3)).then(|| pod.clone())
    });
    let last = &container(&status, "main")["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["reason"]), (&5.into(), &"Error".into()));
    assert_eq!(last["message"], "no database at nowhere\n");
    // kubelet keeps one dead container, not all.
    let name = pod.full_name();
    let dead = world.node.crictl.call([
        "ps",
        "-aq",
        "--state",
        "Exited",
        "--label",
        &format!("io.kubernetes.pod.name={name}"),
    ]);
    assert!(dead.lines().count() <= 2, "{dead}");
    pod.remove();
    Outcome::Passed
}

pub fn hooks_and_last_words(world: &World) -> Outcome {
    let directory = world.directory("story");
    let pod = StaticPod::new(world, "hooks", &with_directory("hooks", "/srv/story", &directory));
    let status = pod.ready();
    let lines = || fs::read_to_string(directory.join("lines")).unwrap_or_default();
    assert_eq!(lines(), "postStart\n");
    // The termination message of a container that ends by itself.
    pod.try_run("main", &["kill", "1"]);
    let again = pod.until("it came again", |pod| {
        let main = container(pod, "main");
        (main["restartCount"] == 1 && main["state"]["running"].is_object()).then(|| pod.clone())
    });
    let last = &container(&again, "main")["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["message"]), (&7.into(), &"told to go\n".into()));
    assert_ne!(container(&again, "main")["containerID"], container(&status, "main")["containerID"]);
    pod.until("its second start is told", |_| (lines() == "postStart\nTERM\npostStart\n").then_some(()));
    // The order of the shutdown by kubelet.
    pod.remove();
    assert_eq!(lines(), "postStart\nTERM\npostStart\npreStop\nlater\nTERM\n");
    Outcome::Passed
}

pub fn a_deadline(world: &World) -> Outcome {
    let pod = StaticPod::new(world, "deadline", &waiting("deadline", "  activeDeadlineSeconds: 8\n", ""));
    let status = pod.phase("Failed");
    assert_eq!(status["status"]["reason"], "DeadlineExceeded");
    pod.remove();
    Outcome::Passed
}
