//! Measures many clients that create and remove pods concurrently: the duration of each call by the number of existing pods.

use crate::cri::{BenchPod, RuntimeClient, milliseconds};
use nacelle_e2e::node::NodeOptions;
use nacelle_e2e::{TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// One call: its name, the number of pods when it began, its duration in milliseconds.
struct Call(&'static str, usize, f64);

/// Creates `pods` pods with a container each by `clients` concurrent clients, then removes them the same way. Panics on any error
/// and if anything is leaked. Returns `{"engine", "pods", "clients", "calls": [[NAME, PODS, MILLISECONDS], ...]}`.
pub fn measure(pods: usize, clients: usize) -> Value {
    let extra = "[sandbox]\nboot_timeout = \"15m\"\npod_request_timeout = \"10m\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { ipv6: false, extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let existing = AtomicUsize::new(0);
    let next = AtomicUsize::new(0);
    let client = |number: usize| {
        let logs = node.directory().join("logs").join(format!("client{number}"));
        RuntimeClient::connect(&node.directory().join("nacelle.sock"), &logs)
    };
    let create_pods = |number: usize| {
        let mut cri = client(number);
        let (mut created, mut calls): (Vec<BenchPod>, Vec<Call>) = Default::default();
        while next.fetch_add(1, Ordering::Relaxed) < pods {
            let before = existing.load(Ordering::Relaxed);
            let (pod, took) = cri.run_pod();
            existing.fetch_add(1, Ordering::Relaxed);
            calls.push(Call("RunPodSandbox", before, took));
            let before = existing.load(Ordering::Relaxed);
            let (container, took) = cri.start(&pod, &image, &["/bin/sh", "-c", "echo here; sleep 100000"]);
            calls.push(Call("container until its first byte", before, took));
            calls.push(Call("ExecSync", existing.load(Ordering::Relaxed), cri.exec(&container, &["/bin/true"])));
            created.push(pod);
        }
        (created, calls)
    };
    let remove = |number: usize, created: Vec<BenchPod>| {
        let mut cri = client(number);
        let remove = |pod: &BenchPod| {
            let (before, start) = (existing.load(Ordering::Relaxed), Instant::now());
            cri.remove_pod(pod);
            existing.fetch_sub(1, Ordering::Relaxed);
            Call("StopPodSandbox and RemovePodSandbox", before, milliseconds(start))
        };
        created.iter().map(remove).collect::<Vec<_>>()
    };
    let mut calls = Vec::new();
    std::thread::scope(|scope| {
        let creators: Vec<_> = (0..clients).map(|number| scope.spawn(move || create_pods(number))).collect();
        let created: Vec<_> =
            creators.into_iter().map(|creator| creator.join().expect("a client got an error")).collect();
        assert_eq!(node.pids_matching("nacelle-pod --dir ").len(), pods, "one process for each pod");
        let mut shares = Vec::new();
        for (share, created) in created {
            shares.push(share);
            calls.extend(created);
        }
        let removers: Vec<_> =
            shares.into_iter().enumerate().map(|(number, share)| scope.spawn(move || remove(number, share))).collect();
        for remover in removers {
            calls.extend(remover.join().expect("a client got an error"));
        }
    });
    eventually("nothing is leaked", || node.leaked().is_empty().then_some(()));
    let calls: Vec<_> = calls.iter().map(|Call(name, existing, took)| json!([name, existing, took])).collect();
    json!({"engine": nacelle_e2e::node::engine(), "pods": pods, "clients": clients, "calls": calls})
}
