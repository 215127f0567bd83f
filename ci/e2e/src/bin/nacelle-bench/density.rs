//! Measures the node's memory per sleeping pod by the number of pods: Nacelle's, containerd's, and plain VMs.

use crate::containerd::Containerd;
use crate::cri::{Cri, Pod};
use crate::memory::{self, MIB};
use crate::{accounts, benches, microvm};
use nacelle_e2e::node::{Options, engine};
use nacelle_e2e::{Image, Node, census};
use serde_json::{Value, json};
use std::process::Child;
use std::time::{Duration, Instant};

/// The subjects that can be measured.
pub const WHO: [&str; 4] = ["nacelle", "containerd", "qemu", "accounts"];
/// How long the node is left alone before it is measured.
const SETTLED: Duration = Duration::from_secs(8);

/// Returns `{"engine", "density": [{"runtime", "pods", "pss", "used", ...: MiB for each pod}, ...], "accounts": [...]}`; the
/// latter is the result of [`accounts::measure`].
pub fn measure(who: &[&str], stages: &[usize]) -> Value {
    let mut density = Vec::new();
    for who in who {
        match *who {
            "nacelle" => density.extend(nacelle(stages)),
            "containerd" => density.extend(containerd(stages)),
            "qemu" => density.extend(machines(stages)),
            _ => {}
        }
    }
    let accounts = who.contains(&"accounts").then(accounts::measure);
    json!({"engine": engine(), "density": density, "accounts": accounts})
}

pub fn node() -> Node {
    let extra = "[sandbox]\nboot_timeout = \"15m\"\npod_request_timeout = \"10m\"\n".to_owned();
    let node = Node::with(Options { ipv6: false, extra, ..Options::default() });
    memory::count(node.directory());
    node
}

/// Returns a client whose pods have their cgroups in the node's.
pub fn ours(node: &Node) -> Cri {
    let mut cri = Cri::connect(&node.directory().join("nacelle.sock"), &node.directory().join("logs"));
    cri.group = census::cgroup_parent(node.directory());
    cri
}

/// Creates pods up to each of these numbers, and measures at each; `processes` returns the processes of all pods.
fn stages<P>(
    runtime: &str,
    stages: &[usize],
    mut start: impl FnMut() -> P,
    processes: impl Fn(&[P]) -> Vec<i32>,
    more: impl Fn(f64) -> Value,
) -> (Vec<P>, Vec<Value>) {
    std::thread::sleep(SETTLED);
    let before = memory::in_use();
    let (mut pods, mut rows) = (Vec::new(), Vec::new());
    for wanted in stages {
        while pods.len() < *wanted {
            let started = Instant::now();
            pods.push(start());
            eprintln!("{runtime}: pod {} after {:.1} s", pods.len(), started.elapsed().as_secs_f32());
        }
        std::thread::sleep(SETTLED);
        let each = |bytes: f64| bytes / MIB / *wanted as f64;
        let now = memory::in_use();
        let programs = memory::proportional(&memory::with_descendants(&processes(&pods)));
        let parts: serde_json::Map<String, Value> =
            programs.iter().map(|(name, bytes)| (name.clone(), json!(each(*bytes)))).collect();
        let row = json!({
            "runtime": runtime, "pods": wanted, "pss": each(programs.values().sum()), "programs": parts,
            "used": each(now.all - before.all), "kernel": each(now.kernel - before.kernel),
            "more": more(*wanted as f64),
        });
        eprintln!("{row}");
        rows.push(row);
    }
    (pods, rows)
}

/// Creates a pod with one container that sleeps.
fn sleeping(cri: &mut Cri, image: &str) -> Pod {
    let (pod, _) = cri.run_pod();
    cri.start(&pod, image, &["/bin/sh", "-c", "echo here; exec sleep 1000000"]);
    pod
}

fn nacelle(numbers: &[usize]) -> Vec<Value> {
    let node = node();
    let image = node.image(&Image::busybox(), "busybox:1");
    let mut cri = ours(&node);
    // Allocations that only the first pod causes.
    let first = sleeping(&mut cri, &image);
    cri.remove_pod(&first);
    let charged = |pods: f64| {
        let group = memory::group(node.directory(), None);
        let each = |of: fn(&memory::Group) -> f64| group.as_ref().map(|group| of(group) / MIB / pods);
        let daemon = i32::try_from(node.daemon_pid()).unwrap_or_default();
        json!({
            "charged": each(|group| group.all), "charged_anonymous": each(|group| group.anonymous),
            "charged_kernel": each(|group| group.kernel),
            "daemon": benches::kilobytes(daemon, "status", "VmRSS:") / 1024.0,
        })
    };
    let roots = |_: &[Pod]| node.processes("");
    let name = format!("Nacelle, {}", engine());
    let (pods, rows) = stages(&name, numbers, || sleeping(&mut cri, &image), roots, charged);
    pods.iter().for_each(|pod| cri.remove_pod(pod));
    rows
}

fn containerd(numbers: &[usize]) -> Vec<Value> {
    let node = node();
    let image = node.registry.push(&Image::busybox(), "busybox:1");
    let (containerd, mut cri) = Containerd::start(&node);
    cri.pull(&image);
    let first = sleeping(&mut cri, &image);
    cri.remove_pod(&first);
    let of = |word: &str| {
        let all = census::processes(&node.directory().join("containerd")).into_iter();
        all.filter(|(_, line)| line.contains("containerd-shim") == (word == "shims")).map(|(pid, _)| pid).collect()
    };
    let daemon = |_: f64| {
        let daemons: Vec<i32> = of("daemon");
        let kib = daemons.iter().map(|pid| benches::kilobytes(*pid, "status", "VmRSS:"));
        json!({ "daemon": kib.sum::<f64>() / 1024.0 })
    };
    let (pods, rows) =
        stages("containerd + runc", numbers, || sleeping(&mut cri, &image), |_: &[Pod]| of("shims"), daemon);
    pods.iter().for_each(|pod| cri.remove_pod(pod));
    drop(containerd);
    rows
}

fn machines(numbers: &[usize]) -> Vec<Value> {
    let directory = tempfile::tempdir().expect("the directory for temporary files is writable");
    let initramfs = microvm::initramfs(directory.path());
    let pids = |machines: &[Child]| machines.iter().filter_map(|machine| i32::try_from(machine.id()).ok()).collect();
    let accel = if engine() == "kvm" { "kvm" } else { "tcg" };
    let name = format!("plain QEMU, {accel}");
    let start = || microvm::start(&initramfs, accel, &[]).0;
    let (machines, rows) = stages(&name, numbers, start, pids, |_| Value::Null);
    for mut machine in machines {
        machine.kill().expect("QEMU is our child");
        machine.wait().expect("QEMU is our child");
    }
    rows
}
