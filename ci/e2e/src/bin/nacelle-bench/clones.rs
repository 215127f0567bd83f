//! Measures what clones of a saved VM cost by the kind of host memory that they get: memory of the node for each idle clone, and the
//! speed of memory in the guest, compared with a booted VM.

use crate::guests::{GuestFiles, parse_number};
use crate::machines::{BenchVm, SAVE_COMMAND, VmDescription, Vmm};
use crate::memory::{self, MIB};
use crate::{benches, cri::milliseconds, median};
use nacelle_e2e::path_from_env;
use nacelle_e2e::run::run_program;
use nacelle_vmm::machine::{HostPages, SavedContent};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the node is left alone before its memory is measured.
const SETTLE_TIME: Duration = Duration::from_secs(5);
/// The kinds of memory, each with a name.
const KINDS: [(&str, SavedContent, HostPages); 6] = [
    ("map whole file", SavedContent::MapWhole, HostPages::Transparent),
    ("map data, anonymous elsewhere", SavedContent::MapData, HostPages::Transparent),
    ("copy, anonymous 2 MiB", SavedContent::CopyPrivate, HostPages::Transparent),
    ("copy, anonymous 4 KiB", SavedContent::CopyPrivate, HostPages::Small),
    ("copy, memfd 2 MiB", SavedContent::CopyShared, HostPages::Transparent),
    ("copy, memfd 4 KiB", SavedContent::CopyShared, HostPages::Small),
];
/// The commands of the contract's guest, by name.
const LOOPS: [(&str, &str); 3] =
    [("new pages", "faults 48"), ("used pages", "faults 48"), ("random reads", "chase 32 2000000")];

/// Starts `clones` clones with each kind of memory. Returns `{"clones": [{"memory", "restore" (ms), "pss" and "used" (MiB for
/// each)}], "devices": [{"devices", "ready" (ms), "bound" (microseconds, in the guest), "pss", "used"}], "loops": [{"memory", ...: nanoseconds for each page or read, medians of `runs`}], "template": MiB}`.
///
/// # Panics
/// If anything fails, because there is no figure then.
pub fn measure(clones: usize, runs: usize) -> Value {
    let huge = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    if let Err(error) = fs::write(huge, "advise") {
        eprintln!("no huge pages for memfds: {huge}: {error}");
    }
    let devices = [false, true].map(|late| measure_devices(late, clones));
    let (agent, saved) = saved_guest(GuestFiles::with_agent());
    let template = fs::metadata(saved.join("memory")).expect("the template's memory").blocks() as f64 * 512.0 / MIB;
    let idle: Vec<Value> = [None]
        .into_iter()
        .chain(KINDS.map(Some))
        .map(|kind| {
            let copy = sparse_copy(&saved);
            measure_idle(&agent.describe(1), kind.map(|kind| (kind, &copy)), clones)
        })
        .collect();
    let (commands, saved) = saved_guest(GuestFiles::with_commands(&std::env::temp_dir()));
    let subjects: Vec<_> = [None].into_iter().chain(KINDS.map(Some)).collect();
    let mut samples = vec![vec![Vec::new(); LOOPS.len()]; subjects.len()];
    for _ in 0..runs {
        for (subject, samples) in subjects.iter().zip(&mut samples) {
            let copy = sparse_copy(&saved);
            let mut vm = start(&commands.describe(1), subject.map(|kind| (kind, &copy)));
            for ((_, command), samples) in LOOPS.iter().zip(samples) {
                samples.push(parse_number(&vm.send_command(command)));
            }
        }
    }
    let loops: Vec<Value> = subjects
        .iter()
        .zip(&samples)
        .map(|(subject, samples)| {
            let mut row = serde_json::Map::from_iter([("memory".to_owned(), json!(name(*subject)))]);
            let medians =
                LOOPS.iter().zip(samples).map(|((name, _), samples)| ((*name).to_owned(), json!(median(samples))));
            row.extend(medians);
            Value::Object(row)
        })
        .collect();
    json!({"clones": idle, "devices": devices, "loops": loops, "template": template})
}

type Kind = (&'static str, SavedContent, HostPages);

fn name(kind: Option<Kind>) -> &'static str {
    kind.map_or("booted", |(name, ..)| name)
}

