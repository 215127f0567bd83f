//! Measures operations on a whole VM of 1 GiB: snapshots, dumps, copies, exports, each compared with the time that the node takes
//! to write as many bytes.

use crate::{cri::milliseconds, median};
use nacelle_e2e::machine::{Debian, annotated_pod, machine_container, machine_node};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{PodRequest, TestNode, eventually};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// The MiB of random, incompressible letters in the guest's memory in addition to its system.
const FILLED_MIB: usize = 512;

/// The samples of an operation: milliseconds, bytes written.
type Samples = BTreeMap<&'static str, Vec<(f64, u64)>>;

/// Runs a VM with Debian and 1 GiB, and each operation `runs` times. Returns `[{"operation", "p50" (ms), "bytes", "written" (ms
/// for as many bytes to a file, with fsync), "ratio"}]`.
///
/// # Panics
/// If anything fails, because there is no figure then.
pub fn measure(runs: usize) -> Value {
    let debian = Debian::from_env().expect("ci/bench names the disk of Debian");
    let node = machine_node();
    let image = debian.push_image(&node);
    let pod = node.crictl.run_pod_with_handler("vm", debian_pod(&node, &debian, &image));
    let machine = pod.start(machine_container(&image, 0));
    eventually("the guest agent answers", || (machine.exec("true").code == 0).then_some(()));
    // A tmpfs takes half of the memory by default, and slightly less than that is available.
    let fill =
        format!("mount -o remount,size=90% /dev/shm && head -c {FILLED_MIB}M /dev/urandom >/dev/shm/filled && sync");
    machine.exec(&fill).ok();

    let mut samples = Samples::new();
    for run in 0..runs {
        let name = format!("run-{run}");
        let mut timed = |operation: &'static str, words: &[&str], bytes: &dyn Fn() -> u64| {
            let start = Instant::now();
            run_vm_command(&node, words);
            let took = milliseconds(start);
            samples.entry(operation).or_default().push((took, bytes()));
        };
        timed("snapshot", &["snapshot", "db", &name], &|| snapshot_bytes(&node, &name));
        timed("restore", &["restore", "db", &name], &|| snapshot_bytes(&node, &name));
        run_vm_command(&node, &["rm-snapshot", "db", &name]);
        for (operation, format) in [("memory-dump", "elf"), ("memory-dump, kdump-zlib", "kdump-zlib")] {
            let file = node.directory().join("dump");
            let words = ["memory-dump", "db", "--format", format, "--output", &file.display().to_string()];
            timed(operation, &words, &|| fs::metadata(&file).expect("the dump is there").len());
            fs::remove_file(&file).expect("the dump is there");
        }
        let layout = node.directory().join("layout");
        let reference = format!("oci:{}:db", layout.display());
        let moved = format!("moved-{run}");
        timed("export, running", &["export", "db", &reference], &|| directory_bytes(&layout));
        timed("import", &["import", &reference, &moved, "--new-identity"], &|| vm_disk_usage(&node));
        run_vm_command(&node, &["rm", &moved]);
        fs::remove_dir_all(&layout).expect("the layout is there");
    }
    node.crictl.call(["stop", "--timeout", "120", &machine.id]);
    pod.remove();
    for run in 0..runs {
        let other = format!("other-{run}");
        let start = Instant::now();
        run_vm_command(&node, &["clone", "db", &other]);
        samples.entry("clone").or_default().push((milliseconds(start), vm_disk_usage(&node)));
        run_vm_command(&node, &["rm", &other]);
    }
    let one = |(operation, samples): (&&str, &Vec<(f64, u64)>)| {
        let took = median(&samples.iter().map(|(took, _)| *took).collect::<Vec<_>>());
        let bytes = median(&samples.iter().map(|(_, bytes)| *bytes as f64).collect::<Vec<_>>()) as u64;
        let floor = median(&(0..runs).map(|_| measure_write(&node, bytes)).collect::<Vec<_>>());
        json!({ "operation": operation, "p50": took, "bytes": bytes, "written": floor, "ratio": took / floor })
    };
    samples.iter().map(one).collect()
}

/// Returns a pod that runs Debian in a persistent VM with 1 GiB.
fn debian_pod(node: &TestNode, debian: &Debian, image: &str) -> PodRequest {
    let line = debian.command_line();
    let disks = format!("root=image:{image},boot=1");
    let annotations = [
        ("kind", "machine"),
        ("name", "db"),
        ("run-strategy", "Always"),
        ("memory", "1Gi"),
        ("disks", &disks),
        ("kernel-image", image),
        ("kernel", "/boot/vmlinuz"),
        ("initrd", "/boot/initrd.img"),
        ("kernel-args", &line),
    ];
    annotated_pod(node, "db", &annotations)
}

fn run_vm_command(node: &TestNode, words: &[&str]) -> String {
    let config = node.directory().join("config.toml").display().to_string();
    let words = [&["vm"], words, &["--namespace", "e2e", "--config", &config]].concat();
    run_program(nacelle_e2e::path_from_env("NACELLE_BIN"), words).ok()
}

/// Returns the bytes of a snapshot: of memory and devices.
fn snapshot_bytes(node: &TestNode, name: &str) -> u64 {
    let all: Value =
        serde_json::from_str(&run_vm_command(node, &["snapshots", "db", "-o", "json"])).expect("it is JSON");
    let all = all.as_array().cloned().unwrap_or_default();
    all.iter().find(|one| one["name"] == name).and_then(|one| one["sizeBytes"].as_u64()).expect("it was taken")
}

/// Returns the bytes of all files below a directory.
fn directory_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("it is a directory");
    let one = |entry: fs::DirEntry| match entry.metadata() {
        Ok(data) if data.is_dir() => directory_bytes(&entry.path()),
        data => data.map_or(0, |data| data.len()),
    };
    entries.map(|entry| one(entry.expect("it can be read"))).sum()
}

/// Returns the disk usage of the only VM's files in bytes.
fn vm_disk_usage(node: &TestNode) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let directories = fs::read_dir(node.directory().join("root/machines")).expect("machines are there");
    let files_size = |directory: fs::DirEntry| -> u64 {
        let files = fs::read_dir(directory.path()).expect("it is a directory");
        files.map(|file| file.and_then(|file| file.metadata()).map_or(0, |file| file.blocks() * 512)).sum()
    };
    directories.map(|directory| files_size(directory.expect("it can be read"))).max().unwrap_or_default()
}

/// Measures the milliseconds to write this many bytes into a file and sync it.
fn measure_write(node: &TestNode, bytes: u64) -> f64 {
    let path = node.directory().join("floor");
    let piece: Vec<u8> = (0..1u32 << 18).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let start = Instant::now();
    let mut file = fs::File::create(&path).expect("the directory is writable");
    let mut left = bytes as usize;
    while left > 0 {
        let now = left.min(piece.len());
        file.write_all(&piece[..now]).expect("there is room");
        left -= now;
    }
    file.sync_all().expect("there is room");
    let took = milliseconds(start);
    fs::remove_file(&path).expect("it was made");
    took
}
