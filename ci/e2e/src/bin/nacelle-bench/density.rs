//! Measures the node's memory per sleeping pod by the number of pods: Nacelle's, containerd's, and plain VMs.

use crate::containerd::Containerd;
use crate::cri::{BenchPod, RuntimeClient};
use crate::memory::{self, MIB};
use crate::{accounts, benches, microvm};
use nacelle_e2e::node::{NodeOptions, engine};
use nacelle_e2e::{TestImage, TestNode, census};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Child;
use std::time::{Duration, Instant};

/// The subjects that can be measured.
pub const SUBJECTS: [&str; 4] = ["nacelle", "containerd", "qemu", "accounts"];
/// How long the node is left alone before it is measured.
const SETTLE_TIME: Duration = Duration::from_secs(8);
/// A row has the mean duration of this many starts, the last ones before it.
const STARTS_IN_MEAN: usize = 10;

/// The milliseconds of a start's parts by name.
type StartTimes = BTreeMap<String, f64>;

/// Returns `{"engine", "density": [{"runtime", "pods", "pss", "used", ...: MiB for each pod, "start": {NAME: ms}}, ...],
/// "accounts": [...]}`; the latter is the result of [`accounts::measure`].
pub fn measure(subjects: &[&str], stages: &[usize]) -> Value {
    let mut density = Vec::new();
    for subject in subjects {
        match *subject {
            "nacelle" => density.extend(measure_nacelle(stages)),
            "containerd" => density.extend(measure_containerd(stages)),
            "qemu" => density.extend(measure_qemu(stages)),
            _ => {}
        }
    }
    let accounts = subjects.contains(&"accounts").then(accounts::measure);
    json!({"engine": engine(), "density": density, "accounts": accounts})
}

pub fn counting_node() -> TestNode {
    let extra = "[sandbox]\nboot_timeout = \"15m\"\npod_request_timeout = \"10m\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { ipv6: false, extra, ..NodeOptions::default() });
    memory::enable_accounting(node.directory());
    node
}

/// Returns a client whose pods have their cgroups in the node's.
pub fn nacelle_client(node: &TestNode) -> RuntimeClient {
    let mut cri = RuntimeClient::connect(&node.directory().join("nacelle.sock"), &node.directory().join("logs"));
    cri.cgroup_parent = census::cgroup_parent(node.directory());
    cri
}

