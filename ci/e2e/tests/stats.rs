//! Tests `crictl stats` and `statsp` with real VMs: the figures follow what containers do.

use nacelle_e2e::census::cgroups;
use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::node::engine;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually, path_from_env, run};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Returns a number in crictl's JSON, where 64-bit numbers are strings; 0 if it is absent.
fn number(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).or(value.as_u64()).unwrap_or(0)
}

/// Returns the `crictl stats` of a container.
#[track_caller]
fn stats(node: &TestNode, container: &RunningContainer) -> Value {
    let mut all = node.crictl.call_json(["stats", "--all", "--id", &container.id, "-o", "json"]);
    let list = all["stats"].as_array().expect("a list");
    assert_eq!(list.len(), 1, "{list:?}");
    all["stats"][0].take()
}

/// Returns the `crictl statsp` of a pod, once its VM answers.
#[track_caller]
fn pod_stats(node: &TestNode, pod: &RunningPod) -> Value {
    eventually("the pod has figures", || {
        let mut all = node.crictl.call_json(["statsp", "--id", &pod.id, "-o", "json"]);
        let found = all["stats"][0]["linux"].take();
        (number(&found["cpu"]["usageCoreNanoSeconds"]["value"]) > 0).then_some(found)
    })
}

fn cpu(stats: &Value) -> u64 {
    number(&stats["cpu"]["usageCoreNanoSeconds"]["value"])
}

#[test]
fn statistics_follow_the_load_of_containers() {
    const MIB: u64 = 1 << 20;
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("stats", node.directory()));
    let idle = pod.start(ContainerRequest::sh("idle", &image, "sleep 6000"));
    let busy = pod.start(ContainerRequest::sh("busy", &image, "while :; do :; done"));

    // CPU: a busy container has used more than before, and a rate; and more than an idle one.
    let first = eventually("a busy container has figures", || Some(stats(&node, &busy)).filter(|s| cpu(s) > 0));
    let second = eventually("its usage grows, and has a rate", || {
        let now = stats(&node, &busy);
        (cpu(&now) > cpu(&first) && number(&now["cpu"]["usageNanoCores"]["value"]) > 0).then_some(now)
    });
    assert!(number(&second["cpu"]["timestamp"]) > number(&first["cpu"]["timestamp"]));
    eventually("one that works uses more than one that sleeps", || {
        (cpu(&stats(&node, &busy)) > cpu(&stats(&node, &idle))).then_some(())
    });
    // The pressure figures exist, whatever their values.
    assert!(second["cpu"]["psi"]["Some"].is_object() && second["io"]["psi"]["Some"].is_object(), "{second}");
    node.crictl.call(["stop", "--timeout", "0", &busy.id]);
    let stopped = stats(&node, &busy);
    assert!(stopped["cpu"].is_null() && stopped["memory"].is_null(), "{stopped}");

    // Memory: a file in a tmpfs counts for the container.
    let before = stats(&node, &idle);
    idle.exec("dd if=/dev/zero of=/dev/shm/blob bs=1M count=16").ok();
    let after = eventually("16 MiB are in use", || {
        let now = stats(&node, &idle);
        (number(&now["memory"]["workingSetBytes"]["value"]) >= 16 * MIB).then_some(now)
    });
    let memory = |stats: &Value, name: &str| number(&stats["memory"][name]["value"]);
    assert!(memory(&before, "workingSetBytes") < 16 * MIB, "{before}");
    assert!(memory(&after, "usageBytes") >= memory(&after, "workingSetBytes"), "{after}");
    assert!(memory(&after, "pageFaults") > 0 && memory(&after, "rssBytes") > 0, "{after}");
    assert!(after["memory"]["availableBytes"].is_null(), "without a limit: {after}");

    // Disk: a file in the root counts.
    let layer = |stats: &Value, name: &str| number(&stats["writableLayer"][name]["value"]);
    let before =
        eventually("its root is measured", || Some(stats(&node, &idle)).filter(|stats| layer(stats, "inodesUsed") > 0));
    idle.exec("dd if=/dev/zero of=/blob bs=1M count=8; sync; touch /a /b /c").ok();
    let after = eventually("8 MiB and four files are in its root", || {
        let now = stats(&node, &idle);
        (layer(&now, "usedBytes") >= layer(&before, "usedBytes") + 8 * MIB
            && layer(&now, "inodesUsed") >= layer(&before, "inodesUsed") + 4)
            .then_some(now)
    });
    let images = node.crictl.call_json(["imagefsinfo", "-o", "json"]);
    let images = &images["status"]["containerFilesystems"][0]["fsId"]["mountpoint"];
    assert_eq!(&after["writableLayer"]["fsId"]["mountpoint"], images);
    idle.exec("rm /blob").ok();
    eventually("it is gone again", || (layer(&stats(&node, &idle), "usedBytes") < 8 * MIB).then_some(()));

    // The pod: its network, its processes, its containers.
    let before = pod_stats(&node, &pod);
    let received = |stats: &Value| number(&stats["network"]["defaultInterface"]["rxBytes"]["value"]);
    assert_eq!(before["network"]["defaultInterface"]["name"], "eth0");
    assert_eq!(before["containers"].as_array().map(Vec::len), Some(2), "{before}");
    assert!(number(&before["process"]["processCount"]["value"]) >= 1, "{before}");
    node.run_in_netns("ping", &["-c", "3", "-s", "1000", "-W", "60", &pod.ip()]).ok();
    eventually("the bytes are counted", || {
        (received(&pod_stats(&node, &pod)) >= received(&before) + 1000).then_some(())
    });
    let accounts = eventually("the machine costs more memory than its containers use", || {
        let accounts = pod.inspect()["accounts"].take();
        (accounts["difference"]["memoryBytes"].as_i64().unwrap_or(0) > 0).then_some(accounts)
    });
    assert!(accounts["machine"]["cpuNanos"].as_u64().is_some_and(|nanos| nanos > 0), "{accounts}");

    // The tables for users.
    eventually("the tables have what runs", || {
        let containers = node.crictl.try_call(["stats", "--seconds", "2"]).stdout;
        let pods = node.crictl.try_call(["statsp", "--seconds", "2"]).stdout;
        let all = containers.contains("idle") && pods.contains("stats");
        assert!(!containers.contains("busy"), "{containers}");
        all.then_some(())
    });
    pod.remove();
}

