//! Tests the promise of the README: crictl runs a pod, and the pod is a VM.

use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually, run};
use serde_json::{Value, json};
use std::fs;

#[test]
fn a_pod_with_two_containers_runs_in_one_vm() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("pair", node.directory()).set("hostname", json!("nacelle-guest")));
    let first = pod.start(ContainerRequest::sh(
        "first",
        &image,
        "uname -r; hostname; cat /proc/sys/kernel/random/boot_id; sleep 600",
    ));
    let second =
        pod.start(ContainerRequest::sh("second", &image, "cat /proc/sys/kernel/random/boot_id; echo no >&2; exit 3"));
    assert_eq!(second.wait_for_exit()["exitCode"], 3);

    let output = first.wait_for_output("-");
    let lines: Vec<_> = output.lines().collect();
    let host = run::run_program("uname", ["-r"]).ok();
    // Without a guest, containers run on the node's kernel.
    let guest = nacelle_e2e::node::engine() != "host";
    assert_eq!(lines[0] != host, guest, "whose kernel the container sees");
    assert_eq!(lines[1], "nacelle-guest");
    // Output and errors use different streams, so their order in the log is undefined.
    assert!(second.output().lines().any(|line| line == lines[2]), "both containers run on one kernel: {lines:?}");
    assert_eq!(lines[2] != fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim(), guest);

    let log = fs::read_to_string(&second.log).unwrap();
    let error = log.lines().find(|line| line.ends_with(" no")).expect("standard error is in the log");
    assert_eq!(error.split(' ').nth(1), Some("stderr"), "{error}");
    let logs = node.crictl.try_call(["logs", &second.id]);
    assert_eq!((logs.stdout.lines().count(), logs.stderr.lines().last()), (1, Some("no")));

    assert_eq!(first.exec("echo $((6 * 7)); id -u").ok(), "42\n0");
    let failed = first.exec("exit 5");
    assert_ne!(failed.code, 0, "{failed:?}");
    assert!(first.exec("ls /nowhere").err().contains("/nowhere"));
    pod.remove();
}

#[test]
fn lists_and_states_are_what_kubelet_expects() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("listed", node.directory()).set("annotations", json!({"a": "b"})));
    let pods = node.crictl.call_json(["pods", "-o", "json"]);
    assert_eq!(pods["items"][0]["id"], json!(pod.id));
    assert_eq!(pods["items"][0]["state"], "SANDBOX_READY");
    assert_eq!(pods["items"][0]["annotations"]["a"], "b");
    assert_eq!(node.crictl.call_json(["pods", "--name", "other", "-o", "json"])["items"], json!([]));
    assert_eq!(node.crictl.call(["pods", "-q", "--label", "app=listed"]), pod.id);

    let container = pod.create(ContainerRequest::sh("one", &image, "sleep 600"));
    assert_eq!(container.status()["state"], "CONTAINER_CREATED");
    assert_eq!(
        container.status()["startedAt"].as_str().map(|time| time.starts_with("19") || time.starts_with("0")),
        Some(true)
    );
    node.crictl.call(["start", &container.id]);
    let status = container.status();
    assert_eq!(status["state"], "CONTAINER_RUNNING");
    assert_eq!(status["labels"]["name"], "one");
    assert!(status["startedAt"].as_str() >= status["createdAt"].as_str(), "{status}");
    assert_eq!(node.crictl.call(["ps", "-q", "--state", "Running"]), container.id);
    assert_eq!(node.crictl.call(["ps", "-q", "--pod", &pod.id]), container.id);

    node.crictl.call(["stop", "--timeout", "0", &container.id]);
    node.crictl.call(["stop", &container.id]);
    let status = container.status();
    assert_eq!((status["state"].as_str(), status["exitCode"].as_i64()), (Some("CONTAINER_EXITED"), Some(137)));
    node.crictl.call(["rm", &container.id]);
    assert_eq!(node.crictl.call(["ps", "-aq"]), "");

    node.crictl.call(["stopp", &pod.id]);
    node.crictl.call(["stopp", &pod.id]);
    assert_eq!(pod.inspect()["status"]["state"], "SANDBOX_NOTREADY");
    node.crictl.call(["rmp", &pod.id]);
    assert_eq!(node.crictl.call(["pods", "-q"]), "");

    let info = node.crictl.call_json(["info"]);
    let conditions = info["status"]["conditions"].as_array().expect("conditions").clone();
    for wanted in ["RuntimeReady", "NetworkReady"] {
        let found = conditions.iter().find(|condition| condition["type"] == wanted);
        assert_eq!(found.map(|condition| &condition["status"]), Some(&json!(true)), "{wanted}: {info}");
    }
    assert!(node.crictl.call(["version"]).contains("nacelle"));
}

