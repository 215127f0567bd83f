//! Tests cases that need an API server: what kubelet gets from it, and kubectl on pods.

use super::CaseResult;
use super::pod_features::waiting;
use crate::cluster::{ApiPod, TestCluster};
use crate::disk::LoopDisk;
use crate::fixture::KubeletFixture;
use crate::kubelet::ADDRESS;
use crate::pods::{ObservedPod, container_status, example, wait_for};
use nacelle_e2e::TestImage;
use nacelle_e2e::run::{run_program, run_with_input};
use serde_json::{Value, json};
use std::process::Stdio;

pub(super) fn cluster(fixture: &KubeletFixture) -> &TestCluster {
    fixture.cluster.as_ref().expect("the node has joined")
}

/// Returns the documents of an example: its pod, and all others.
fn documents(name: &str) -> (String, String) {
    let text = example(name);
    let (pods, others): (Vec<_>, Vec<_>) = text.split("\n---\n").partition(|part| part.contains("\nkind: Pod\n"));
    (pods.join("\n---\n"), others.join("\n---\n"))
}

pub fn node_status(fixture: &KubeletFixture) -> CaseResult {
    let node = wait_for("the node is Ready", || {
        let node = cluster(fixture).node_object()?;
        crate::pods::has_condition(&node, "Ready").then_some(node)
    });
    let info = &node["status"]["nodeInfo"];
    assert!(info["containerRuntimeVersion"].as_str().is_some_and(|text| text.starts_with("nacelle://")), "{info}");
    let handlers = node["status"]["runtimeHandlers"].as_array().cloned().unwrap_or_default();
    for name in ["", "nacelle", "other", "host"] {
        let handler = handlers.iter().find(|handler| handler["name"].as_str().unwrap_or_default() == name);
        let features = &handler.unwrap_or_else(|| panic!("no handler {name:?}: {handlers:?}"))["features"];
        assert_eq!((&features["userNamespaces"], &features["recursiveReadOnlyMounts"]), (&true.into(), &true.into()));
    }
    let images = node["status"]["images"].to_string();
    assert!(images.contains("docker.io/library/busybox:1.36"), "{images}");
    CaseResult::Passed
}

pub fn configuration_updates(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let (pod, others) = documents("configured");
    let pod = cluster.create_pod("configured", &pod);
    // The pod waits for objects that do not exist yet.
    pod.wait_for_reason("main", "ContainerCreating");
    cluster.apply(&others);
    pod.wait_until_ready();
    assert_eq!(pod.shell("echo $COLOUR; cat /settings/colour /secret/password /part"), "blue\nbluehunter2blue");
    assert_eq!(pod.shell("cat /all/password; stat -L -c %a /secret/password"), "hunter2400");
    let token = pod.shell("cat /var/run/secrets/kubernetes.io/serviceaccount/token");
    assert_eq!(token.split('.').count(), 3, "{token}");
    // The pod sees the updates of kubelet, except with subPath.
    cluster.apply(&others.replace("blue", "green"));
    wait_for("the pod sees the new settings", || (pod.shell("cat /settings/colour") == "green").then_some(()));
    assert_eq!(pod.shell("cat /part; ls -A /settings | sort | tail -1"), "bluecolour");
    pod.delete();
    CaseResult::Passed
}

pub fn two_runtime_handlers(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let (_, classes) = documents("runtime-classes");
    cluster.apply(&classes);
    let of = |name: &str, class: &str| {
        cluster.create_pod(name, &waiting(name, &format!("  runtimeClassName: {class}\n"), ""))
    };
    let (inside, beside) = (of("in-machine", "nacelle"), of("beside-machine", "nacelle-host"));
    let (object, _) = (inside.wait_until_ready(), beside.wait_until_ready());
    assert_eq!(object["spec"]["overhead"]["memory"], "272Mi");
    let here = run_program("uname", ["-r"]).ok();
    assert_eq!(beside.shell("uname -r"), here);
    if nacelle_e2e::node::engine() != "host" {
        assert_ne!(inside.shell("uname -r"), here);
    }
    beside.delete();
    inside.delete();
    let missing = waiting("no-class", "  runtimeClassName: nothing\n", "");
    let refused = run_with_input(&mut cluster.command(&["apply", "-f", "-"]), missing.as_bytes()).err();
    assert!(refused.contains("RuntimeClass \"nothing\" not found"), "{refused}");
    CaseResult::Passed
}

