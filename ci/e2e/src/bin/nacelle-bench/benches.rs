//! Defines the benchmarks and their peers.

use crate::BenchResult;
use crate::containerd::Containerd;
use crate::cri::{BenchPod, RuntimeClient};
use crate::{guests, microvm, observed, restores};
use nacelle_e2e::node::{NodeOptions, handler_config};
use nacelle_e2e::{TestImage, TestNode};
use std::cell::RefCell;
use std::fs;
use std::time::{Duration, Instant};

type BenchFunction = fn(usize) -> BenchResult;

/// The name of a benchmark, what it measures, and its function.
pub const ALL: &[(&str, &str, BenchFunction)] = &[
    ("ready", "RunPodSandbox until the pod is ready, against plain QEMU microvm until init", measure_ready),
    (
        "ready-tuned",
        "the same, against QEMU microvm with the kernel parameters that our engine found",
        measure_ready_tuned,
    ),
    ("first-byte", "CreateContainer until the first byte in the log, against containerd and runc", measure_first_byte),
    (
        "pod",
        "RunPodSandbox, CreateContainer and StartContainer until the first byte in the log, against containerd and runc",
        measure_pod,
    ),
    ("exec", "ExecSync of /bin/true, against containerd and runc", measure_exec),
    ("pull", "PullImage of 200 MB from a local registry, against containerd", measure_pull),
    ("pod-memory", "private memory of the pod process beside the guest's, against its budget", measure_pod_memory),
    ("boot", "process start until the agent's answer: our VMM, QEMU microvm with KVM", guests::boot),
    ("snapshot", "process start until the agent's answer: restored from a snapshot, against a boot", guests::snapshot),
    ("memory", "resident memory of the pod process beside guest memory, with engine kvm", guests::memory),
    ("blk", "random reads of 4 KiB in the guest, a second, against QEMU microvm", guests::blk),
    ("net-send", "TCP from the guest to the node, against QEMU microvm with vhost-net", guests::net_send),
    ("net-receive", "TCP from the node to the guest, against QEMU microvm with vhost-net", guests::net_receive),
    ("daemon-memory", "resident memory of the daemon, against its budget", measure_daemon_memory),
    ("daemon-memory-50", "the same with fifty pods", measure_daemon_memory_with_50_pods),
    ("grow", "a running machine gets a processor and 128 MiB, against a new pod", measure_grow),
    ("shrink", "it loses them, against a new pod", measure_shrink),
    (
        "observed",
        "ExecSync with a sampled trace; pods and the daemon's CPU time with metrics and traces",
        observed::measure,
    ),
    (
        "restore",
        "RestorePod until the first command, of a program that has filled 60 MiB, against a new pod until the same",
        restores::measure,
    ),
    ("idle", "processor time of a pod that sleeps, in percent of one, against its budget", measure_idle),
];

fn measure_grow(runs: usize) -> BenchResult {
    measure_resizes(runs, 0)
}

fn measure_shrink(runs: usize) -> BenchResult {
    measure_resizes(runs, 1)
}

/// Measures the hot-plug and unplug of a vCPU and a block of memory; `which` selects one of the two steps.
fn measure_resizes(runs: usize, which: usize) -> BenchResult {
    let extra = handler_config("grows", "memory_mib = 128\nmax_vcpus = 2\nmax_memory_mib = 256\n");
    let node = TestNode::with_options(NodeOptions { ipv6: false, extra, ..NodeOptions::default() });
    let mut cri = nacelle_client(&node);
    let mut measured = BenchResult::new("ms", "a new pod");
    for _ in 0..runs {
        let (pod, started) = cri.run_pod_with("grows", false);
        // The first plug of a vCPU calibrates it, and the first plug of a memory block announces it.
        for _ in 0..2 {
            let took = [cri.resize(&pod, 2, 256 << 20), cri.resize(&pod, 1, 128 << 20)];
            measured.ours.push(took[which]);
        }
        measured.peers.push(started);
        cri.remove_pod(&pod);
    }
    measured
}

/// Returns a node whose pods have IPv4 only: the plugins' duplicate address detection of IPv6 is not part of the measurement.
fn ipv4_node() -> TestNode {
    TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() })
}

fn nacelle_client(node: &TestNode) -> RuntimeClient {
    RuntimeClient::connect(&node.directory().join("nacelle.sock"), &node.directory().join("logs"))
}

fn measure_ready(runs: usize) -> BenchResult {
    measure_pod_starts(runs, "qemu microvm", |_node| Vec::new())
}

fn measure_ready_tuned(runs: usize) -> BenchResult {
    measure_pod_starts(runs, "qemu microvm, tuned", clock_parameters)
}

