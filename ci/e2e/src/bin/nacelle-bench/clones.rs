//! Measures what clones of a saved VM cost, compared with booted VMs: memory of the node for each, devices that they get after the
//! restore, and the speed of memory in the guest.

use crate::guests::{GuestFiles, parse_number};
use crate::machines::{BenchVm, SAVE_COMMAND, VmDescription, Vmm};
use crate::memory::{self, MIB};
use crate::{benches, cri::milliseconds, median};
use nacelle_e2e::path_from_env;
use nacelle_e2e::run::run_program;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the node is left alone before its memory is measured.
const SETTLE_TIME: Duration = Duration::from_secs(5);
/// The commands of the contract's guest, by name.
const LOOPS: [(&str, &str); 3] =
    [("new pages", "faults 48"), ("used pages", "faults 48"), ("random reads", "chase 32 2000000")];

/// Starts `clones` clones, and as many booted VMs. Returns `{"vms": [{"vm", "start" (ms), "pss" and "used" (MiB for each)}], "devices":
/// [{"devices", "ready" (ms), "bound" (microseconds, in the guest), "pss", "used"}], "loops": [{"vm", ...: nanoseconds for each page or
/// read, medians of `runs` alternating runs}], "template": MiB}`.
///
/// # Panics
/// If anything fails, because there is no figure then.
pub fn measure(clones: usize, runs: usize) -> Value {
    let devices = [false, true].map(|late| measure_devices(late, clones));
    let (agent, saved) = saved_guest(GuestFiles::with_agent());
    let template = fs::metadata(saved.join("memory")).expect("the template's memory").blocks() as f64 * 512.0 / MIB;
    let copy = sparse_copy(&saved);
    let vms = [None, Some(&copy)].map(|saved| measure_idle(&agent.describe(1), saved, clones));
    let (commands, saved) = saved_guest(GuestFiles::with_commands(&std::env::temp_dir()));
    let copy = sparse_copy(&saved);
    let subjects = [None, Some(&copy)];
    let mut samples = subjects.map(|_| LOOPS.map(|_| Vec::new()));
    for _ in 0..runs {
        sparse_copy(&saved);
        for (saved, samples) in subjects.iter().zip(&mut samples) {
            let mut vm = start(&commands.describe(1), *saved);
            for ((_, command), samples) in LOOPS.iter().zip(samples) {
                samples.push(parse_number(&vm.send_command(command)));
            }
        }
    }
    let row = |(saved, samples): (&Option<&PathBuf>, &[Vec<f64>; LOOPS.len()])| {
        let medians =
            LOOPS.iter().zip(samples).map(|((name, _), samples)| ((*name).to_owned(), json!(median(samples))));
        Value::Object([("vm".to_owned(), json!(name(*saved)))].into_iter().chain(medians).collect())
    };
    let loops: Vec<Value> = subjects.iter().zip(&samples).map(row).collect();
    json!({"vms": vms, "devices": devices, "loops": loops, "template": template})
}

fn name(saved: Option<&PathBuf>) -> &'static str {
    if saved.is_some() { "clone" } else { "booted" }
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

/// Boots the VM, or restores it.
fn start(vm: &VmDescription, saved: Option<&PathBuf>) -> BenchVm {
    let asked = saved.is_some() && vm.initrd != path_from_env("NACELLE_INITRD");
    BenchVm::start(Vmm::Ours, &VmDescription { from: saved.cloned(), asked, ..vm.clone() })
}

fn measure_idle(vm: &VmDescription, saved: Option<&PathBuf>, number: usize) -> Value {
    std::thread::sleep(SETTLE_TIME);
    let before = memory::node_memory_in_use();
    let vms: Vec<BenchVm> = (0..number).map(|_| start(vm, saved)).collect();
    let Memory { pss, used } = memory_of_each(&vms, before);
    let start = median(&vms.iter().map(|vm| vm.timeline.total).collect::<Vec<_>>());
    let row = json!({"vm": name(saved), "start": start, "pss": pss, "used": used});
    eprintln!("{row}");
    row
}