/// Creates a PersistentVolume and a claim that are bound to each other, as the controller would.
pub(super) fn claim(cluster: &TestCluster, manifest: &str, name: &str) {
    cluster.apply(manifest);
    let patch = |kind: &str, patch: Value, further: &[&str]| {
        let patch = patch.to_string();
        cluster.kubectl(&[&["patch", kind, name, "--type=merge", "-p", &patch][..], further].concat()).ok();
    };
    let uid = cluster.kubectl(&["get", "pvc", name, "-o", "jsonpath={.metadata.uid}"]).ok();
    patch("pv", json!({"spec": {"claimRef": {"uid": uid}}}), &[]);
    patch("pvc", json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}}), &[]);
    let size = cluster.kubectl(&["get", "pvc", name, "-o", "jsonpath={.spec.resources.requests.storage}"]).ok();
    patch("pv", json!({"status": {"phase": "Bound"}}), &["--subresource=status"]);
    patch("pvc", json!({"status": {"phase": "Bound", "capacity": {"storage": size}}}), &["--subresource=status"]);
}

pub fn a_database_with_a_claim(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let program = std::fs::read(nacelle_e2e::path_from_env("ETCD")).expect("ci/kubelet built it");
    let image = TestImage::busybox().with_layer(|layer| layer.add_file("bin/etcd", &program, 0o755));
    fixture.node.registry.push(&image, "etcd:3.6");
    let directory = fixture.directory("database");
    let (pod_manifest, others) = documents("database");
    claim(cluster, &others.replace("/srv/database", &directory.display().to_string()), "database");
    let put = |address: &Value, what: &str, body: &str| {
        let url = format!("http://{}:2379/v3/kv/{what}", address.as_str().expect("a Ready pod has an address"));
        fixture.node.run_in_netns("curl", &["-sf", "--max-time", "60", "-d", body, &url]).ok()
    };
    // The probes use gRPC.
    let pod = cluster.create_pod("database", &pod_manifest);
    let status = pod.wait_until_ready();
    put(&status["status"]["podIP"], "put", "{\"key\": \"Zm9v\", \"value\": \"YmFy\"}");
    pod.delete();
    let pod = cluster.create_pod("database", &pod_manifest);
    let status = pod.wait_until_ready();
    let answer = put(&status["status"]["podIP"], "range", "{\"key\": \"Zm9v\"}");
    assert!(answer.contains("\"YmFy\""), "{answer}");
    pod.delete();
    cluster.kubectl(&["delete", "pvc,pv", "database", "--wait=false"]).ok();
    CaseResult::Passed
}

pub fn a_raw_block_volume(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let disk = LoopDisk::new(fixture, "disk", 16);
    let (pod, others) = documents("block");
    claim(cluster, &others.replace("/dev/the-disk", disk.device()), "disk");
    let pod = cluster.create_pod("block", &pod);
    pod.wait_until_ready();
    pod.shell("echo written by the pod | dd of=/dev/data conv=notrunc,fsync");
    // The page cache of a file and that of a loop device over it are separate.
    let written = run_program("head", ["-c", "18", disk.device()]).stdout;
    assert_eq!(written, "written by the pod");
    pod.delete();
    cluster.kubectl(&["delete", "pvc,pv", "disk", "--wait=false"]).ok();
    disk.detach();
    CaseResult::Passed
}

