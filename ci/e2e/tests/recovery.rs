//! Tests recovery after any process was killed.

use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde_json::{Value, json};
use std::time::Duration;
use tonic::transport::Channel;

#[test]
fn an_idle_daemon_finds_everything_again_after_a_kill() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (pod_id, alive, ended) = {
        let pod = node.crictl.run_pod(PodRequest::new("survivor", node.directory()));
        let counter = "echo $$ >/pid; trap 'exit 9' USR1; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.2; done";
        let alive = pod.start(ContainerRequest::sh("alive", &image, counter));
        let ended = pod.start(ContainerRequest::sh("ended", &image, "exit 4"));
        alive.wait_for_output("tick 2");
        ended.wait_for_exit();
        (pod.id.clone(), alive.id.clone(), ended.id.clone())
    };
    let machines = node.vm_pids();
    node.kill();
    assert_eq!(node.vm_pids(), machines, "the machine runs on without the daemon");
    node.start();
    assert_eq!(status_of(&node, &alive)["state"], "CONTAINER_RUNNING");
    assert_eq!(status_of(&node, &ended)["exitCode"], 4);
    assert_eq!(node.crictl.call(["pods", "-q", "--state", "Ready"]), pod_id);
    assert_eq!(node.crictl.call(["exec", "--sync", &alive, "echo", "still here"]), "still here");
    assert_eq!(node.vm_pids(), machines);

    // The next daemon knows what ended while no daemon ran.
    node.crictl.call(["exec", "--sync", &alive, "sh", "-c", "(sleep 3; kill -USR1 $(cat /pid)) >/dev/null 2>&1 &"]);
    node.kill();
    eventually("the container has ended without a daemon", || {
        let record = find_state_file(node.directory(), "state.json", &alive)?;
        record.contains("exited").then_some(())
    });
    node.start();
    eventually("its exit code is known", || (status_of(&node, &alive)["exitCode"] == 9).then_some(()));
    let all = node.crictl.call_json(["ps", "-a", "-o", "json"]);
    assert_eq!(all["containers"].as_array().map(Vec::len), Some(2));
}

/// Returns the text of the record of this container's pod.
fn find_state_file(directory: &std::path::Path, name: &str, word: &str) -> Option<String> {
    for entry in std::fs::read_dir(directory).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            if let Some(found) = find_state_file(&path, name, word) {
                return Some(found);
            }
        } else if entry.file_name() == name {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            if text.contains(word) {
                return Some(text.to_lowercase());
            }
        }
    }
    None
}

/// Kills the daemon some time after crictl was started with `arguments`, and starts it again.
fn kill_daemon_during(node: &mut TestNode, arguments: &[&str], after: Duration) {
    let mut call = node.crictl.spawn(arguments);
    // This test varies the time of the kill; it is not a wait for anything.
    std::thread::sleep(after);
    node.kill();
    call.wait().expect("crictl is our child");
    node.start();
}

