//! Measures whole pods: many at once, how many fit, and commands in a container.

use super::SectionInput;
use crate::facts::meminfo;
use crate::memory::{mappings, overhead_mib, pss_mib, with_descendants};
use crate::pods::{self, MEMORY_MIB, MeasuredPod};
use crate::report::{FigureReport, Samples};
use serde_json::json;
use std::io::Write;
use std::time::{Duration, Instant};

/// The maximum memory of a pod in MiB, for the decision how many pods fit.
const MAX_POD_MIB: u64 = MEMORY_MIB as u64 + 64;

/// Starts pods at the same moment: measures the time until each is ready, and until all are.
pub fn concurrent<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let max_pods = if input.quick { 2 } else { (2 * cpus).min(64) };
    let mut at_once = 1;
    while at_once <= max_pods {
        let config = json!({"pods": at_once});
        if Instant::now() >= until {
            return report.write_skipped("concurrent.ready", config, "the section's time is over".to_owned());
        }
        let (mut each, mut all) = (Samples::default(), Samples::default());
        for round in 0..input.sample_count(3) {
            if round > 0 && Instant::now() >= until {
                (each.cut, all.cut) = (true, true);
                break;
            }
            let begun = Instant::now();
            let started = input.runtime.block_on(async {
                let mut starts = tokio::task::JoinSet::new();
                for _ in 0..at_once {
                    let pods = input.pods.clone();
                    starts.spawn(async move { pods.start().await });
                }
                starts.join_all().await
            });
            all.values.push(begun.elapsed().as_secs_f64() * 1e3);
            let started = started.into_iter().collect::<anyhow::Result<Vec<MeasuredPod>>>()?;
            each.values.extend(started.iter().map(|pod| pod.ready));
        }
        report.write_samples("concurrent.ready", "ms", config.clone(), &each)?;
        report.write_samples("concurrent.all_ready", "ms", config, &all)?;
        at_once *= 2;
    }
    Ok(())
}

/// Measures the host's memory that a pod with a sleeping container takes, by the number of pods.
pub fn density<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let settle = Duration::from_secs(if input.quick { 1 } else { 3 });
    let available = || meminfo("MemAvailable") as f64 / 1024.0;
    // Allocations that only the first pod causes: templates, pages of programs.
    drop(input.runtime.block_on(start_sleeping_pod(input))?);
    std::thread::sleep(settle);
    let (before, mut running) = (available(), Vec::new());
    for pod_count in if input.quick { vec![2] } else { vec![1, 10, 50] } {
        let config = json!({"pods": pod_count, "guest_mib": MEMORY_MIB});
        if before < (pod_count as u64 * MAX_POD_MIB) as f64 {
            report.write_skipped("density.pss", config, format!("the host has {before:.0} MiB available"))?;
            continue;
        }
        while running.len() < pod_count && Instant::now() < until {
            running.push(input.runtime.block_on(start_sleeping_pod(input))?);
        }
        if running.len() < pod_count {
            return report.write_skipped("density.pss", config, "the section's time is over".to_owned());
        }
        std::thread::sleep(settle);
        let each = |mib: f64| mib / pod_count as f64;
        let pss: f64 = running.iter().flat_map(|pod| with_descendants(pod.pid())).map(pss_mib).sum();
        report.write_value("density.pss", "MiB a pod", config.clone(), each(pss))?;
        report.write_value("density.available", "MiB a pod", config.clone(), each(before - available()))?;
        let mut overhead = Samples::default();
        for pod in &running {
            overhead.values.push(overhead_mib(&mappings(pod.pid())?));
        }
        report.write_samples("density.beside_guest", "MiB resident", config, &overhead)?;
    }
    Ok(())
}

async fn start_sleeping_pod(input: &SectionInput) -> anyhow::Result<MeasuredPod> {
    let pod = input.pods.start().await?;
    input.pods.start_container(&pod).await?;
    Ok(pod)
}

/// Measures a command in a container, from the request to the pod process to its answer.
pub fn exec<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let pod = input.runtime.block_on(start_sleeping_pod(input))?;
    let run = |_| input.runtime.block_on(pods::exec(&pod, "/bin/true"));
    let samples = crate::report::sample_rounds(until, 1, input.sample_count(200), 1, run)?;
    for samples in samples {
        report.write_samples("exec", "ms", json!({"command": "/bin/true"}), &samples)?;
    }
    Ok(())
}
