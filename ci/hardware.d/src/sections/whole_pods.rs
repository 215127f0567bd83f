//! Measures whole pods: many at once, how many fit, and commands in a container.

use super::World;
use crate::facts::meminfo;
use crate::memory::{beside_guest, mappings, proportional, with_descendants};
use crate::pods::{self, MEMORY_MIB, Pod};
use crate::report::{Report, Samples};
use serde_json::json;
use std::io::Write;
use std::time::{Duration, Instant};

/// The maximum memory of a pod in MiB, for the decision how many pods fit.
const ROOM_MIB: u64 = MEMORY_MIB as u64 + 64;

/// Starts pods at the same moment: measures the time until each is ready, and until all are.
pub fn concurrent<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let most = if world.quick { 2 } else { (2 * cpus).min(64) };
    let mut at_once = 1;
    while at_once <= most {
        let config = json!({"pods": at_once});
        if Instant::now() >= until {
            return report.skipped("concurrent.ready", config, "the section's time is over".to_owned());
        }
        let (mut each, mut all) = (Samples::default(), Samples::default());
        for round in 0..world.count(3) {
            if round > 0 && Instant::now() >= until {
                (each.cut, all.cut) = (true, true);
                break;
            }
            let begun = Instant::now();
            let started = world.runtime.block_on(async {
                let mut starts = tokio::task::JoinSet::new();
                for _ in 0..at_once {
                    let pods = world.pods.clone();
                    starts.spawn(async move { pods.start().await });
                }
                starts.join_all().await
            });
            all.values.push(begun.elapsed().as_secs_f64() * 1e3);
            let started = started.into_iter().collect::<anyhow::Result<Vec<Pod>>>()?;
            each.values.extend(started.iter().map(|pod| pod.ready));
        }
        report.samples("concurrent.ready", "ms", config.clone(), &each)?;
        report.samples("concurrent.all_ready", "ms", config, &all)?;
        at_once *= 2;
    }
    Ok(())
}

/// Measures the host's memory that a pod with a sleeping container takes, by the number of pods.
pub fn density<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let settle = Duration::from_secs(if world.quick { 1 } else { 3 });
    let available = || meminfo("MemAvailable") as f64 / 1024.0;
    // Allocations that only the first pod causes: templates, pages of programs.
    drop(world.runtime.block_on(sleeping(world))?);
    std::thread::sleep(settle);
    let (before, mut running) = (available(), Vec::new());
    for wanted in if world.quick { vec![2] } else { vec![1, 10, 50] } {
        let config = json!({"pods": wanted, "guest_mib": MEMORY_MIB});
        if before < (wanted as u64 * ROOM_MIB) as f64 {
            report.skipped("density.pss", config, format!("the host has {before:.0} MiB available"))?;
            continue;
        }
        while running.len() < wanted && Instant::now() < until {
            running.push(world.runtime.block_on(sleeping(world))?);
        }
        if running.len() < wanted {
            return report.skipped("density.pss", config, "the section's time is over".to_owned());
        }
        std::thread::sleep(settle);
        let each = |mib: f64| mib / wanted as f64;
        let pss: f64 = running.iter().flat_map(|pod| with_descendants(pod.pid())).map(proportional).sum();
        report.value("density.pss", "MiB a pod", config.clone(), each(pss))?;
        report.value("density.available", "MiB a pod", config.clone(), each(before - available()))?;
        let mut beside = Samples::default();
        for pod in &running {
            beside.values.push(beside_guest(&mappings(pod.pid())?));
        }
        report.samples("density.beside_guest", "MiB resident", config, &beside)?;
    }
    Ok(())
}

async fn sleeping(world: &World) -> anyhow::Result<Pod> {
    let pod = world.pods.start().await?;
    world.pods.start_container(&pod).await?;
    Ok(pod)
}

/// Measures a command in a container, from the request to the pod process to its answer.
pub fn exec<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let pod = world.runtime.block_on(sleeping(world))?;
    let run = |_| world.runtime.block_on(pods::exec(&pod, "/bin/true"));
    let samples = crate::report::rounds(until, 1, world.count(200), 1, run)?;
    for samples in samples {
        report.samples("exec", "ms", json!({"command": "/bin/true"}), &samples)?;
    }
    Ok(())
}