/// Returns the kernel parameters about clocks that our engine passed to the running VM.
fn clock_parameters(node: &TestNode) -> Vec<String> {
    let machine = node.pids_matching("qemu")[0];
    let line = fs::read_to_string(format!("/proc/{machine}/cmdline")).expect("the machine runs");
    let words = line.split(['\0', ' ']);
    words.filter(|word| word.contains("tsc") || word.contains("lapic")).map(str::to_owned).collect()
}

fn measure_pod_starts(runs: usize, peer: &'static str, tuning: impl Fn(&TestNode) -> Vec<String>) -> BenchResult {
    let node = ipv4_node();
    let mut cri = nacelle_client(&node);
    let plain = microvm::initramfs(node.directory());
    let mut measured = BenchResult::new("ms", peer);
    // The first run of each fills the page cache.
    for run in 0..=runs {
        let (pod, took) = cri.run_pod();
        let parameters = tuning(&node);
        cri.remove_pod(&pod);
        let floor = microvm::boot(&plain, &parameters);
        if run > 0 {
            measured.ours.push(took);
            measured.peers.push(floor);
        }
    }
    measured
}

/// Measures Nacelle and containerd on one node, each with the image and a pod.
fn compare_with_containerd(measure: impl Fn(&mut RuntimeClient, &BenchPod, &str) -> f64, runs: usize) -> BenchResult {
    let node = ipv4_node();
    let image = node.registry.push(&TestImage::busybox(), "busybox:1");
    let (containerd, mut theirs) = Containerd::start(&node);
    let mut ours = nacelle_client(&node);
    let mut pods = Vec::new();
    for cri in [&mut ours, &mut theirs] {
        cri.pull(&image);
        pods.push(cri.run_pod().0);
    }
    let mut measured = BenchResult::new("ms", "containerd");
    for run in 0..=runs {
        let samples = (measure(&mut ours, &pods[0], &image), measure(&mut theirs, &pods[1], &image));
        if run > 0 {
            measured.ours.push(samples.0);
            measured.peers.push(samples.1);
        }
    }
    ours.remove_pod(&pods[0]);
    theirs.remove_pod(&pods[1]);
    drop(containerd);
    measured
}

fn measure_first_byte(runs: usize) -> BenchResult {
    compare_with_containerd(|cri, pod, image| cri.start(pod, image, &["/bin/echo", "first"]).1, runs)
}

/// Measures pods from nothing. The details are the exits of all VMs of the node while one of our pods starts, where debugfs counts them
/// (null if a VM ended meanwhile): each stands for work of the processor that a count of instructions does not have.
fn measure_pod(runs: usize) -> BenchResult {
    let exits = || fs::read_to_string("/sys/kernel/debug/kvm/exits").ok()?.trim().parse::<u64>().ok();
    let counted = RefCell::new(Vec::new());
    let one = |cri: &mut RuntimeClient, _: &BenchPod, image: &str| {
        let before = exits();
        let (pod, ready) = cri.run_pod();
        let (_, first) = cri.start(&pod, image, &["/bin/echo", "first"]);
        counted.borrow_mut().push(exits().zip(before).and_then(|(after, before)| after.checked_sub(before)));
        cri.remove_pod(&pod);
        ready + first
    };
    let mut measured = compare_with_containerd(one, runs);
    // Ours and containerd's alternate, and the first of each is not measured.
    let ours: Vec<_> = counted.into_inner().into_iter().step_by(2).skip(1).collect();
    measured.details = serde_json::json!([{"exits": ours}]);
    measured
}

fn measure_exec(runs: usize) -> BenchResult {
    let one = |cri: &mut RuntimeClient, pod: &BenchPod, image: &str| {
        let (container, _) = cri.start(pod, image, &["/bin/sh", "-c", "echo here; sleep 1000"]);
        cri.exec(&container, &["/bin/true"]);
        let mut samples: Vec<f64> = (0..9).map(|_| cri.exec(&container, &["/bin/true"])).collect();
        samples.sort_by(f64::total_cmp);
        samples[4]
    };
    compare_with_containerd(one, runs)
}

/// Returns layers that resemble software: half of each page repeats, half is noise.
fn large_image() -> TestImage {
    (0..4_u64).fold(TestImage::busybox(), |image, layer| {
        image.with_layer(|files| {
            for file in 0..50_u64 {
                let mut state = (layer << 32 | file).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                let bytes: Vec<u8> = (0..1_000_000_u32)
                    .map(|at| {
                        if at % 4096 < 2048 {
                            return b"the same words again "[at as usize % 21];
                        }
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        (state >> 32) as u8
                    })
                    .collect();
                files.add_file(&format!("data/{layer}/{file}"), &bytes, 0o644);
            }
        })
    })
}

