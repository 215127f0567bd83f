//! Measures many clients that create and remove pods concurrently: the duration of each call by the number of existing pods.

use crate::cri::{Cri, Pod, milliseconds};
use nacelle_e2e::node::Options;
use nacelle_e2e::{Image, Node, eventually};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// One call: its name, the number of pods when it began, its duration in milliseconds.
struct Call(&'static str, usize, f64);

/// Creates `pods` pods with a container each by `clients` concurrent clients, then removes them the same way. Panics on any error
/// and if anything is leaked. Returns `{"engine", "pods", "clients", "calls": [[NAME, PODS, MILLISECONDS], ...]}`.
pub fn measure(pods: usize, clients: usize) -> Value {
    let extra = "[sandbox]\nboot_timeout = \"15m\"\npod_request_timeout = \"10m\"\n".to_owned();
    let node = Node::with(Options { ipv6: false, extra, ..Options::default() });
    let image = node.image(&Image::busybox(), "busybox:1");
    let there = AtomicUsize::new(0);
    let next = AtomicUsize::new(0);
    let client = |number: usize| {
        let logs = node.directory().join("logs").join(format!("client{number}"));
        Cri::connect(&node.directory().join("nacelle.sock"), &logs)
    };
    let make = |number: usize| {
        let mut cri = client(number);
        let (mut made, mut calls): (Vec<Pod>, Vec<Call>) = Default::default();
        while next.fetch_add(1, Ordering::Relaxed) < pods {
            let before = there.load(Ordering::Relaxed);
            let (pod, took) = cri.run_pod();
            there.fetch_add(1, Ordering::Relaxed);
            calls.push(Call("RunPodSandbox", before, took));
            let before = there.load(Ordering::Relaxed);
            let (container, took) = cri.start(&pod, &image, &["/bin/sh", "-c", "echo here; sleep 100000"]);
            calls.push(Call("container until its first byte", before, took));
            calls.push(Call("ExecSync", there.load(Ordering::Relaxed), cri.exec(&container, &["/bin/true"])));
            made.push(pod);
        }
        (made, calls)
    };
    let remove = |number: usize, made: Vec<Pod>| {
        let mut cri = client(number);
        let remove = |pod: &Pod| {
            let (before, start) = (there.load(Ordering::Relaxed), Instant::now());
            cri.remove_pod(pod);
            there.fetch_sub(1, Ordering::Relaxed);
            Call("StopPodSandbox and RemovePodSandbox", before, milliseconds(start))
        };
        made.iter().map(remove).collect::<Vec<_>>()
    };
    let mut calls = Vec::new();
    std::thread::scope(|scope| {
        let makers: Vec<_> = (0..clients).map(|number| scope.spawn(move || make(number))).collect();
        let made: Vec<_> = makers.into_iter().map(|maker| maker.join().expect("a client got an error")).collect();
        assert_eq!(node.processes("nacelle-pod ").len(), pods, "one process for each pod");
        let mut shares = Vec::new();
        for (share, made) in made {
            shares.push(share);
            calls.extend(made);
        }
        let removers: Vec<_> =
            shares.into_iter().enumerate().map(|(number, share)| scope.spawn(move || remove(number, share))).collect();
        for remover in removers {
            calls.extend(remover.join().expect("a client got an error"));
        }
    });
    eventually("nothing is left", || node.left().is_empty().then_some(()));
    let calls: Vec<_> = calls.iter().map(|Call(name, there, took)| json!([name, there, took])).collect();
    json!({"engine": nacelle_e2e::node::engine(), "pods": pods, "clients": clients, "calls": calls})
}