pub fn an_ephemeral_container(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let pod = cluster.create_pod("debugged", &waiting("debugged", "", ""));
    let before = pod.wait_until_ready();
    let script = "ps -o args; cat /proc/1/root/etc/hostname";
    cluster
        .kubectl(&[
            "debug",
            "debugged",
            "--image=busybox:1.36",
            "-c",
            "debugger",
            "--target=main",
            "--profile=general",
            "--",
            "sh",
            "-c",
            script,
        ])
        .ok();
    let ended = pod.wait_until("the debugger has ended", |pod| {
        let all = pod["status"]["ephemeralContainerStatuses"].as_array()?;
        all.first()?["state"]["terminated"].as_object().cloned()
    });
    assert_eq!(ended["exitCode"], 0);
    let log = cluster.kubectl(&["logs", "debugged", "-c", "debugger"]).ok();
    assert!(log.contains("sleep 1000000") && log.ends_with("debugged"), "{log}");
    assert_eq!(
        container_status(&pod.wait_until_ready(), "main")["containerID"],
        container_status(&before, "main")["containerID"]
    );
    pod.delete();
    CaseResult::Passed
}

pub fn kubectl_commands(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let (web, _) = documents("web");
    let pod = cluster.create_pod("web", &web.replace(", hostPort: 18080", ""));
    pod.wait_until_ready();
    let exec = run_with_input(
        &mut cluster.command(&["exec", "-i", "web", "--", "sh", "-c", "cat; exit 4"]),
        b"through kubectl",
    );
    assert_eq!((exec.stdout.as_str(), exec.code), ("through kubectl", 4));
    let words: Vec<String> = std::iter::once(cluster.command(&[
        "exec",
        "-it",
        "web",
        "--",
        "sh",
        "-c",
        "tty; until stty size | grep 77; do sleep 0.1; done",
    ]))
    .flat_map(|command| {
        let words = [command.get_program().to_owned()].into_iter().chain(command.get_args().map(ToOwned::to_owned));
        words.map(|word| format!("'{}'", word.to_string_lossy())).collect::<Vec<_>>()
    })
    .collect();
    let line = format!("stty cols 77 rows 33; exec {}", words.join(" "));
    let terminal = run_program("script", ["-qec", &line, "/dev/null"]).ok();
    assert!(terminal.contains("/dev/pts/") && terminal.contains("33 77"), "{terminal}");

    let mut forward = cluster.command(&["port-forward", "pod/web", "18081:8080"]);
    let mut forward = forward.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("kubectl can be started");
    wait_for("the port is forwarded", || {
        let answer = fixture.node.run_in_netns("curl", &["-sf", "--max-time", "20", "http://127.0.0.1:18081/"]);
        (answer.stdout == "hello from web").then_some(())
    });
    forward.kill().expect("kubectl is our child");
    forward.wait().expect("kubectl is our child");
    let log = cluster.kubectl(&["logs", "web", "--tail=1"]).ok();
    assert!(log.contains("response:200"), "{log}");
    let top = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/stats/summary"]).ok();
    assert!(top.contains("\"name\": \"web\""), "the summary through the API server");
    pod.delete();
    CaseResult::Passed
}

pub fn eviction(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let limits = "    resources: {limits: {ephemeral-storage: 8Mi}}\n";
    let volume = "  volumes: [{name: data, emptyDir: {sizeLimit: 8Mi}}]\n";
    let mounts = "    volumeMounts: [{name: data, mountPath: /data}]\n";
    let evicted = |name: &str, manifest: &str, file: &str, word: &str| {
        // kubelet 1.36 reports Succeeded for a pod that it has evicted if it checks the containers once more before it has
        // removed them, and all exited with 0 (`getPhase`).
        let pod = cluster.create_pod(name, &manifest.replace("exit 0", "exit 143"));
        pod.wait_until_ready();
        pod.shell(&format!("dd if=/dev/zero of={file} bs=1M count=20"));
        let status = pod.wait_for_phase("Failed");
        assert_eq!(status["status"]["reason"], "Evicted");
        let message = status["status"]["message"].as_str().unwrap_or_default();
        assert!(message.contains(word), "{message}");
        pod.delete();
    };
    evicted("full-root", &waiting("full-root", "", limits), "/much", "ephemeral local storage");
    evicted("full-volume", &waiting("full-volume", volume, mounts), "/data/much", "EmptyDir volume \"data\"");
    CaseResult::Passed
}