#[test]
fn statistics_report_limits_and_processes_and_can_be_filtered() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("limits", node.directory()));
    let limited = serde_json::json!({"resources": {"memory_limit_in_bytes": 33_554_432}});
    let one = pod.start(ContainerRequest::sh("one", &image, "sleep 6000 & sleep 6000").set("linux", limited));
    let two = pod.create(ContainerRequest::sh("two", &image, "true"));
    let found = eventually("a limit leaves something available", || {
        Some(stats(&node, &one)).filter(|stats| number(&stats["memory"]["availableBytes"]["value"]) > 0)
    });
    let memory = |name: &str| number(&found["memory"][name]["value"]);
    assert_eq!(memory("availableBytes") + memory("workingSetBytes"), 33_554_432, "{found}");
    assert!(stats(&node, &two)["cpu"].is_null());
    eventually("two sleeps, and perhaps the shell that started them", || {
        let count = number(&pod_stats(&node, &pod)["process"]["processCount"]["value"]);
        (2..=3).contains(&count).then_some(())
    });

    let ids = |arguments: &[&str]| -> Vec<String> {
        let all = node.crictl.call_json(["stats", "--all", "-o", "json"].iter().chain(arguments));
        let list = all["stats"].as_array().cloned().unwrap_or_default();
        list.iter().map(|stats| stats["attributes"]["id"].as_str().unwrap_or_default().to_owned()).collect()
    };
    assert_eq!(ids(&["--label", "name=one"]), [&*one.id]);
    assert_eq!(ids(&["--pod", &pod.id, "--label", "name=two"]), [&*two.id]);
    assert_eq!(ids(&["--pod", "0123456789ab"]), Vec::<String>::new());
    assert_eq!(ids(&[]).len(), 2);
    pod.remove();
}

/// Returns the metrics of a name in crictl's JSON: their labels and values.
fn metrics(list: &Value, name: &str) -> Vec<(Vec<String>, u64)> {
    let found = list.as_array().into_iter().flatten().filter(|metric| metric["name"] == name);
    let labels = |metric: &Value| serde_json::from_value(metric["labelValues"].clone()).unwrap_or_default();
    found.map(|metric| (labels(metric), number(&metric["value"]["value"]))).collect()
}

