//! Measures how far Nacelle's statistics of pods differ from what the node's kernel counts for their cgroups.

use crate::cri::{BenchPod, RuntimeClient};
use crate::density;
use crate::memory::{self, CgroupUsage, MIB};
use nacelle_e2e::node::engine;
use nacelle_e2e::{TestImage, eventually};
use serde_json::{Value, json};
use std::time::Duration;

/// The loads of a container: 64 MiB each, then the container sleeps. The process that holds memory uses twice as much while it
/// reads.
const LOADS: [(&str, &str); 5] = [
    ("nothing", "touch /full"),
    ("memory of a process", "(head -c 33554432 /dev/urandom; touch /full; sleep 1000000) | tail -c 33554432"),
    ("files in memory", "head -c 67108864 /dev/urandom >/dev/shm/blob; touch /full"),
    ("files on its root", "head -c 67108864 /dev/urandom >/blob; sync; touch /full"),
    ("work", "touch /full; while :; do :; done"),
];
/// How long a container is left alone before it is measured.
const SETTLE_TIME: Duration = Duration::from_secs(8);

/// The statistics of a pod in bytes and nanoseconds, and the kernel's counts just before and just after them, because the two
/// cannot be read at the same moment. Errors are computed for both: the distance from the nearer count (0 between them), and from
/// the later one.
struct PodSample {
    accounts: Value,
    stats: f64,
    before: CgroupUsage,
    group: CgroupUsage,
}

impl PodSample {
    /// Returns one figure of the statistics.
    fn reported(&self, account: &str, figure: &str) -> f64 {
        self.accounts[account][figure].as_f64().unwrap_or(f64::NAN)
    }

    /// Returns the error of a figure in percent: its distance from the counts around it (0 if it is between them), and from the
    /// later count.
    fn errors(&self, account: &str, figure: &str, counted: fn(&CgroupUsage) -> f64) -> [f64; 2] {
        let reported = self.reported(account, figure);
        let (one, other) = (counted(&self.before), counted(&self.group));
        [reported.clamp(one.min(other), one.max(other)), other].map(|counted| (reported - counted) / counted * 100.0)
    }
}

/// Measures each load in two pods. Returns `[{"engine", "load", "said": {...}, "counted_before": {...}, "counted": {...},
/// "errors": {...: %}, "errors_after": {...: %}}, ...]`, the memory in MiB; null if the node's kernel does not count.
pub fn measure() -> Value {
    let node = density::counting_node();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut cri = density::nacelle_client(&node);
    let mut rows = Vec::new();
    for (load, script) in LOADS.iter().chain(&LOADS) {
        let script = format!("echo here; until test -e /go; do sleep 1; done; {script}; sleep 1000000");
        let (pod, _) = cri.run_pod();
        let (container, _) = cri.start(&pod, &image, &["/bin/sh", "-c", &script]);
        std::thread::sleep(SETTLE_TIME);
        let sample = |cri: &mut RuntimeClient, pod: &BenchPod| {
            let group = || memory::read_cgroup(node.directory(), Some(&pod.id));
            let before = group()?;
            let accounts = cri.accounts(pod);
            let group = group()?;
            Some(PodSample { accounts, stats: cri.memory_usage(pod), before, group })
        };
        let Some(before) = sample(&mut cri, &pod) else {
            cri.remove_pod(&pod);
            return Value::Null;
        };
        cri.exec(&container, &["/bin/touch", "/go"]);
        eventually("the load has started", || {
            let output = cri.exec_output(&container, &["/bin/sh", "-c", "test -e /full && echo yes || echo no"]);
            (output.trim() == "yes").then_some(())
        });
        std::thread::sleep(SETTLE_TIME);
        let after = sample(&mut cri, &pod).expect("the group was there before");
        cri.remove_pod(&pod);
        let row = row(load, &before, &after);
        eprintln!("{row}");
        rows.push(row);
    }
    Value::Array(rows)
}

fn row(load: &str, before: &PodSample, after: &PodSample) -> Value {
    let reported = |figure: &str| after.reported("machine", figure);
    let counted = |group: &CgroupUsage| {
        json!({
            "anonymous": group.anonymous / MIB, "all": group.all / MIB, "kernel": group.kernel / MIB,
            "grew": (group.all - before.group.all) / MIB, "cpu_seconds": group.cpu_nanos / 1e9,
        })
    };
    let machine = after.errors("machine", "anonymousBytes", |group| group.anonymous);
    let node = after.errors("node", "memoryBytes", |group| group.all);
    let node_anonymous = after.errors("node", "anonymousBytes", |group| group.anonymous);
    let cpu = after.errors("machine", "cpuNanos", |group| group.cpu_nanos);
    let errors = |n: usize| json!({ "machine": machine[n], "node": node[n], "node_anonymous": node_anonymous[n], "cpu": cpu[n] });
    json!({
        "engine": engine(), "load": load,
        "said": {
            "machine": reported("anonymousBytes") / MIB, "node": after.reported("node", "memoryBytes") / MIB,
            "containers": after.stats / MIB, "containers_grew": (after.stats - before.stats) / MIB,
            "cpu_seconds": reported("cpuNanos") / 1e9,
        },
        "counted_before": counted(&after.before), "counted": counted(&after.group),
        "errors": errors(0), "errors_after": errors(1),
    })
}
