//! Tests what happens to VMs when the memory of the node's pods runs out: which of them the kernel ends first, what is reported, and
//! that the others run on. Clones share the memory of their template, which must outlive each of them.

mod pressure {
    pub mod clones;
    pub mod pods_cgroup;
}

use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::failure_answer::{check_end, check_status};
use nacelle_e2e::node::engine;
use nacelle_e2e::run::{eventually, run_program};
use nacelle_e2e::{ContainerRequest, NodeOptions, PodRequest, TestImage, TestNode};
use pressure::clones::{exec_in_all, start_clones};
use pressure::pods_cgroup::PodsCgroup;
use serde_json::{Value, json};
use std::fs;
use std::time::Instant;

/// Where the daemon serves its metrics.
const METRICS: &str = "127.0.0.1:9464";
/// The memory that the first VM uses beyond what all VMs use, in MiB.
const USED_MIB: u32 = 40;

/// Makes the OOM killer end a process, and returns which of these containers end.
fn end_one(cgroup: &PodsCgroup, containers: &[(&str, &RunningContainer)]) -> Vec<String> {
    cgroup.exceed();
    eventually("the end of a container is reported", || {
        let ended = containers.iter().filter(|(_, container)| container.status()["state"] != "CONTAINER_RUNNING");
        let names: Vec<_> = ended.map(|(name, _)| (*name).to_owned()).collect();
        (!names.is_empty()).then_some(names)
    })
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
    // All VMs share the CPUs of one node, which may be an emulated one.
    let limits = "[sandbox]\nboot_timeout = \"15m\"\npod_request_timeout = \"10m\"\n";
    let extra = format!("[metrics]\naddress = {METRICS:?}\n\n{limits}");
    let node = TestNode::with_options(NodeOptions { extra, ipv6: false, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (guaranteed, first) = run_pod(&node, &image, "guaranteed", -997);
    let Some(cgroup) = PodsCgroup::find(&node) else {
        println!("skipped: this node does not limit memory by cgroup v2");
        guaranteed.remove();
        return;
    };
    let (burstable, second) = run_pod(&node, &image, "burstable", 500);
    let (best_effort, third) = run_pod(&node, &image, "best-effort", 1000);
    // The VM that is worth most is the one that uses most.
    first.exec(&format!("dd if=/dev/urandom of=/dev/shm/blob bs=1M count={USED_MIB}")).ok();

    let all = [("guaranteed", &first), ("burstable", &second), ("best-effort", &third)];
    assert_eq!(end_one(&cgroup, &all), ["best-effort"]);
    check_end(&node, "pod's cgroup or node out of memory", &best_effort.id, &third.status());
    assert_eq!(best_effort.inspect()["status"]["state"], "SANDBOX_NOTREADY");
    assert_eq!(end_one(&cgroup, &all[..2]), ["burstable"]);
    assert_eq!(first.exec("wc -c </dev/shm/blob").ok(), (u64::from(USED_MIB) << 20).to_string());

    // With the memory that it left, another pod starts.
    best_effort.remove();
    burstable.remove();
    let (again, container) = run_pod(&node, &image, "again", 1000);
    assert_eq!(container.exec("echo runs").ok(), "runs");
    again.remove();
    guaranteed.remove();

    // Only engine `kvm` has templates.
    if engine() == "kvm" {
        clones_that_write_their_memory_end_only_when_none_can_be_reclaimed(&node, &image, &cgroup);
    }
}

/// What each clone writes to its scratch disk; the node's kernel can reclaim it. In MiB.
const CACHE_MIB: u64 = 16;
/// What each clone then writes to its memory while nothing but that cache is left, in MiB.
const FIRST_MIB: u64 = 12;
/// What each clone writes at last, in MiB: most of what a guest of 128 MiB has available, and as much as `/dev/shm` has room for.
const SECOND_MIB: u64 = 44;
/// The share of the last writes for which there is room, in percent.
const ROOM: u64 = 40;

/// Sums up the directories of all templates: name and content of each file.
fn digest_templates(node: &TestNode) -> Vec<String> {
    let directory = node.directory().join("run/templates");
    let files = run_program("find", [directory.as_os_str(), "-type".as_ref(), "f".as_ref()]).ok();
    let mut digests: Vec<_> = files.lines().map(|file| run_program("sha256sum", [file]).ok()).collect();
    digests.sort();
    digests
}

/// Returns the memory in bytes that is charged to the cgroup of templates.
fn charged_to_templates() -> u64 {
    let text = fs::read_to_string("/sys/fs/cgroup/nacelle/templates/memory.current").expect("templates were built");
    text.trim().parse().expect("a number of bytes")
}

/// Returns how many VMs the daemon has reported as ended by the OOM killer.
fn reported_kills(node: &TestNode) -> usize {
    let url = format!("http://{METRICS}/metrics");
    let text = node.run_in_netns("curl", &["--silent", "--show-error", "--fail", &url]).ok();
    let value = text.lines().find_map(|line| line.strip_prefix("nacelle_vm_ends_total{cause=\"oom_killed\"} "));
    value.and_then(|value| value.parse().ok()).expect("a number")
}

/// Returns how many pods have started from a template, and how many have booted.
fn starts(node: &TestNode) -> (u64, u64) {
    let listed = node.nacelle_json(&["templates", "ls"]);
    let [started, booted] = ["startedPods", "bootedPods"].map(|name| listed[name].as_u64().expect("a number"));
    (started, booted)
}

/// Writes the memory of many clones at the same time: `NACELLE_TEST_CLONES` of them (3 without it), under a limit for all pods that their
/// memory exceeds.
fn clones_that_write_their_memory_end_only_when_none_can_be_reclaimed(
    node: &TestNode,
    image: &str,
    cgroup: &PodsCgroup,
) {
    let count: u32 = std::env::var("NACELLE_TEST_CLONES").map_or(3, |text| text.parse().expect("NACELLE_TEST_CLONES"));
    let began = Instant::now();
    let (templates, (started, booted)) = (digest_templates(node), starts(node));
    let (kills, reported) = (cgroup.kills(), reported_kills(node));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let clones = runtime.block_on(start_clones(node, image, 0..count));
    assert_eq!(starts(node), (started + u64::from(count), booted));
    let (at_start, charged) = (cgroup.used(), charged_to_templates());

    // First the page cache goes, and no VM.
    let cache = format!("dd if=/dev/zero of=/cache bs=1M count={CACHE_MIB} oflag=direct conv=fsync 2>/dev/null");
    runtime
        .block_on(exec_in_all(&clones, |one| format!("{}; {cache}", one.block_script())))
        .into_iter()
        .for_each(|done| drop(done.expect("no VM ends")));
    let cached = cgroup.statistic("file");
    assert!(cached > u64::from(count) * (CACHE_MIB << 20) * 3 / 4, "{cached}");
    let reached = cgroup.limit_reached();
    cgroup.limit(cgroup.used());
    let written = runtime.block_on(exec_in_all(&clones, |one| one.write_script(FIRST_MIB, "data")));
    written.into_iter().for_each(|done| drop(done.expect("no VM ends while there is page cache")));
    let left = cgroup.statistic("file");
    assert!(left < cached - u64::from(count) * (FIRST_MIB << 20) / 2, "{left} of {cached}");
    assert_eq!(cgroup.kills(), kills);
    assert!(cgroup.limit_reached() > reached);

    // Then not all of them have room.
    let room = u64::from(count) * (SECOND_MIB << 20) * ROOM / 100;
    let limit = cgroup.used() - left + room;
    cgroup.limit(limit);
    let written = runtime.block_on(exec_in_all(&clones, |one| one.write_script(SECOND_MIB, "data")));
    // A VM that has written all may end for one that has not.
    let pods = |state: &str| node.crictl.call(["pods", "--quiet", "--no-trunc", "--state", state]);
    let not_ready = eventually("all ends are reported", || {
        let ids = pods("notready");
        (ids.lines().count() as u64 == cgroup.kills() - kills).then_some(ids)
    });
    let (ended, survivors): (Vec<_>, Vec<_>) =
        clones.iter().zip(&written).partition(|(one, _)| not_ready.lines().any(|id| id == one.pod.id));
    println!(
        "{count} clones: {} MiB at first, {} MiB of page cache, of which {} MiB stayed, limit {} MiB; {} VMs ended, {} run on with {} MiB",
        at_start >> 20,
        cached >> 20,
        left >> 20,
        limit >> 20,
        ended.len(),
        survivors.len(),
        cgroup.used() >> 20
    );
    assert!(!ended.is_empty() && survivors.len() * 5 >= clones.len(), "{written:?}");
    assert_eq!(survivors[0].0.number, 0, "the Guaranteed pod is the last to end");
    assert!(survivors.iter().all(|(_, written)| written.is_ok()), "{written:?}");
    for (one, written) in &ended {
        if let Err(status) = written {
            let (failure, code) =
                ("command in progress when the pod's cgroup or node is out of memory, engine kvm", status.code());
            check_status(node, failure, &format!("{code:?}"), status.message());
        }
        let container = eventually("the end of the container is reported", || {
            let container = node.crictl.call_json(["inspect", "-o", "json", &one.container])["status"].take();
            (container["state"] == "CONTAINER_EXITED").then_some(container)
        });
        check_end(node, "pod's cgroup or node out of memory", &one.pod.id, &container);
    }
    assert_eq!(pods("ready").lines().count(), survivors.len());
    assert_eq!((cgroup.kills() - kills, reported_kills(node) - reported), (ended.len() as u64, ended.len()));

    // Other pods start from the same template. What the others use may have grown up to the limit by now: there is room for new ones.
    cgroup.limit(limit + ended.len() as u64 * 2 * at_start / u64::from(count));
    for (one, _) in &ended {
        node.crictl.call(["rmp", "--force", &one.pod.id]);
    }
    let new = u32::try_from(ended.len()).expect("as many as pods");
    let new = runtime.block_on(start_clones(node, image, count..count + new));
    for answer in runtime.block_on(exec_in_all(&new, |_| "echo runs".to_owned())) {
        assert_eq!(answer.expect("the VM runs"), "runs");
    }
    assert_eq!(starts(node), (started + u64::from(count) + new.len() as u64, booted));
    // The others have their data.
    let survivors: Vec<_> = survivors.into_iter().map(|(one, _)| one.clone()).collect();
    let digests = runtime.block_on(exec_in_all(&survivors, |_| "sha256sum </dev/shm/data".to_owned()));
    for (one, digest) in survivors.iter().zip(digests) {
        let expected = one.digest(FIRST_MIB + SECOND_MIB);
        assert_eq!(digest.expect("the VM runs").split(' ').next(), Some(&*expected), "clone {}", one.number);
    }
    assert_eq!(cgroup.kills() - kills, ended.len() as u64);

    assert_eq!(digest_templates(node), templates);
    assert!(charged_to_templates().abs_diff(charged) < 1 << 20, "{charged} and {}", charged_to_templates());
    // A pod process has some pages of shared memory of its own.
    let (shared, pods) = (cgroup.statistic("shmem"), u64::from(count));
    assert!(shared < pods << 18, "the pages of a template are charged to pods: {shared}");
    cgroup.lift_limit();
    node.crictl.call(["rmp", "--all", "--force"]);
    eventually("all memory is free", || (cgroup.statistic("anon") < 1 << 20).then_some(()));
    assert_eq!(node.leaked(), Vec::<String>::new());
    println!("{count} clones: {} s", began.elapsed().as_secs());
}