/// Boots the guest and saves it.
fn saved_guest(files: GuestFiles) -> (GuestFiles, PathBuf) {
    let saved = files.directory().join("template");
    let took =
        BenchVm::start(Vmm::Ours, &files.describe(1)).send_command(&format!("{SAVE_COMMAND}{}", saved.display()));
    parse_number(&took);
    (files, saved)
}

/// Returns a copy of a template, in place of an earlier copy. Reading a hole of a private mapping on tmpfs adds a page to the file, which
/// changes what the next clone maps.
fn sparse_copy(template: &Path) -> PathBuf {
    let copy = template.with_extension("copy");
    drop(fs::remove_dir_all(&copy)); // there is none the first time
    let [from, to] = [template, &copy].map(|path| path.display().to_string());
    run_program("cp", ["--recursive", "--sparse=always", &from, &to]).ok();
    copy
}

/// Restores clones with two disks and a network interface, which the template has, too, or which are bound after the restore.
fn measure_devices(late: bool, clones: usize) -> Value {
    let files = GuestFiles::with_commands(&std::env::temp_dir());
    let full = VmDescription { tap: Some("template".to_owned()), template: late, ..files.describe(1) };
    let saved = files.directory().join("template");
    let template = if late { VmDescription { tap: None, disks: Vec::new(), ..full.clone() } } else { full.clone() };
    parse_number(&BenchVm::start(Vmm::Ours, &template).send_command(&format!("{SAVE_COMMAND}{}", saved.display())));
    let full = VmDescription { from: Some(saved), asked: true, ..full };
    let (mut ready, mut bound) = (Vec::new(), Vec::new());
    std::thread::sleep(SETTLE_TIME);
    let before = memory::node_memory_in_use();
    let mut vms = Vec::new();
    for number in 0..clones {
        let mut vm = BenchVm::start(Vmm::Ours, &VmDescription { tap: Some(format!("clone{number}")), ..full.clone() });
        let asked = Instant::now();
        if late {
            let answer = vm.send_command("bind");
            let Some((count, micros)) = answer.split_once(' ') else { panic!("the guest says {answer:?}") };
            assert_eq!(count, "3", "two disks and an interface");
            bound.push(parse_number(micros));
        }
        assert_eq!(vm.send_command("size 1"), "1048576");
        assert_eq!(vm.send_command(&format!("address 10.98.0.{}", number + 1)), "ok");
        ready.push(vm.timeline.total + milliseconds(asked));
        vms.push(vm);
    }
    let Memory { pss, used } = memory_of_each(&vms, before);
    let name = if late { "bound after the restore" } else { "idle in the template" };
    let row = json!({"devices": name, "ready": median(&ready), "bound": median(&bound), "pss": pss, "used": used});
    eprintln!("{row}");
    row
}

/// The MiB of each of some VMs.
struct Memory {
    /// The proportional part of its process.
    pss: f64,
    /// What the node has in use more than before.
    used: f64,
}

fn memory_of_each(vms: &[BenchVm], before: memory::NodeMemory) -> Memory {
    std::thread::sleep(SETTLE_TIME);
    let each = |bytes: f64| bytes / MIB / vms.len() as f64;
    let used = memory::node_memory_in_use().all - before.all;
    let pss: f64 = vms.iter().map(|vm| benches::read_kib(vm.pid(), "smaps_rollup", "Pss:") * 1024.0).sum();
    Memory { pss: each(pss), used: each(used) }
}

fn start(vm: &VmDescription, kind: Option<(Kind, &PathBuf)>) -> BenchVm {
    let vm = match kind {
        None => vm.clone(),
        Some(((_, content, pages), saved)) => {
            let asked = vm.initrd != path_from_env("NACELLE_INITRD");
            VmDescription { from: Some(saved.clone()), asked, saved_memory: Some((content, pages)), ..vm.clone() }
        }
    };
    BenchVm::start(Vmm::Ours, &vm)
}

fn measure_idle(vm: &VmDescription, kind: Option<(Kind, &PathBuf)>, clones: usize) -> Value {
    std::thread::sleep(SETTLE_TIME);
    let before = memory::node_memory_in_use();
    let vms: Vec<BenchVm> = (0..clones).map(|_| start(vm, kind)).collect();
    let Memory { pss, used } = memory_of_each(&vms, before);
    let restore = median(&vms.iter().map(|vm| vm.timeline.total).collect::<Vec<_>>());
    let row = json!({"memory": name(kind.map(|kind| kind.0)), "restore": restore, "pss": pss, "used": used});
    eprintln!("{row}");
    row
}
