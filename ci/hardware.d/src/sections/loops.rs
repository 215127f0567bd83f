//! Measures memory-bound and fault-heavy loops in a guest on each backing of its memory, and on the host.

use super::SectionInput;
use crate::memory::{guest_memory, mappings};
use crate::report::{FigureReport, Samples};
use crate::settings;
use crate::vm::{Backing, BackingPages, MeasuredVm, VmParameters, milliseconds_between};
use anyhow::Context;
use nacelle_hardware::loops as host_loops;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::time::{Duration, Instant};

/// The backings of guest memory, each with every kind of pages.
const BACKINGS: [(Backing, BackingPages); 9] = [
    (Backing::Anonymous, BackingPages::Small),
    (Backing::Anonymous, BackingPages::Transparent),
    (Backing::Anonymous, BackingPages::Hugetlb),
    (Backing::Memfd, BackingPages::Small),
    (Backing::Memfd, BackingPages::Transparent),
    (Backing::Memfd, BackingPages::Hugetlb),
    (Backing::File, BackingPages::Small),
    (Backing::File, BackingPages::Transparent),
    (Backing::File, BackingPages::Hugetlb),
];
/// The memory of each guest in MiB.
const GUEST_MIB: u32 = 256;
/// The maximum number of 2 MiB pages of a guest: a private file's pages exist twice after all were written.
const POOL_PAGES: u64 = GUEST_MIB as u64;
/// The size of the memory that the touch loop uses, and that the chase and the streams use, in MiB.
const TOUCH_MIB: usize = 128;
const LOOP_MIB: usize = 64;
// The guest's kernel has memory left in addition to them.
const _: () = assert!(TOUCH_MIB + 64 <= GUEST_MIB as usize);
const _: () = assert!(LOOP_MIB + 64 <= GUEST_MIB as usize);
/// The smaps fields of a mapping's pages (proc_pid_smaps(5)).
const FIELDS: [&str; 6] =
    ["Rss", "AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"];

/// The figures of one guest, or of the host: name, unit.
const FIGURES: [(&str, &str); 7] = [
    ("loops.start", "ms"),
    ("loops.touch_fresh", "ns a page"),
    ("loops.touch_again", "ns a page"),
    ("loops.chase", "ns a load"),
    ("loops.read", "GB/s"),
    ("loops.write", "GB/s"),
    ("loops.chase_huge", "ns a load"),
];

/// One backing with its samples, in the order of [`FIGURES`], and the state of its pages.
struct BackingCase {
    backing: Backing,
    pages: BackingPages,
    samples: Vec<Samples>,
    mapping_fields: Map<String, Value>,
    unusable: Option<String>,
}

/// Measures guests of all backings in rounds, so that changes of the host affect all of them.
pub fn loops<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let mut settings = Vec::new();
    for setting in settings::enable_transparent() {
        settings.push(setting?);
    }
    let pool = settings::enlarge_pool(POOL_PAGES);
    let no_pool = pool.as_ref().err().map(|error| format!("{error:#}"));
    let mut cases = BACKINGS.map(|(backing, pages)| BackingCase {
        backing,
        pages,
        samples: vec![Samples::default(); FIGURES.len()],
        mapping_fields: Map::new(),
        unusable: no_pool.clone().filter(|_| pages == BackingPages::Hugetlb),
    });
    let mut on_host = vec![Samples::default(); 5];
    let mut failures = Vec::new();
    let rounds = if input.quick { 1 } else { 3 };
    for round in 0..rounds {
        for case in &mut cases {
            if case.unusable.is_some() {
                continue;
            }
            if Instant::now() >= until {
                case.samples.iter_mut().for_each(|samples| samples.cut = true);
                continue;
            }
            if let Err(error) = measure_guest(input, case) {
                // The figures of the other backings are still valid.
                failures.push(error.context(format!(
                    "{} in pages of {}",
                    figure_word(case.backing),
                    figure_word(case.pages)
                )));
                case.unusable = Some("it failed".to_owned());
            }
        }
        if round == 0 || Instant::now() < until {
            for (samples, value) in on_host.iter_mut().zip(host_figures(input)) {
                samples.values.push(value);
            }
        }
    }
    drop((pool, settings));
    for case in &cases {
        let config = json!({"memory": case.backing, "pages": case.pages});
        match &case.unusable {
            Some(why) => report.write_skipped("loops", config, why.clone())?,
            None if case.mapping_fields.is_empty() => {
                report.write_skipped("loops", config, "the section's time is over".to_owned())?;
            }
            None => {
                for ((name, unit), samples) in FIGURES.iter().zip(&case.samples) {
                    report.write_samples(name, unit, config.clone(), samples)?;
                }
                let mut config = config;
                config["given"] = Value::Object(case.mapping_fields.clone());
                let parts = ["Rss", "Shared_Hugetlb", "Private_Hugetlb"].map(|name| case.mapping_fields.get(name));
                let resident = parts.into_iter().flatten().filter_map(Value::as_f64).sum();
                report.write_value("loops.resident", "MiB", config, resident)?;
            }
        }
    }
    for ((name, unit), samples) in FIGURES[1..].iter().zip(&on_host) {
        report.write_samples(
            name,
            unit,
            json!({"memory": "host process", "pages": "as the host has them"}),
            samples,
        )?;
    }
    match failures.into_iter().next() {
        Some(first) => Err(first),
        None => Ok(()),
    }
}