#[test]
fn a_daemon_killed_during_each_call_loses_and_leaks_nothing() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let offsets = [5, 60, 250, 900].map(Duration::from_millis);
    for after in offsets {
        let pod = PodRequest::new("cut", node.directory());
        let file = node.crictl.write_input("pod", &pod.0);
        kill_daemon_during(&mut node, &["runp", &file], after);
        // kubelet retries with the same name; the answer is a pod, or that the unfinished one must be removed first.
        let pods = node.crictl.call(["pods", "-q"]);
        for id in pods.lines() {
            node.crictl.call(["rmp", "--force", id]);
        }
        let id = node.crictl.call(["runp", &file]);
        let container = ContainerRequest::sh("cut", &image, "trap 'exit 3' TERM; while :; do sleep 0.1; done");
        let config = node.crictl.write_input("container", &container.0);
        kill_daemon_during(&mut node, &["create", &id, &config, &file], after);
        let mut containers = node.crictl.call(["ps", "-aq"]);
        if containers.is_empty() {
            containers = node.crictl.call(["create", &id, &config, &file]);
        }
        assert_eq!(containers.lines().count(), 1, "{containers}");
        kill_daemon_during(&mut node, &["start", &containers], after);
        let state = state_of(&node, &containers);
        assert!(state == "CONTAINER_CREATED" || state == "CONTAINER_RUNNING", "{state}");
        if state == "CONTAINER_CREATED" {
            node.crictl.call(["start", &containers]);
        }
        assert_eq!(node.crictl.call(["exec", "--sync", &containers, "echo", "alive"]), "alive");
        kill_daemon_during(&mut node, &["exec", "--sync", &containers, "sleep", "1"], after);
        kill_daemon_during(&mut node, &["logs", "--reopen", &containers], after);
        assert_eq!(node.crictl.call(["exec", "--sync", &containers, "echo", "alive"]), "alive");
        kill_daemon_during(&mut node, &["stop", "--timeout", "20", &containers], after);
        node.crictl.call(["stop", "--timeout", "60", &containers]);
        assert_eq!(state_of(&node, &containers), "CONTAINER_EXITED");
        kill_daemon_during(&mut node, &["rm", &containers], after);
        // crictl requests the status first, so it fails for a container that is gone already; only the list counts.
        node.crictl.try_call(["rm", "--force", &containers]);
        assert_eq!(node.crictl.call(["ps", "-aq"]), "");
        kill_daemon_during(&mut node, &["stopp", &id], after);
        node.crictl.call(["stopp", &id]);
        kill_daemon_during(&mut node, &["rmp", &id], after);
        node.crictl.try_call(["rmp", &id]);
        assert_eq!(node.crictl.call(["pods", "-q"]), "");
        eventually("nothing is left", || node.leaked().is_empty().then_some(()));
        let other = TestImage::busybox()
            .with_layer(|layer| layer.add_file("x", after.as_millis().to_string().as_bytes(), 0o644));
        let other = node.registry.push(&other, "cut:1");
        kill_daemon_during(&mut node, &["pull", &other], after);
        node.crictl.call(["pull", &other]);
        kill_daemon_during(&mut node, &["rmi", &other], after);
        node.crictl.try_call(["rmi", &other]);
        assert_ne!(node.crictl.try_call(["inspecti", &other]).code, 0);
    }
}

fn status_of(node: &TestNode, id: &str) -> Value {
    node.crictl.call_json(["inspect", "-o", "json", id])["status"].take()
}

fn state_of(node: &TestNode, id: &str) -> String {
    status_of(node, id)["state"].as_str().unwrap_or_default().to_owned()
}

fn pod_with_sleeper<'a>(node: &'a TestNode, image: &str, name: &str) -> (RunningPod<'a>, RunningContainer<'a>) {
    let pod = node.crictl.run_pod(PodRequest::new(name, node.directory()));
    let container = pod.start(ContainerRequest::sh("sleeper", image, "sleep 600"));
    (pod, container)
}

#[test]
fn a_dead_vm_is_reported_and_its_pod_can_be_removed() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    // With our own VMM both are one process.
    let victims: [fn(&TestNode) -> Vec<i32>; 2] = [TestNode::vm_pids, |node| node.pids_matching("nacelle-pod --dir ")];
    for processes in victims {
        let (other, neighbour) = pod_with_sleeper(&node, &image, "other");
        let spared = processes(&node);
        let (pod, container) = pod_with_sleeper(&node, &image, "victim");
        let victims: Vec<_> = processes(&node).into_iter().filter(|pid| !spared.contains(pid)).collect();
        assert!(!victims.is_empty(), "no process of this pod");
        for pid in victims {
            nacelle_e2e::run::run_program("kill", ["-9", &pid.to_string()]);
        }
        let status = container.wait_for_exit();
        assert_ne!(status["exitCode"], 0, "{status}");
        assert_ne!(status["reason"], "Completed", "{status}");
        eventually("the pod is not ready", || (pod.inspect()["status"]["state"] == "SANDBOX_NOTREADY").then_some(()));
        assert_eq!(neighbour.exec("echo alive").ok(), "alive");
        let refused = pod.try_create(ContainerRequest::sh("late", &image, "true")).err();
        assert!(refused.contains("FailedPrecondition") || refused.contains("Unavailable"), "{refused}");
        pod.remove();
        other.remove();
        eventually("nothing is left", || node.leaked().is_empty().then_some(()));
    }
}

/// Makes one request over a connection of its own; `number` selects it.
async fn send_exec_requests(number: u32, channel: Channel, container_id: String) -> Result<(), tonic::Status> {
    let mut client = RuntimeServiceClient::new(channel);
    match number % 3 {
        0 => {
            let request = cri::ExecSyncRequest { container_id, cmd: vec!["true".to_owned()], timeout: 0 };
            client.exec_sync(request).await.map(|answer| assert_eq!(answer.get_ref().exit_code, 0))
        }
        1 => client.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.map(drop),
        _ => client.container_status(cri::ContainerStatusRequest { container_id, verbose: true }).await.map(drop),
    }
}

