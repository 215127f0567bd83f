//! Tests containers and pods that end: jobs, crashes, limits, hooks, deadlines.

use super::CaseResult;
use super::pod_features::{waiting, with_directory};
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, StaticPod, container_status};
use std::fs;

pub fn job_with_a_retry(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "job");
    let status = pod.wait_for_phase("Succeeded");
    let job = container_status(&status, "job");
    assert_eq!(job["restartCount"], 1);
    assert_eq!(job["state"]["terminated"]["reason"], "Completed");
    assert_eq!(job["lastState"]["terminated"]["exitCode"], 3);
    assert_eq!(pod.log("job"), "the result is 42");
    // kubelet stopped the sidecar after the job was done.
    assert_eq!(container_status(&status, "helper")["state"]["terminated"]["exitCode"], 0);
    pod.remove();
    CaseResult::Passed
}

pub fn memory_hog(fixture: &KubeletFixture) -> CaseResult {
    if !nacelle_e2e::node::supports_limits() {
        return CaseResult::Skipped("limits of engine host need cgroup v2 with the memory controller");
    }
    let pod = StaticPod::example(fixture, "memory-hog");
    let status = pod.wait_until("the hog was killed", |pod| {
        container_status(pod, "hog")["state"]["terminated"].is_object().then(|| pod.clone())
    });
    let hog = &container_status(&status, "hog")["state"]["terminated"];
    assert_eq!((&hog["reason"], &hog["exitCode"]), (&"OOMKilled".into(), &137.into()));
    assert!(container_status(&status, "neighbour")["state"]["running"].is_object());
    assert_eq!(pod.run("neighbour", &["echo", "still here"]), "still here");
    pod.remove();
    CaseResult::Passed
}

pub fn crash_loop(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "crash-loop");
    let status = pod.wait_until("kubelet waits longer", |pod| {
        let main = container_status(pod, "main");
        let loops = main["state"]["waiting"]["reason"] == "CrashLoopBackOff";
        (loops && main["restartCount"].as_u64() >= Some(3)).then(|| pod.clone())
    });
    let last = &container_status(&status, "main")["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["reason"]), (&5.into(), &"Error".into()));
    assert_eq!(last["message"], "no database at nowhere\n");
    // kubelet keeps one dead container, not all.
    let name = pod.full_name();
    let dead = fixture.node.crictl.call([
        "ps",
        "-aq",
        "--state",
        "Exited",
        "--label",
        &format!("io.kubernetes.pod.name={name}"),
    ]);
    assert!(dead.lines().count() <= 2, "{dead}");
    pod.remove();
    CaseResult::Passed
}

pub fn hooks_and_termination_message(fixture: &KubeletFixture) -> CaseResult {
    let directory = fixture.directory("story");
    let pod = StaticPod::new(fixture, "hooks", &with_directory("hooks", "/srv/story", &directory));
    let status = pod.wait_until_ready();
    let lines = || fs::read_to_string(directory.join("lines")).unwrap_or_default();
    assert_eq!(lines(), "postStart\n");
    // The termination message of a container that ends by itself.
    pod.try_run("main", &["kill", "1"]);
    let again = pod.wait_until("it has been restarted", |pod| {
        let main = container_status(pod, "main");
        (main["restartCount"] == 1 && main["state"]["running"].is_object()).then(|| pod.clone())
    });
    let last = &container_status(&again, "main")["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["message"]), (&7.into(), &"stopped by SIGTERM\n".into()));
    assert_ne!(container_status(&again, "main")["containerID"], container_status(&status, "main")["containerID"]);
    pod.wait_until("the second start is recorded", |_| (lines() == "postStart\nTERM\npostStart\n").then_some(()));
    // The order of the shutdown by kubelet.
    pod.remove();
    assert_eq!(lines(), "postStart\nTERM\npostStart\npreStop\nlater\nTERM\n");
    CaseResult::Passed
}

pub fn active_deadline(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::new(fixture, "deadline", &waiting("deadline", "  activeDeadlineSeconds: 8\n", ""));
    let status = pod.wait_for_phase("Failed");
    assert_eq!(status["status"]["reason"], "DeadlineExceeded");
    pod.remove();
    CaseResult::Passed
}