#[test]
fn the_other_crictl_commands_work() {
    let node = TestNode::new();
    let used = node.registry.push(&TestImage::busybox(), "used:1");
    let unused = node.push_and_pull(&TestImage::busybox().with_config("User", json!("1000")), "unused:1");

    let pod = PodRequest::new("run", node.directory());
    let container =
        ContainerRequest::sh("talks", &used, "echo one; until [ -e /tmp/go ]; do sleep 0.1; done; echo two");
    let (pod, container) = (node.crictl.write_input("pod", &pod.0), node.crictl.write_input("container", &container.0));
    let id = node.crictl.call(["run", &container, &pod]);
    assert_eq!(node.crictl.call(["ps", "-q"]), id, "pulls the image, runs the pod, starts the container");
    let (mut follower, followed) = node.crictl.spawn_with_output_file(["logs", "-f", &id]);
    let text = || fs::read_to_string(&followed).unwrap_or_default();
    eventually("the log is followed", || text().contains("one").then_some(()));

    assert!(node.crictl.call(["metricdescs"]).contains("container_threads"));
    assert!(node.crictl.call(["metricsp"]).contains("container_threads"));
    assert!(node.crictl.call(["runtime-config"]).to_lowercase().contains("cgroup"));
    node.crictl.call(["update-runtime-config", "--pod-cidr", "10.88.0.0/24"]);
    let refused = node.crictl.try_call(["checkpoint", "--export", "/tmp/never.tar", &id]).err();
    assert!(refused.contains("Unimplemented") && refused.contains("CheckpointContainer"), "{refused}");

    node.crictl.call(["rmi", "--prune"]);
    assert_ne!(node.crictl.try_call(["inspecti", &unused]).code, 0, "no container uses the image");
    node.crictl.call(["inspecti", &used]);

    node.crictl.call(["exec", "--sync", &id, "touch", "/tmp/go"]);
    assert!(follower.wait().unwrap().success(), "{}", node.crictl.spawned_stderr());
    assert!(text().contains("two"), "it ends with the container, after its whole output: {}", text());
}

/// The flight recorder: inspectp contains the durations and the guest's output, and `nacelle pods` draws them.
#[test]
fn the_boot_timeline_of_a_pod_is_reported_and_drawn() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("flight", node.directory()));
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600"));
    let info = node.crictl.call_json(["inspectp", "-o", "json", &pod.id])["info"].take();
    let steps = |info: &Value| -> Vec<String> {
        let steps = info["timeline"].as_array().cloned().unwrap_or_default();
        assert!(steps.iter().all(|step| step["failed"] != true && step["at"].as_i64() > Some(0)), "{steps:?}");
        steps.iter().map(|step| step["what"].as_str().unwrap_or_default().to_owned()).collect()
    };
    let of_pod = steps(&info);
    let all = ["network namespace", "pod process", "CNI", "guest ready"];
    let own: &[&str] = match nacelle_e2e::node::engine().as_str() {
        "host" => &["machine"],
        "kvm" => &["taps and scratch disk", "template", "machine from its template"],
        _ => &["taps and scratch disk", "machine", "kernel", "agent"],
    };
    let wanted = [&all[..], own].concat();
    assert!(wanted.iter().all(|step| of_pod.iter().any(|known| known == step)), "{of_pod:?}");
    assert!(info["console"].is_string(), "{info}");
    let info = node.crictl.call_json(["inspect", "-o", "json", &container.id])["info"].take();
    assert_eq!(steps(&info), ["prepared", "made", "started"]);

    let nacelle = |arguments: &[&str]| {
        let mut command = node.netns.command(nacelle_e2e::path_from_env("NACELLE_BIN"));
        command.arg("pods").args(arguments).arg("--config").arg(node.directory().join("config.toml"));
        run::run(&mut command).ok()
    };
    let list = nacelle(&[]);
    let line = list.lines().find(|line| line.starts_with(&pod.id[..13])).unwrap_or_else(|| panic!("{list}"));
    assert!(line.contains("/flight") && line.contains("Ready") && line.contains("1/1"), "{list}");
    assert!(line.contains("MiB"), "{list}");
    let drawing = nacelle(&["--timeline", &pod.id[..13]]);
    println!("{drawing}");
    assert!(of_pod.iter().all(|step| drawing.contains(step.as_str())) && drawing.contains('█'), "{drawing}");
    assert!(drawing.contains("started") && !drawing.contains("teardown of the pod"), "{drawing}");
    node.crictl.call(["stopp", &pod.id]);
    let drawing = nacelle(&["--timeline", &pod.id]);
    println!("{drawing}");
    assert!(drawing.contains("teardown of the pod") && drawing.contains("end of the network"), "{drawing}");
    pod.remove();
}