#[test]
fn a_hundred_concurrent_requests_are_answered() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (pod, container) = pod_with_sleeper(&node, &image, "busy");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // Not with crictl: a hundred of those load a slow node so much that they time out.
        let mut calls = tokio::task::JoinSet::new();
        for number in 0..100 {
            calls.spawn(send_exec_requests(number, node.channel(), container.id.clone()));
        }
        for answer in calls.join_all().await {
            answer.unwrap();
        }
    });
    assert_eq!(json!(pod.id), pod.inspect()["status"]["id"]);
    pod.remove();
}

/// Returns the processes of the node whose command line has this word.
fn pids_with_word(word: &str) -> Vec<String> {
    let processes = std::fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let line = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("cmdline")).ok();
    processes.filter_map(line).filter(|line| line.contains(word)).collect()
}

/// Removes everything below the node's run directory, as if its tmpfs was lost.
fn remove_run_directory(node: &TestNode) {
    for entry in std::fs::read_dir(node.directory().join("run")).expect("the run directory").flatten() {
        nacelle_e2e::run::run_program("rm", ["-rf", &entry.path().display().to_string()]);
    }
}

#[test]
fn pods_end_if_the_run_directory_is_lost_while_there_is_no_daemon() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    // A number that no other test sleeps for: without a guest the process is the node's.
    let (pod_id, container) = {
        let pod = node.crictl.run_pod(PodRequest::new("lost", node.directory()));
        let container = pod.start(ContainerRequest::sh("sleeper", &image, "sleep 604857"));
        (pod.id.clone(), container.id.clone())
    };
    assert!(!node.pids_matching("nacelle-pod --dir ").is_empty() && !node.vm_pids().is_empty());
    node.kill();
    remove_run_directory(&node);
    node.start();
    // The daemon serves only after recovery.
    assert_eq!(node.pids_matching(""), Vec::<i32>::new(), "processes of a pod without a run directory still run");
    assert_eq!(
        pids_with_word("604857"),
        Vec::<String>::new(),
        "a container of a pod without a run directory still run"
    );
    assert_eq!(status_of(&node, &container)["state"], "CONTAINER_EXITED");
    assert_eq!(node.crictl.call(["pods", "-q", "--state", "Ready"]), "");
    node.crictl.call(["rmp", &pod_id]);
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}

#[test]
fn a_pod_without_its_run_directory_is_reported_and_can_be_removed() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (pod, container) = pod_with_sleeper(&node, &image, "lost");
    remove_run_directory(&node);
    let begun = std::time::Instant::now();
    // Without a guest, the agent's sockets are in that directory; a VM's devices have theirs open.
    if nacelle_e2e::node::engine() == "host" {
        let refused = container.exec("true").err();
        assert!(refused.contains("run directory"), "{refused}");
        let created = pod.try_create(ContainerRequest::sh("late", &image, "true"));
        let refused = match created.code {
            0 => node.crictl.try_call(["start", created.ok().trim()]).err(),
            _ => created.err(),
        };
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}: {refused}", begun.elapsed());
        assert!(refused.contains("run directory"), "{refused}");
    }
    pod.remove();
    assert_eq!(node.pids_matching(""), Vec::<i32>::new());
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}

/// Removes the files of the state store whose names begin like this.
fn remove_store_files(node: &TestNode, prefix: &str) {
    let entries = std::fs::read_dir(node.directory().join("root")).expect("the data directory").flatten();
    let wanted: Vec<_> = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)).collect();
    assert!(!wanted.is_empty(), "no file {prefix}");
    wanted.iter().for_each(|entry| std::fs::remove_file(entry.path()).expect("root may remove it"));
}

/// Starts three pods with a container each; returns the ids of pods and containers.
fn three_pods(node: &TestNode, image: &str) -> Vec<(String, String)> {
    let start = |name: &&str| {
        let (pod, container) = pod_with_sleeper(node, image, name);
        (pod.id.clone(), container.id.clone())
    };
    ["one", "two", "three"].iter().map(start).collect()
}

/// Ends the daemon, and loses its state store before or after that.
type Loss = fn(&mut TestNode);

