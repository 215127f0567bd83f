//! Tests what kubelet reports of pods: streams, logs, statistics, metrics.

use super::CaseResult;
use super::pod_features::waiting;
use crate::fixture::KubeletFixture;
use crate::kubelet::uses_events;
use crate::pods::{ObservedPod, StaticPod, wait_for};
use crate::websocket::ExecSession;
use serde_json::Value;
use std::fs;

pub fn exec_attach_and_logs(fixture: &KubeletFixture) -> CaseResult {
    let echo = "    stdin: true\n    stdinOnce: true\n";
    let manifest = waiting("streams", "  restartPolicy: Never\n", echo)
        .replace("trap 'exit 0' TERM; sleep 1000000 & wait", "echo ready; while read line; do echo got $line; done");
    let pod = StaticPod::new(fixture, "streams", &manifest);
    pod.wait_until_ready();
    let exec = pod.shell("main", "cat; echo oops >&2; exit 9", b"a line\n");
    assert_eq!((exec.stdout.as_str(), exec.stderr.as_str(), exec.code()), ("a line\n", "oops\n", Some(9)), "{exec:?}");
    let much = vec![b'x'; 300_000];
    assert_eq!(pod.shell("main", "wc -c", &much).stdout.trim(), "300000");
    assert_ne!(pod.try_run("main", &["false"]).code, 0);

    // The container ends with the attached input, because it has stdinOnce.
    let path = format!("/attach/default/{}/main?output=1&error=1&input=1", pod.full_name());
    let attached = ExecSession::run(fixture.kubelet.netns(), &path, b"one\ntwo\n");
    assert_eq!(attached.stdout, "got one\ngot two\n");
    pod.wait_for_phase("Succeeded");
    assert_eq!(pod.log("main"), "ready\ngot one\ngot two");
    let query = format!("/containerLogs/default/{}/main?tailLines=1&timestamps=true", pod.full_name());
    let tail = fixture.kubelet.request("GET", &query).ok();
    assert!(tail.ends_with("Z got two") && tail.lines().count() == 1, "{tail}");
    pod.remove();
    CaseResult::Passed
}

pub fn log_rotation(fixture: &KubeletFixture) -> CaseResult {
    let prints = "i=0; while :; do i=$((i+1)); echo line $i of a log that grows and grows; sleep 0.002; done";
    let pod = StaticPod::new(
        fixture,
        "prints",
        &waiting("prints", "", "")
            .replace("trap 'exit 0' TERM; sleep 1000000 & wait", prints)
            .replace("Seconds: 5", "Seconds: 1"),
    );
    let status = pod.wait_until_ready();
    let uid = status["metadata"]["annotations"]["kubernetes.io/config.hash"].as_str().expect("a static pod has one");
    let directory = format!("/var/log/pods/default_{}_{uid}/main", pod.full_name());
    let files = || fs::read_dir(&directory).map_or(0, Iterator::count);
    wait_for("the log was turned over twice", || (files() == 3).then_some(()));
    // The log that kubelet reads is the log that is written.
    let number = |text: &str| text.split(' ').nth(1).and_then(|word| word.parse::<u64>().ok());
    let last = || pod.log("main").lines().last().and_then(number).unwrap_or(0);
    let before = last();
    wait_for("the log goes on", || (last() > before).then_some(()));
    pod.remove();
    CaseResult::Passed
}

/// Returns the element of a list whose field at `pointer` has this value.
fn find<'v>(list: &'v Value, pointer: &str, is: &str) -> Option<&'v Value> {
    list.as_array()?.iter().find(|item| item.pointer(pointer).and_then(Value::as_str) == Some(is))
}

pub fn statistics_and_metrics(fixture: &KubeletFixture) -> CaseResult {
    let limits = "    resources: {limits: {memory: 64Mi}}\n    volumeMounts: [{name: data, mountPath: /data}]\n";
    let volume = "  volumes: [{name: data, emptyDir: {}}]\n";
    let pod = StaticPod::new(fixture, "measured", &waiting("measured", volume, limits));
    pod.wait_until_ready();
    let work = "dd if=/dev/zero of=/data/file bs=1M count=3; i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done";
    assert_eq!(pod.shell("main", work, b"").code(), Some(0));
    let name = pod.full_name();
    wait_for("the summary contains the pod", || {
        let summary = fixture.kubelet.get_json("/stats/summary");
        let pod = find(&summary["pods"], "/podRef/name", &name)?;
        let main = find(&pod["containers"], "/name", "main")?;
        let number = |value: &Value, pointer: &str| value.pointer(pointer).and_then(Value::as_u64);
        let network = number(pod, "/network/rxBytes")?;
        let volume = number(find(&pod["volume"], "/name", "data")?, "/usedBytes")?;
        let cpu = [number(pod, "/cpu/usageCoreNanoSeconds")?, number(main, "/cpu/usageCoreNanoSeconds")?];
        let memory = [number(pod, "/memory/workingSetBytes")?, number(main, "/memory/workingSetBytes")?];
        number(main, "/rootfs/usedBytes")?;
        number(main, "/logs/usedBytes")?;
        let processes = number(pod, "/process_stats/process_count")?;
        let memory_is_reported = memory.iter().all(|value| *value > 0) || !nacelle_e2e::node::supports_limits();
        let all = network > 0 && volume >= 3 << 20 && cpu.iter().all(|value| *value > 0) && memory_is_reported;
        (all && processes >= 2).then_some(())
    });
    let has = |path: &str, names: &[&str]| {
        wait_for(&format!("{path} contains the pod"), || {
            let text = fixture.kubelet.get(path);
            let of_pod: Vec<&str> = text.lines().filter(|line| line.contains(&format!("pod=\"{name}\""))).collect();
            names.iter().all(|name| of_pod.iter().any(|line| line.starts_with(&format!("{name}{{")))).then_some(())
        });
    };
    has(
        "/metrics/resource",
        &[
            "container_cpu_usage_seconds_total",
            "container_memory_working_set_bytes",
            "pod_cpu_usage_seconds_total",
            "container_start_time_seconds",
        ],
    );
    has(
        "/metrics/cadvisor",
        &[
            "container_cpu_usage_seconds_total",
            "container_memory_working_set_bytes",
            "container_network_receive_bytes_total",
            "container_processes",
        ],
    );
    pod.remove();
    CaseResult::Passed
}

pub fn evented_pleg(fixture: &KubeletFixture) -> CaseResult {
    if !uses_events() {
        return CaseResult::Skipped("with EventedPLEG this version of kubelet starts running sidecars again");
    }
    let manifest = waiting("events", "  restartPolicy: Never\n", "")
        .replace("trap 'exit 0' TERM; sleep 1000000 & wait", "until [ -e /go ]; do sleep 0.2; done");
    let pod = StaticPod::new(fixture, "events", &manifest);
    pod.wait_until_ready();
    pod.run("main", &["touch", "/go"]);
    pod.wait_for_phase("Succeeded");
    pod.remove();
    let metrics = fixture.kubelet.request("GET", "/metrics").ok();
    let number = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|number| number.parse::<f64>().ok()).unwrap_or(0.0)
    };
    assert!(number("kubelet_evented_pleg_connection_success_count") >= 1.0, "kubelet did not subscribe");
    assert!(number("kubelet_evented_pleg_connection_latency_seconds_count") >= 3.0, "too few events came");
    CaseResult::Passed
}