#[test]
fn metrics_of_a_container() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("metrics", node.directory()));
    let limited = serde_json::json!({"resources": {
        "cpu_period": 100_000, "cpu_quota": 20_000, "cpu_shares": 1024, "memory_limit_in_bytes": 67_108_864,
        "memory_swap_limit_in_bytes": 67_108_864,
    }});
    let command = "for i in 1 2 3 4 5 6 7 8; do echo hi >> /file$i; done; sync; nc -l -p 7000 & sleep 6000";
    let busy = pod.start(ContainerRequest::sh("busy", &image, command).set("linux", limited));
    let described = node.crictl.call_json(["metricdescs", "-o", "json"]);
    let described = described["descriptors"].as_array().expect("a list");
    let keys = |name: &Value| described.iter().find(|found| found["name"] == *name).map(|found| &found["labelKeys"]);

    let found = eventually("each described metric has a value", || {
        let all = node.crictl.call_json(["metricsp", "-o", "json"]);
        let found = all["podMetrics"].as_array()?.iter().find(|found| found["podSandboxId"] == pod.id.as_str())?;
        let of_container =
            found["containerMetrics"].as_array()?.iter().find(|c| c["containerId"] == busy.id.as_str())?;
        let list: Vec<Value> = [&found["metrics"], &of_container["metrics"]]
            .into_iter()
            .flat_map(|l| l.as_array())
            .flatten()
            .cloned()
            .collect();
        let missing = |name: &Value| !list.iter().any(|metric| metric["name"] == *name);
        // Whether a container has used a disk by now depends on the page cache.
        let may_miss = |name: &Value| {
            let name = name.as_str().unwrap_or_default();
            ["container_blkio_", "container_fs_reads_", "container_fs_writes_"]
                .iter()
                .any(|part| name.starts_with(part))
        };
        let missing: Vec<_> =
            described.iter().map(|d| &d["name"]).filter(|name| missing(name) && !may_miss(name)).collect();
        let list = Value::from(list);
        // Its processes start one after the other, and are counted after its threads.
        let count = |name: &str| metrics(&list, name).first().map_or(0, |(_, count)| *count);
        let processes = count("container_processes");
        let started = count("container_sockets") >= 1 && processes >= 2 && count("container_threads") >= processes;
        (missing.is_empty() && started).then_some(list)
    });
    for metric in found.as_array().expect("a list") {
        let keys = keys(&metric["name"]).and_then(Value::as_array).map(Vec::len);
        assert_eq!(metric["labelValues"].as_array().map(Vec::len), keys, "{metric}");
    }
    let one = |name: &str| {
        let found = metrics(&found, name);
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        found[0].1
    };
    assert_eq!((one("container_spec_cpu_quota"), one("container_spec_memory_limit_bytes")), (20_000, 67_108_864));
    assert!(one("container_file_descriptors") > one("container_sockets"));
    assert!(one("container_memory_max_usage_bytes") >= one("container_memory_usage_bytes"));
    assert!(one("container_memory_rss") > 0);
    assert!(one("container_fs_inodes_total") > one("container_fs_inodes_free"));
    let faults = metrics(&found, "container_memory_failures_total");
    assert!(faults.len() == 4 && faults[0].1 > 0, "{faults:?}");
    let names = |name: &str| metrics(&found, name).into_iter().filter_map(|(labels, _)| labels.last().cloned());
    assert!(names("container_network_receive_bytes_total").any(|name| name == "eth0"));
    assert!(names("container_fs_limit_bytes").all(|device| device.starts_with("/dev/vd")), "{found}");
    assert!(one("nacelle_machine_memory_bytes") > one("container_memory_rss"));
    pod.remove();
}

/// Returns the deviation of one figure from the other in thousandths.
fn deviation_in_thousandths(one: &Value, other: &Value) -> u64 {
    number(one).abs_diff(number(other)) * 1000 / number(other).max(1)
}

/// Returns whether the node's kernel counts the memory of cgroups: v1 does, v2 if the controller is delegated.
fn kernel_counts_memory() -> bool {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers");
    let counted = controllers.is_ok_and(|all| all.contains("memory")) || Path::new("/sys/fs/cgroup/memory").exists();
    if !counted {
        println!("skipped: control groups of this node count no memory");
    }
    counted
}