/// Creates pods up to each of these numbers, and measures at each; `processes` returns the processes of all pods.
fn measure_stages<P>(
    runtime: &str,
    stages: &[usize],
    mut start: impl FnMut() -> (P, StartTimes),
    processes: impl Fn(&[P]) -> Vec<i32>,
    more: impl Fn(f64) -> Value,
) -> (Vec<P>, Vec<Value>) {
    std::thread::sleep(SETTLE_TIME);
    let before = memory::node_memory_in_use();
    let (mut pods, mut starts, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for wanted in stages {
        while pods.len() < *wanted {
            let started = Instant::now();
            let (pod, times) = start();
            pods.push(pod);
            starts.push(times);
            eprintln!("{runtime}: pod {} after {:.1} s", pods.len(), started.elapsed().as_secs_f32());
        }
        std::thread::sleep(SETTLE_TIME);
        let each = |bytes: f64| bytes / MIB / *wanted as f64;
        let now = memory::node_memory_in_use();
        let programs = memory::pss_by_program(&memory::with_descendants(&processes(&pods)));
        let parts: serde_json::Map<String, Value> =
            programs.iter().map(|(name, bytes)| (name.clone(), json!(each(*bytes)))).collect();
        let row = json!({
            "runtime": runtime, "pods": wanted, "pss": each(programs.values().sum()), "programs": parts,
            "used": each(now.all - before.all), "kernel": each(now.kernel - before.kernel),
            "more": more(*wanted as f64), "start": mean(&starts[starts.len().saturating_sub(STARTS_IN_MEAN)..]),
        });
        eprintln!("{row}");
        rows.push(row);
    }
    (pods, rows)
}

/// Returns the mean of each part, over all of these starts.
fn mean(starts: &[StartTimes]) -> StartTimes {
    let mut sums = StartTimes::new();
    for (name, milliseconds) in starts.iter().flatten() {
        *sums.entry(name.clone()).or_default() += milliseconds;
    }
    sums.into_iter().map(|(name, sum)| (name, sum / starts.len() as f64)).collect()
}

/// Creates a pod with one container that sleeps.
fn run_sleeping_pod(cri: &mut RuntimeClient, image: &str) -> (BenchPod, StartTimes) {
    let (pod, sandbox) = cri.run_pod();
    let (_, first_byte) = cri.start(&pod, image, &["/bin/sh", "-c", "echo here; exec sleep 1000000"]);
    (pod, StartTimes::from([("RunPodSandbox".to_owned(), sandbox), ("first byte".to_owned(), first_byte)]))
}

/// Like `run_sleeping_pod`, with the steps that Nacelle has recorded.
fn run_recorded_pod(cri: &mut RuntimeClient, image: &str) -> (BenchPod, StartTimes) {
    let (pod, mut times) = run_sleeping_pod(cri, image);
    times.extend(cri.start_steps(&pod));
    (pod, times)
}

fn measure_nacelle(stages: &[usize]) -> Vec<Value> {
    let node = counting_node();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut cri = nacelle_client(&node);
    // Allocations that only the first pod causes.
    let (first, _) = run_sleeping_pod(&mut cri, &image);
    cri.remove_pod(&first);
    let charged = |pods: f64| {
        let group = memory::read_cgroup(node.directory(), None);
        let each = |of: fn(&memory::CgroupUsage) -> f64| group.as_ref().map(|group| of(group) / MIB / pods);
        let daemon = i32::try_from(node.daemon_pid()).unwrap_or_default();
        json!({
            "charged": each(|group| group.all), "charged_anonymous": each(|group| group.anonymous),
            "charged_kernel": each(|group| group.kernel),
            "daemon": benches::read_kib(daemon, "status", "VmRSS:") / 1024.0,
        })
    };
    let roots = |_: &[BenchPod]| node.pids_matching("");
    let name = format!("Nacelle, {}", engine());
    let (pods, rows) = measure_stages(&name, stages, || run_recorded_pod(&mut cri, &image), roots, charged);
    pods.iter().for_each(|pod| cri.remove_pod(pod));
    rows
}

fn measure_containerd(stages: &[usize]) -> Vec<Value> {
    let node = counting_node();
    let image = node.registry.push(&TestImage::busybox(), "busybox:1");
    let (containerd, mut cri) = Containerd::start(&node);
    cri.pull(&image);
    let (first, _) = run_sleeping_pod(&mut cri, &image);
    cri.remove_pod(&first);
    let of = |word: &str| {
        let all = census::processes(&node.directory().join("containerd")).into_iter();
        all.filter(|(_, line)| line.contains("containerd-shim") == (word == "shims")).map(|(pid, _)| pid).collect()
    };
    let daemon = |_: f64| {
        let daemons: Vec<i32> = of("daemon");
        let kib = daemons.iter().map(|pid| benches::read_kib(*pid, "status", "VmRSS:"));
        json!({ "daemon": kib.sum::<f64>() / 1024.0 })
    };
    let (pods, rows) = measure_stages(
        "containerd + runc",
        stages,
        || run_sleeping_pod(&mut cri, &image),
        |_: &[BenchPod]| of("shims"),
        daemon,
    );
    pods.iter().for_each(|pod| cri.remove_pod(pod));
    drop(containerd);
    rows
}

fn measure_qemu(stages: &[usize]) -> Vec<Value> {
    let directory = tempfile::tempdir().expect("the directory for temporary files is writable");
    let initramfs = microvm::initramfs(directory.path());
    let pids = |machines: &[Child]| machines.iter().filter_map(|machine| i32::try_from(machine.id()).ok()).collect();
    let accel = if engine() == "kvm" { "kvm" } else { "tcg" };
    let name = format!("plain QEMU, {accel}");
    let start = || (microvm::start_qemu(&initramfs, accel, &[]).0, StartTimes::new());
    let (machines, rows) = measure_stages(&name, stages, start, pids, |_| Value::Null);
    for mut machine in machines {
        machine.kill().expect("QEMU is our child");
        machine.wait().expect("QEMU is our child");
    }
    rows
}