#[test]
fn three_pods_survive_the_loss_of_the_state_store() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pods = three_pods(&node, &image);
    let machines = node.vm_pids();
    let listed = |node: &TestNode, what: &str| -> Vec<String> {
        let mut ids: Vec<_> = node.crictl.call([what, "-q"]).lines().map(str::to_owned).collect();
        ids.sort();
        ids
    };
    let before = (listed(&node, "pods"), listed(&node, "ps"));
    assert_eq!((before.0.len(), before.1.len()), (3, 3));
    let losses: [(&str, Loss); 4] = [
        ("removed, stopped", |node| {
            assert!(node.terminate());
            remove_store_files(node, "state.redb");
        }),
        ("removed, killed", |node| {
            node.kill();
            remove_store_files(node, "state.redb");
        }),
        ("removed under the daemon", |node| {
            remove_store_files(node, "state.redb");
            node.kill();
        }),
        ("overwritten, killed", |node| {
            node.kill();
            std::fs::write(node.directory().join("root/state.redb"), [0; 100_000]).expect("root may write it");
        }),
    ];
    for (what, lose) in losses {
        lose(&mut node);
        node.start();
        assert_eq!((listed(&node, "pods"), listed(&node, "ps")), before, "{what}");
        assert_eq!(node.vm_pids(), machines, "{what}");
        for (pod, container) in &pods {
            assert_eq!(state_of(&node, container), "CONTAINER_RUNNING", "{what}");
            assert_eq!(node.crictl.call(["exec", "--sync", container, "echo", "still here"]), "still here", "{what}");
            assert_eq!(node.crictl.call_json(["inspectp", "-o", "json", pod])["status"]["state"], "SANDBOX_READY");
        }
        assert!(node.log().contains("the state store was restored from its copy"), "{what}");
    }
    // An export is made while the daemon runs, and imported while it does not.
    let export = node.directory().join("exported").display().to_string();
    let counts = "3 pods, 3 containers, 0 persistent VMs";
    assert_eq!(node.nacelle(&["store", "export", &export]).ok(), counts);
    let error = node.nacelle(&["store", "import", "--replace", &export]).err();
    assert!(error.contains("another daemon uses that directory"), "{error}");
    node.kill();
    remove_store_files(&node, "state.");
    assert_eq!(node.nacelle(&["store", "import", &export]).ok(), counts);
    node.start();
    assert_eq!((listed(&node, "pods"), listed(&node, "ps"), node.vm_pids()), (before.0, before.1, machines));
    for (pod, container) in &pods {
        assert_eq!(node.crictl.call(["exec", "--sync", container, "echo", "imported"]), "imported");
        node.crictl.call(["rmp", "--force", pod]);
    }
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}

#[test]
fn a_container_without_a_record_ends_and_its_pod_does_not() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let export = node.directory().join("exported").display().to_string();
    let seconds = format!("60{}", std::process::id());
    let (pod, kept) = {
        let (pod, kept) = pod_with_sleeper(&node, &image, "adopted");
        node.nacelle(&["store", "export", &export]).ok();
        pod.start(ContainerRequest::sh("late", &image, &format!("exec sleep {seconds}")));
        (pod.id.clone(), kept.id.clone())
    };
    node.kill();
    node.nacelle(&["store", "import", "--replace", &export]).ok();
    node.start();
    assert_eq!(node.crictl.call(["ps", "-aq"]), kept);
    assert_eq!(node.crictl.call(["exec", "--sync", &kept, "echo", "runs"]), "runs");
    assert!(node.log().contains("ended a container without a record"));
    // On engine `host` its process would be one of the node's.
    assert_ne!(run_program("pgrep", ["-fx", &format!("sleep {seconds}")]).code, 0);
    node.crictl.call(["rmp", "--force", &pod]);
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}

#[test]
fn pods_without_any_record_are_ended_whole() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    for has_run_directory in [true, false] {
        three_pods(&node, &image);
        node.kill();
        remove_store_files(&node, "state.");
        if !has_run_directory {
            remove_run_directory(&node);
        }
        node.start();
        // The daemon serves only after recovery.
        assert_eq!(node.pids_matching(""), Vec::<i32>::new(), "run directory: {has_run_directory}");
        assert_eq!((node.crictl.call(["pods", "-q"]), node.crictl.call(["ps", "-aq"])), (String::new(), String::new()));
        eventually("nothing is left", || node.leaked().is_empty().then_some(()));
        // kubelet starts them anew, by the same names.
        for (pod, container) in three_pods(&node, &image) {
            assert_eq!(node.crictl.call(["exec", "--sync", &container, "echo", "new"]), "new");
            node.crictl.call(["rmp", "--force", &pod]);
        }
        eventually("nothing is left", || node.leaked().is_empty().then_some(()));
    }
}