pub fn empty_dir_with_a_size_limit(fixture: &KubeletFixture) -> CaseResult {
    if nacelle_e2e::node::engine() == "host" {
        return CaseResult::Skipped(
            "without a machine an emptyDir is a directory of the node, whose limit is kubelet's eviction",
        );
    }
    let cluster = cluster(fixture);
    let (pod, class) = documents("limited-volume");
    cluster.apply(&class);
    let pod = cluster.create_pod("limited-volume", &pod);
    pod.wait_until_ready();
    // kubectl exec returns the exit code of the command.
    let run = |container: &str, script: &str| {
        cluster.kubectl(&["exec", "limited-volume", "-c", container, "--", "sh", "-c", script])
    };
    let used = || {
        let summary = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/stats/summary"]).ok();
        let summary: Value = serde_json::from_str(&summary).expect("kubelet answers in JSON");
        let pods = summary["pods"].as_array()?.iter().find(|pod| pod["podRef"]["name"] == "limited-volume")?;
        pods["volume"].as_array()?.iter().find(|volume| volume["name"] == "data")?["usedBytes"].as_u64()
    };
    // Ready only means that both containers were started.
    wait_for("the writer's word", || (run("reader", "cat /seen/word").stdout == "of the writer").then_some(()));
    assert_eq!(run("reader", "stat -c '%a %g' /data").ok(), "2777 3000");
    let full = run("writer", "dd if=/dev/urandom of=/data/much bs=1M count=64");
    assert!(full.code != 0 && full.stderr.contains("No space left"), "{full:?}");
    // kubelet's usage is not above the limit, so it does not evict the pod.
    let most = wait_for("kubelet measures the full volume", || used().filter(|used| *used > 24 << 20));
    assert!(most <= 32 << 20, "{most}");
    run("writer", "rm /data/much && sync").ok();
    wait_for("kubelet sees that the volume has room again", || used().filter(|used| *used < 8 << 20));
    assert_eq!(run("reader", "cat /seen/word").ok(), "of the writer");
    let object = pod.object().expect("it was not evicted");
    assert_eq!(object["status"]["phase"], "Running", "{object}");
    pod.delete();
    CaseResult::Passed
}

/// A RuntimeClass with resizable VMs, and their overhead.
const GROWING: &str = "apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: growing}
handler: growing
overhead:
  podFixed: {memory: 256Mi, cpu: 100m}
";

/// Requests other limits for the pod's container.
fn resize(cluster: &TestCluster, cpu: &str, memory: &str) {
    let limits = json!({"name": "main", "resources": {"limits": {"cpu": cpu, "memory": memory}}});
    let patch = json!({"spec": {"containers": [limits]}}).to_string();
    cluster.kubectl(&["patch", "pod", "resized", "--subresource=resize", "-p", &patch]).ok();
}

/// Returns the resize conditions of a pod.
fn resizes(pod: &Value) -> Vec<Value> {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let of = |condition: &Value| condition["type"].as_str().is_some_and(|name| name.starts_with("PodResize"));
    conditions.into_iter().filter(of).collect()
}

/// Returns the memory of the pod's guest in KiB.
fn total_memory_kib(pod: &ApiPod) -> u64 {
    pod.shell("awk '/MemTotal/ {print $2}' /proc/meminfo").trim().parse().expect("a number")
}