#[test]
fn statistics_of_a_vm_match_the_cgroup_counts_of_the_node() {
    if !kernel_counts_memory() {
        return;
    }
    let guest = engine() != "host";
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("cost", node.directory()));
    let busy = "dd if=/dev/urandom of=/dev/shm/blob bs=1M count=32 && touch /full; while :; do :; done";
    let busy = pod.start(ContainerRequest::sh("busy", &image, busy));
    eventually("it has its memory", || (busy.exec("test -e /full").code == 0).then_some(()));
    let accounts = eventually("ten seconds of work were counted", || {
        let accounts = pod.inspect()["accounts"].take();
        (number(&accounts["node"]["cpuNanos"]) > 10_000_000_000).then_some(accounts)
    });
    let (machine, counted) = (&accounts["machine"], &accounts["node"]);
    for figure in ["cpuNanos", "anonymousBytes"] {
        // What a process allocates before it enters its control group is not counted there.
        let is_little =
            figure == "anonymousBytes" && number(&machine[figure]).abs_diff(number(&counted[figure])) < 2 << 20;
        assert!(
            is_little || deviation_in_thousandths(&machine[figure], &counted[figure]) <= 20,
            "{figure} is more than 2 % away: {accounts}"
        );
    }
    assert!(number(&counted["memoryBytes"]) >= number(&counted["anonymousBytes"]), "{accounts}");
    let parts = number(&machine["guestBytes"]) + number(&machine["processBytes"]);
    assert_eq!(parts, number(&machine["memoryBytes"]), "{accounts}");
    assert!(number(&accounts["containers"]["memoryBytes"]) >= 32 << 20, "{accounts}");
    if guest {
        assert!(number(&machine["guestBytes"]) >= 32 << 20, "{accounts}");
        let system = number(&accounts["system"]["memoryBytes"]);
        assert!(system > 1 << 20 && system < number(&machine["guestBytes"]), "{accounts}");
    } else {
        assert!(accounts["system"].is_null() && number(&machine["guestBytes"]) < 32 << 20, "{accounts}");
    }
    pod.remove();

    let mut check = node.netns.command(path_from_env("NACELLE_BIN"));
    check.args(["check", "--overhead", "--config"]).arg(node.directory().join("config.toml"));
    let output = run::run(&mut check).ok();
    assert_eq!(guest, output.contains("kind: RuntimeClass"), "{output}");
    assert_eq!(guest, output.contains("overhead: {podFixed: {memory: "), "{output}");
    assert_eq!(node.crictl.call_json(["pods", "-o", "json"])["items"].as_array().map(Vec::len), Some(0));
}

#[test]
fn an_oom_kill_of_a_vm_is_reported() {
    if engine() == "host" {
        println!("skipped: without a guest there is no machine");
        return;
    }
    if !kernel_counts_memory() {
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("killed", node.directory()));
    let hungry = pod.start(ContainerRequest::sh("hungry", &image, "sleep 6000"));
    let used = |group: &Path, now: &str| fs::read_to_string(group.join(now)).ok()?.trim().parse::<u64>().ok();
    let limit = |group: &Path, now: &str, most: &str| -> Option<()> {
        // Memory that the guest does not use returns to the node over time.
        let (mut least, mut since) = (used(group, now)?, Instant::now());
        eventually("the machine has what it uses", || {
            let used = used(group, now)?;
            if used + (1 << 20) < least {
                (least, since) = (used, Instant::now());
            }
            (since.elapsed() > Duration::from_secs(10)).then_some(())
        });
        // The kernel rejects a limit below the current usage.
        eventually("it is limited", || fs::write(group.join(most), (used(group, now)? + (4 << 20)).to_string()).ok());
        Some(())
    };
    let files = [("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes")];
    let groups = cgroups(node.directory());
    let limited = groups.iter().flat_map(|group| files.iter().filter_map(|(now, most)| limit(group, now, most)));
    assert_eq!(limited.count(), 1, "the pod has one group that counts memory: {groups:?}");
    // The answer may be lost with the VM.
    let _ = hungry.exec("dd if=/dev/urandom of=/dev/shm/blob bs=1M count=48");
    let ended = eventually("its end is known", || {
        let mut known = node.crictl.call_json(["inspect", "-o", "json", &hungry.id]);
        (known["status"]["state"] == "CONTAINER_EXITED").then(|| known["status"].take())
    });
    assert_eq!((&ended["reason"], &ended["exitCode"]), (&json!("OOMKilled"), &json!(137)), "{ended}");
    let message = ended["message"].as_str().unwrap_or_default();
    assert!(message.starts_with("the node's OOM killer ended the VM"), "{ended}");
    pod.remove();
}