fn measure_pull(runs: usize) -> BenchResult {
    let node = ipv4_node();
    let image = node.registry.push(&large_image(), "large:1");
    let (containerd, mut theirs) = Containerd::start(&node);
    let mut ours = nacelle_client(&node);
    let mut measured = BenchResult::new("ms", "containerd");
    for run in 0..=runs {
        let samples = (ours.pull(&image), theirs.pull(&image));
        ours.remove_image(&image);
        theirs.remove_image(&image);
        if run > 0 {
            measured.ours.push(samples.0);
            measured.peers.push(samples.1);
        }
    }
    drop(containerd);
    measured
}

/// Returns a field of /proc/PID/FILE in KiB.
pub fn read_kib(pid: i32, file: &str, line: &str) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let value = text.lines().find_map(|found| found.strip_prefix(line)?.split_whitespace().next()?.parse().ok());
    value.unwrap_or(f64::NAN)
}

fn measure_pod_memory(runs: usize) -> BenchResult {
    let node = ipv4_node();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut cri = nacelle_client(&node);
    let mut measured = BenchResult { peers: vec![10.0], ..BenchResult::new("MiB", "budget") };
    for _ in 0..runs {
        let (pod, _) = cri.run_pod();
        let (container, _) = cri.start(&pod, &image, &["/bin/sh", "-c", "echo here; sleep 1000"]);
        cri.exec(&container, &["/bin/true"]);
        // The guest's memory is shared with QEMU; private memory is the process's own.
        let process = node.pids_matching("nacelle-pod --dir ")[0];
        let own = ["Private_Clean:", "Private_Dirty:"].map(|line| read_kib(process, "smaps_rollup", line));
        measured.ours.push(own.iter().sum::<f64>() / 1024.0);
        cri.remove_pod(&pod);
    }
    measured
}

fn measure_daemon_memory(runs: usize) -> BenchResult {
    let node = ipv4_node();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut cri = nacelle_client(&node);
    let mut measured = BenchResult { peers: vec![32.0], ..BenchResult::new("MiB", "budget") };
    for _ in 0..runs {
        let (pod, _) = cri.run_pod();
        cri.start(&pod, &image, &["/bin/echo", "here"]);
        let pid = i32::try_from(node.daemon_pid()).unwrap_or_default();
        measured.ours.push(read_kib(pid, "status", "VmRSS:") / 1024.0);
        cri.remove_pod(&pod);
    }
    measured
}

fn measure_daemon_memory_with_50_pods(runs: usize) -> BenchResult {
    let node = ipv4_node();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut cri = nacelle_client(&node);
    let mut measured = BenchResult { peers: vec![40.0], ..BenchResult::new("MB", "budget") };
    for _ in 0..runs {
        let pods: Vec<BenchPod> = (0..50).map(|_| cri.run_pod().0).collect();
        for pod in &pods {
            cri.start(pod, &image, &["/bin/sh", "-c", "echo here; sleep 100000"]);
        }
        let pid = i32::try_from(node.daemon_pid()).unwrap_or_default();
        measured.ours.push(read_kib(pid, "status", "VmRSS:") * 1024.0 / 1e6);
        pods.iter().for_each(|pod| cri.remove_pod(pod));
    }
    measured
}

/// How long an idle pod is observed.
const IDLE_TIME: Duration = Duration::from_secs(30);

fn measure_idle(runs: usize) -> BenchResult {
    let node = ipv4_node();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut cri = nacelle_client(&node);
    let mut measured = BenchResult { peers: vec![0.2], ..BenchResult::new("%", "budget") };
    let (pod, _) = cri.run_pod();
    cri.start(&pod, &image, &["/bin/sh", "-c", "echo here; sleep 100000"]);
    // Work that a start leaves for later is done by then.
    std::thread::sleep(Duration::from_secs(5));
    let programs = ["nacelle-pod --dir ", "nacelle-fs ", "nacelle-agent ", "qemu"];
    let processes = programs.map(|name| node.pids_matching(name));
    let used = || processes.each_ref().map(|pids| pids.iter().map(|pid| cpu_time(*pid)).sum::<Duration>());
    for _ in 0..runs {
        let (before, start) = (used(), Instant::now());
        std::thread::sleep(IDLE_TIME);
        let percent = |time: Duration| time.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
        let each: Vec<f64> = before.iter().zip(used()).map(|(before, after)| percent(after - *before)).collect();
        measured.ours.push(each.iter().sum());
        measured.details = serde_json::json!([programs.iter().zip(each).collect::<std::collections::BTreeMap<_, _>>()]);
    }
    cri.remove_pod(&pod);
    measured
}

/// Returns the CPU time of a process, including its ended threads: fields 14 and 15 of its `stat`, in hundredths of a second
/// (proc(5)).
fn cpu_time(pid: i32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the pod runs");
    // The command's name may contain spaces and parentheses: fields count from the last one.
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace().skip(11).take(2);
    Duration::from_millis(fields.filter_map(|field| field.parse::<u64>().ok()).sum::<u64>() * 10)
}
