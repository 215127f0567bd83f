//! Runs a real kubelet against Nacelle: it runs the cases and counts the results. `ci/kubelet` starts it, in namespaces of its
//! own.
//!
//! Cases that share the node run concurrently; those that kill daemons run exclusively, one after the other.

mod cases;
mod cluster;
mod disk;
mod kubelet;
mod pods;
mod websocket;
mod world;

use cases::{Alone, Outcome, Shared};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;
use world::World;

/// The results of the cases.
#[derive(Default)]
struct Count {
    passed: usize,
    failed: Vec<String>,
    skipped: usize,
}

impl Count {
    fn add(&mut self, name: &str, seconds: f32, outcome: std::thread::Result<Outcome>) {
        match outcome {
            Ok(Outcome::Passed) => {
                self.passed += 1;
                println!("ok       {name} ({seconds:.1} s)");
            }
            Ok(Outcome::Skipped(why)) => {
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
    let shared: Vec<Shared> = cases::SHARED.iter().copied().filter(|(name, _)| named(name)).collect();
    let alone: Vec<Alone> = cases::ALONE.iter().copied().filter(|(name, _)| named(name)).collect();
    let cluster: Vec<Shared> = cases::CLUSTER.iter().copied().filter(|(name, _)| named(name)).collect();
    if shared.is_empty() && alone.is_empty() && cluster.is_empty() {
        eprintln!("no case of that name; there are:");
        let (shared, cluster) = (cases::SHARED.iter(), cases::CLUSTER.iter());
        let all = shared.chain(cluster).map(|case| case.0).chain(cases::ALONE.iter().map(|case| case.0));
        all.for_each(|name| eprintln!("  {name}"));
        return ExitCode::from(2);
    }
    let mut world = World::new();
    let mut count = Count::default();
    beside(&world, shared, &mut count);
    for (name, case) in alone {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| case(&mut world)));
        count.add(name, started.elapsed().as_secs_f32(), outcome);
    }
    if !cluster.is_empty() {
        world.join();
        beside(&world, cluster, &mut count);
    }
    // The final check for leaks is no success if no case passed.
    let passed = count.passed;
    let started = Instant::now();
    let keep = std::env::var_os("KUBELET_KEEP").is_some();
    let left = catch_unwind(AssertUnwindSafe(|| world.end(keep, count.failed.is_empty()))).map(|()| Outcome::Passed);
    count.add("nothing is left", started.elapsed().as_secs_f32(), left);
    let engine = nacelle_e2e::node::engine();
    for name in &count.failed {
        println!("failed: {name}");
    }
    println!("kubelet {engine}: {} passed, {} failed, {} skipped", count.passed, count.failed.len(), count.skipped);
    if count.failed.is_empty() && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs cases on a few threads, each named after its case, so that a panic message contains the name.
fn beside(world: &World, cases: Vec<Shared>, count: &mut Count) {
    let (queue, count) = (Mutex::new(VecDeque::from(cases)), Mutex::new(count));
    let next = || queue.lock().expect("no case panics with the queue").pop_front();
    std::thread::scope(|scope| {
        for _ in 0..workers() {
            scope.spawn(|| {
                while let Some((name, case)) = next() {
                    let started = Instant::now();
                    let outcome = std::thread::scope(|inner| {
                        let case =
                            std::thread::Builder::new().name(name.to_owned()).spawn_scoped(inner, || case(world));
                        case.expect("a thread can be started").join()
                    });
                    let seconds = started.elapsed().as_secs_f32();
                    count.lock().expect("no case panics with the count").add(name, seconds, outcome);
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
