//! Measures memory-bound and fault-heavy loops in a guest on each backing of its memory, and on the host.

use super::World;
use crate::memory::{mappings, of_guest};
use crate::report::{Report, Samples};
use crate::settings;
use crate::vm::{Description, Machine, Pages, Under, ms};
use anyhow::Context;
use nacelle_hardware::loops as host;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::time::{Duration, Instant};

/// The backings of guest memory, in pairs with and without huge pages.
const BACKINGS: [(Under, Pages); 9] = [
    (Under::Anonymous, Pages::Small),
    (Under::Anonymous, Pages::Transparent),
    (Under::Anonymous, Pages::Hugetlb),
    (Under::Memfd, Pages::Small),
    (Under::Memfd, Pages::Transparent),
    (Under::Memfd, Pages::Hugetlb),
    (Under::File, Pages::Small),
    (Under::File, Pages::Transparent),
    (Under::File, Pages::Hugetlb),
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

/// One backing: its samples, in the order of [`FIGURES`], and the state of its pages.
struct Backing {
    under: Under,
    pages: Pages,
    samples: Vec<Samples>,
    given: Map<String, Value>,
    unusable: Option<String>,
}

/// Measures guests of all backings in rounds, so that changes of the host affect all of them.
pub fn loops<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let mut settings = Vec::new();
    for setting in settings::allow_transparent() {
        settings.push(setting?);
    }
    let pool = settings::enlarge_pool(POOL_PAGES);
    let no_pool = pool.as_ref().err().map(|error| format!("{error:#}"));
    let mut backings = BACKINGS.map(|(under, pages)| Backing {
        under,
        pages,
        samples: vec![Samples::default(); FIGURES.len()],
        given: Map::new(),
        unusable: no_pool.clone().filter(|_| pages == Pages::Hugetlb),
    });
    let mut on_host = vec![Samples::default(); 5];
    let mut failures = Vec::new();
    let rounds = if world.quick { 1 } else { 3 };
    for round in 0..rounds {
        for backing in &mut backings {
            if backing.unusable.is_some() {
                continue;
            }
            if Instant::now() >= until {
                backing.samples.iter_mut().for_each(|samples| samples.cut = true);
                continue;
            }
            if let Err(error) = guest(world, backing) {
                // The figures of the other backings are still valid.
                failures.push(error.context(format!("{} in pages of {}", word(backing.under), word(backing.pages))));
                backing.unusable = Some("it failed".to_owned());
            }
        }
        if round == 0 || Instant::now() < until {
            for (samples, value) in on_host.iter_mut().zip(host_figures(world)) {
                samples.values.push(value);
            }
        }
    }
    drop((pool, settings));
    for backing in &backings {
        let config = json!({"memory": backing.under, "pages": backing.pages});
        match &backing.unusable {
            Some(why) => report.skipped("loops", config, why.clone())?,
            None if backing.given.is_empty() => {
                report.skipped("loops", config, "the section's time is over".to_owned())?;
            }
            None => {
                for ((name, unit), samples) in FIGURES.iter().zip(&backing.samples) {
                    report.samples(name, unit, config.clone(), samples)?;
                }
                let mut given = config;
                given["given"] = Value::Object(backing.given.clone());
                let parts = ["Rss", "Shared_Hugetlb", "Private_Hugetlb"].map(|name| backing.given.get(name));
                let resident = parts.into_iter().flatten().filter_map(Value::as_f64).sum();
                report.value("loops.resident", "MiB", given, resident)?;
            }
        }
    }
    for ((name, unit), samples) in FIGURES[1..].iter().zip(&on_host) {
        report.samples(name, unit, json!({"memory": "host process", "pages": "as the host has them"}), samples)?;
    }
    match failures.into_iter().next() {
        Some(first) => Err(first),
        None => Ok(()),
    }
}

/// Returns the word for a backing or for pages in the figures.
fn word(value: impl serde::Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

/// Measures one guest of a backing.
fn guest(world: &World, backing: &mut Backing) -> anyhow::Result<()> {
    let Backing { under, pages, .. } = *backing;
    let machine = world.machine(&format!("loops-{under:?}-{pages:?}"))?;
    let description = Description { memory_mib: GUEST_MIB, under, pages, ..machine };
    let mut machine = Machine::start(&description, world.step())?;
    let (touch_mib, loop_mib) = sizes(world);
    let mut values = vec![ms(machine.started, machine.times.hello)];
    let mut ask = |command: String| machine.ask(&command, world.step());
    // The guest's own pages are small first, so that only the backing differs.
    ask("pages never".to_owned())?;
    for _ in 0..2 {
        values.extend(ask(format!("touch {touch_mib}"))?);
    }
    values.extend(ask(format!("chase {loop_mib} {}", world.loop_ms(500)))?);
    values.extend(ask(format!("stream {loop_mib} {}", world.loop_ms(300)))?.iter().map(|rate| rate / 1e9));
    ask("pages always".to_owned())?;
    values.extend(ask(format!("chase {loop_mib} {}", world.loop_ms(500)))?);
    anyhow::ensure!(
        values.len() == FIGURES.len(),
        "the guest has answered {} figures, not {}",
        values.len(),
        FIGURES.len()
    );
    for (samples, value) in backing.samples.iter_mut().zip(values) {
        samples.values.push(value);
    }
    let all = mappings(machine.pid())?;
    let memory = of_guest(&all).context("the guest's memory is not among the mappings of its process")?;
    let fields = FIELDS.map(|field| (field.to_owned(), memory.mib(field))).into_iter();
    backing.given = fields.filter(|(_, mib)| *mib > 0.0).map(|(field, mib)| (field, json!(mib))).collect();
    Ok(())
}

fn sizes(world: &World) -> (usize, usize) {
    if world.quick { (32, 16) } else { (TOUCH_MIB, LOOP_MIB) }
}

/// Runs the same loops in this process: those of [`FIGURES`] from the second to the last but one.
fn host_figures(world: &World) -> [f64; 5] {
    let (touch_mib, loop_mib) = sizes(world);
    let time = |full| Duration::from_millis(world.loop_ms(full));
    let (fresh, again) = (host::touch(touch_mib), host::touch(touch_mib));
    let chase = host::chase(loop_mib, time(500));
    let (read, written) = host::stream(loop_mib, time(300));
    [fresh, again, chase, read / 1e9, written / 1e9]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backings_are_all_that_there_are() {
        for under in [Under::Anonymous, Under::Memfd, Under::File] {
            for pages in [Pages::Small, Pages::Transparent, Pages::Hugetlb] {
                assert!(BACKINGS.contains(&(under, pages)), "{under:?} {pages:?}");
            }
        }
        assert_eq!(word(Under::File), "private file");
    }
}