pub fn pod_resize(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let guest = nacelle_e2e::node::engine() != "host";
    if !nacelle_e2e::node::supports_limits() {
        return CaseResult::Skipped("without machines containers have no limits on a node with cgroup v1");
    }
    cluster.apply(GROWING);
    let class = if guest { "  runtimeClassName: growing\n" } else { "" };
    let limits = "    resources: {requests: {cpu: 50m, memory: 32Mi}, limits: {cpu: 200m, memory: 64Mi}}\n";
    let pod = cluster.create_pod("resized", &waiting("resized", class, limits));
    let before = pod.wait_until_ready();
    let born = total_memory_kib(&pod);
    let seen = |cpu: &str, memory: u64, processors: &str| {
        let limits = pod.shell("cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/memory.max");
        assert_eq!(limits, format!("{cpu} 100000\n{}", memory << 20));
        if guest {
            assert_eq!(pod.shell("nproc"), processors);
            // Blocks of 128 MiB, in addition to the initial 64 MiB for containers.
            let blocks = memory.saturating_sub(64).div_ceil(128);
            assert_eq!(total_memory_kib(&pod), born + ((blocks * 128) << 10), "{memory} MiB");
        }
    };
    seen("20000", 64, "1");
    // Up and down, each limit by itself and both at once.
    for (cpu, memory, quota, mib, processors) in [
        ("2500m", "64Mi", "250000", 64, "3"),
        ("1200m", "48Mi", "120000", 48, "2"),
        ("1200m", "300Mi", "120000", 300, "2"),
        ("1200m", "64Mi", "120000", 64, "2"),
        ("300m", "40Mi", "30000", 40, "1"),
    ] {
        resize(cluster, cpu, memory);
        let after = pod.wait_until("the new size is in force", |pod| {
            let limits = &container_status(pod, "main")["resources"]["limits"];
            (limits["cpu"] == cpu && limits["memory"] == memory && resizes(pod).is_empty()).then(|| pod.clone())
        });
        assert_eq!(container_status(&after, "main")["containerID"], container_status(&before, "main")["containerID"]);
        assert_eq!(container_status(&after, "main")["restartCount"], 0);
        seen(quota, mib, processors);
    }
    if guest {
        // More than the maximum of the VM: the pod reports it, and continues with its resources.
        resize(cluster, "4", "40Mi");
        let output = pod.wait_until("the resize is refused", |pod| {
            let messages =
                resizes(pod).into_iter().filter_map(|condition| condition["message"].as_str().map(str::to_owned));
            messages.into_iter().find(|message| message.contains("CPUs"))
        });
        assert!(output.contains("3 CPUs") && output.contains("4000"), "{output}");
        seen("30000", 40, "1");
        resize(cluster, "2", "40Mi");
        pod.wait_until("another resize is done", |pod| {
            (container_status(pod, "main")["resources"]["limits"]["cpu"] == "2" && resizes(pod).is_empty())
                .then_some(())
        });
        seen("200000", 40, "2");
    }
    pod.delete();
    CaseResult::Passed
}

pub fn forced_deletion(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let stubborn = waiting("stubborn", "", "").replace("trap 'exit 0' TERM; sleep", "trap '' TERM; sleep");
    let pod = cluster.create_pod("stubborn", &stubborn);
    pod.wait_until_ready();
    cluster.kubectl(&["delete", "pod", "stubborn", "--grace-period=0", "--force"]).ok();
    wait_for("nothing of it runs", || {
        let ready = fixture.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", "stubborn"]);
        ready.is_empty().then_some(())
    });
    assert!(pod.object().is_none());
    CaseResult::Passed
}

pub fn a_host_port(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let (web, _) = documents("web");
    let pod = cluster.create_pod(
        "web-port",
        &web.replace("name: web\n  namespace", "name: web-port\n  namespace").replace("18080", "18082"),
    );
    pod.wait_until_ready();
    let url = format!("http://{ADDRESS}:18082/");
    assert_eq!(fixture.node.run_in_netns("curl", &["-sf", "--max-time", "20", &url]).ok(), "hello from web-port");
    pod.delete();
    assert_ne!(
        fixture.node.run_in_netns("curl", &["-sf", "--max-time", "5", &url]).code,
        0,
        "the port is open after its pod's end"
    );
    CaseResult::Passed
}