/// Returns the word for a backing or for pages in the figures.
fn figure_word(value: impl serde::Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

/// Measures one guest of a backing.
fn measure_guest(input: &SectionInput, case: &mut BackingCase) -> anyhow::Result<()> {
    let BackingCase { backing, pages, .. } = *case;
    let defaults = input.vm_description(&format!("loops-{backing:?}-{pages:?}"))?;
    let description = VmParameters { memory_mib: GUEST_MIB, backing, pages, ..defaults };
    let mut vm = MeasuredVm::start(&description, input.step_deadline())?;
    let (touch_mib, loop_mib) = loop_sizes(input);
    let mut values = vec![milliseconds_between(vm.started, vm.times.hello)];
    let mut query = |command: String| vm.query(&command, input.step_deadline());
    // The guest's own pages are small first, so that only the backing differs.
    query("pages never".to_owned())?;
    for _ in 0..2 {
        values.extend(query(format!("touch {touch_mib}"))?);
    }
    values.extend(query(format!("chase {loop_mib} {}", input.loop_ms(500)))?);
    values.extend(query(format!("stream {loop_mib} {}", input.loop_ms(300)))?.iter().map(|rate| rate / 1e9));
    query("pages always".to_owned())?;
    values.extend(query(format!("chase {loop_mib} {}", input.loop_ms(500)))?);
    anyhow::ensure!(
        values.len() == FIGURES.len(),
        "the guest has answered {} figures, not {}",
        values.len(),
        FIGURES.len()
    );
    for (samples, value) in case.samples.iter_mut().zip(values) {
        samples.values.push(value);
    }
    let all = mappings(vm.pid())?;
    let memory = guest_memory(&all).context("the guest's memory is not among the mappings of its process")?;
    let fields = FIELDS.map(|field| (field.to_owned(), memory.mib(field))).into_iter();
    case.mapping_fields = fields.filter(|(_, mib)| *mib > 0.0).map(|(field, mib)| (field, json!(mib))).collect();
    Ok(())
}

fn loop_sizes(input: &SectionInput) -> (usize, usize) {
    if input.quick { (32, 16) } else { (TOUCH_MIB, LOOP_MIB) }
}

/// Runs the same loops in this process: those of [`FIGURES`] from the second to the last but one.
fn host_figures(input: &SectionInput) -> [f64; 5] {
    let (touch_mib, loop_mib) = loop_sizes(input);
    let time = |full| Duration::from_millis(input.loop_ms(full));
    let (fresh, again) = (host_loops::touch(touch_mib), host_loops::touch(touch_mib));
    let chase = host_loops::chase(loop_mib, time(500));
    let (read, written) = host_loops::stream(loop_mib, time(300));
    [fresh, again, chase, read / 1e9, written / 1e9]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_of_backing_and_pages_is_measured() {
        for backing in [Backing::Anonymous, Backing::Memfd, Backing::File] {
            for pages in [BackingPages::Small, BackingPages::Transparent, BackingPages::Hugetlb] {
                assert!(BACKINGS.contains(&(backing, pages)), "{backing:?} {pages:?}");
            }
        }
        assert_eq!(figure_word(Backing::File), "private file");
    }
}
