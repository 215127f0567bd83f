//! Runs a real kubelet against Nacelle: it runs the cases and counts the results. `ci/kubelet` starts it, in namespaces of its
//! own.
//!
//! Cases that share the node run concurrently; those that kill or reconfigure daemons run exclusively, one after the other.

mod cases;
mod cluster;
mod disk;
mod fixture;
mod kubelet;
mod pods;
mod websocket;

use cases::{CaseResult, ExclusiveCase, SharedCase};
use fixture::KubeletFixture;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

/// The results of the cases.
#[derive(Default)]
struct Tally {
    passed: usize,
    failed: Vec<String>,
    skipped: usize,
}

impl Tally {
    fn add(&mut self, name: &str, seconds: f32, result: std::thread::Result<CaseResult>) {
        match result {
            Ok(CaseResult::Passed) => {
                self.passed += 1;
                println!("ok       {name} ({seconds:.1} s)");
            }
            Ok(CaseResult::Skipped(why)) => {
                self.skipped += 1;
                println!("skipped  {name}: {why}");
            }
            Err(_) => {
                self.failed.push(name.to_owned());
                println!("FAILED   {name} ({seconds:.1} s)");
            }
        }
    }
}

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let named = |name: &str| wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str()));
    let shared: Vec<SharedCase> = cases::SHARED.iter().copied().filter(|(name, _)| named(name)).collect();
    let exclusive: Vec<ExclusiveCase> = cases::EXCLUSIVE.iter().copied().filter(|(name, _)| named(name)).collect();
    let cluster: Vec<SharedCase> = cases::CLUSTER.iter().copied().filter(|(name, _)| named(name)).collect();
    let cluster_exclusive: Vec<ExclusiveCase> =
        cases::CLUSTER_EXCLUSIVE.iter().copied().filter(|(name, _)| named(name)).collect();
    if shared.is_empty() && exclusive.is_empty() && cluster.is_empty() && cluster_exclusive.is_empty() {
        eprintln!("no case of that name; there are:");
        let shared = cases::SHARED.iter().chain(cases::CLUSTER).map(|case| case.0);
        let all = shared.chain(cases::EXCLUSIVE.iter().chain(cases::CLUSTER_EXCLUSIVE).map(|case| case.0));
        all.for_each(|name| eprintln!("  {name}"));
        return ExitCode::from(2);
    }
    let mut fixture = KubeletFixture::new();
    let mut tally = Tally::default();
    run_concurrently(&fixture, shared, &mut tally);
    run_exclusively(&mut fixture, exclusive, &mut tally);
    if !cluster.is_empty() || !cluster_exclusive.is_empty() {
        fixture.join_cluster();
        run_concurrently(&fixture, cluster, &mut tally);
        run_exclusively(&mut fixture, cluster_exclusive, &mut tally);
    }
    // The final check for leaks is no success if no case passed.
    let passed = tally.passed;
    let started = Instant::now();
    let keep = std::env::var_os("KUBELET_KEEP").is_some();
    let leak_check =
        catch_unwind(AssertUnwindSafe(|| fixture.finish(keep, tally.failed.is_empty()))).map(|()| CaseResult::Passed);
    tally.add("nothing is leaked", started.elapsed().as_secs_f32(), leak_check);
    let engine = nacelle_e2e::node::engine();
    for name in &tally.failed {
        println!("failed: {name}");
    }
    println!("kubelet {engine}: {} passed, {} failed, {} skipped", tally.passed, tally.failed.len(), tally.skipped);
    if tally.failed.is_empty() && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs cases one after the other.
fn run_exclusively(fixture: &mut KubeletFixture, cases: Vec<ExclusiveCase>, tally: &mut Tally) {
    for (name, case) in cases {
        let started = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| case(fixture)));
        tally.add(name, started.elapsed().as_secs_f32(), result);
    }
}

/// Runs cases on a few threads, each named after its case, so that a panic message contains the name.
fn run_concurrently(fixture: &KubeletFixture, cases: Vec<SharedCase>, tally: &mut Tally) {
    let (queue, tally) = (Mutex::new(VecDeque::from(cases)), Mutex::new(tally));
    let next = || queue.lock().expect("no case panics with the queue").pop_front();
    std::thread::scope(|scope| {
        for _ in 0..workers() {
            scope.spawn(|| {
                while let Some((name, case)) = next() {
                    let started = Instant::now();
                    let result = std::thread::scope(|inner| {
                        let case =
                            std::thread::Builder::new().name(name.to_owned()).spawn_scoped(inner, || case(fixture));
                        case.expect("a thread can be started").join()
                    });
                    let seconds = started.elapsed().as_secs_f32();
                    tally.lock().expect("no case panics with the count").add(name, seconds, result);
                }
            });
        }
    });
}

/// Returns the number of concurrent cases: kubelet mostly waits, emulated VMs do not.
fn workers() -> usize {
    let here = std::env::var("KUBELET_WORKERS").ok().and_then(|text| text.parse().ok());
    here.unwrap_or(if nacelle_e2e::node::engine() == "host" { 6 } else { 2 })
}
