//! Measures a VM without a daemon: the boot, disks and the network, compared with QEMU microvm.

use crate::BenchResult;
use crate::cri::RuntimeClient;
use crate::machines::{BenchVm, BootTimeline, RECORD_COMMAND, SAVE_COMMAND, VmDescription, Vmm};
use crate::median;
use crate::minimal::{self, BootFloor};
use nacelle_e2e::node::NodeOptions;
use nacelle_e2e::run::run_program;
use nacelle_e2e::{TestImage, TestNode, path_from_env, run};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Returns the duration of one throughput sample in seconds. Where the clock counts instructions, one second is as good as five.
fn sample_seconds() -> u32 {
    if std::env::var_os("NODE_ICOUNT").is_some() { 1 } else { 5 }
}

/// The seconds that each VM sends or receives before a sample: TCP has reached its rate by then.
const WARM_UP: u32 = 1;
/// The directory of the disks: on a file system with a device below it, as on a node. In-memory file systems, which hold the
/// rest, have no reads that wait.
const DISKS: &str = "/var/tmp";
/// The number of concurrent readers, for some queue depth.
const READERS: u32 = 8;

/// A directory for VMs and their parts.
pub struct GuestFiles {
    directory: tempfile::TempDir,
    initrd: PathBuf,
}

impl GuestFiles {
    /// Returns a directory with the agent in the guest.
    pub fn with_agent() -> GuestFiles {
        GuestFiles { directory: tempfile::tempdir().expect("a directory"), initrd: path_from_env("NACELLE_INITRD") }
    }

    /// Returns a directory with the guest of the engines' contract, which accepts commands.
    pub fn with_commands(directory: &Path) -> GuestFiles {
        GuestFiles {
            directory: tempfile::tempdir_in(directory).expect("a directory"),
            initrd: path_from_env("NACELLE_COMMANDS_INITRD"),
        }
    }

    /// Returns the directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the description of a VM like that of a pod: an empty disk for images and a writable one.
    pub fn describe(&self, disk_mib: u64) -> VmDescription {
        let disk = |name: &str, mib: u64| {
            let path = self.directory.path().join(name);
            if !path.exists() {
                // The disk has content, because a hole is read without the disk.
                let mut file = fs::File::create(&path).expect("the bench's directory is writable");
                let block = vec![0x5a; 1 << 20];
                (0..mib).for_each(|_| file.write_all(&block).expect("the bench's directory has room"));
                file.sync_all().expect("the bench's directory has a disk that works");
            }
            path
        };
        VmDescription {
            kernel: path_from_env("NACELLE_KERNEL"),
            initrd: self.initrd.clone(),
            memory_mib: 128,
            disks: vec![disk("images", 1), disk("scratch", disk_mib)],
            tap: None,
            asked: false,
            from: None,
            small_pages: false,
            template: false,
            directory: self.directory.path().to_owned(),
        }
    }
}

/// Alternates samples of Nacelle and QEMU; the first of each fills the page cache and does not count.
fn alternate(runs: usize, mut sample: impl FnMut(Vmm) -> f64) -> (Vec<f64>, Vec<f64>) {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for run in 0..=runs {
        let samples = (sample(Vmm::Ours), sample(Vmm::Qemu));
        if run > 0 {
            ours.push(samples.0);
            theirs.push(samples.1);
        }
    }
    (ours, theirs)
}

/// Measures the time from process start to the agent's first message.
pub fn boot(runs: usize) -> BenchResult {
    let files = GuestFiles::with_agent();
    let setup = files.describe(1);
    let (mut our_timelines, mut their_timelines, mut floors) = (Vec::new(), Vec::new(), Vec::new());
    let (ours, peers) = alternate(runs, |vmm| {
        if vmm == Vmm::Ours {
            floors.push(minimal::boot(&setup));
        }
        let timeline = BenchVm::start(vmm, &setup).timeline;
        match vmm {
            Vmm::Ours => our_timelines.push(timeline),
            Vmm::Qemu => their_timelines.push(timeline),
        }
        timeline.total
    });
    // The first sample of each does not count.
    let of = |lines: &[BootTimeline], part: fn(&BootTimeline) -> f64| {
        median(&lines.iter().skip(1).map(part).collect::<Vec<_>>())
    };
    // With the same kernel on the same CPU, the time before the kernel has a clock is the same with QEMU.
    let unclocked = of(&our_timelines, BootTimeline::unclocked);
    let bar = |name: &str, lines: &[BootTimeline]| {
        let (vmm, kernel) = (of(lines, BootTimeline::vmm) - unclocked, of(lines, |line| line.kernel) + unclocked);
        serde_json::json!({"name": name, "vmm": vmm, "kernel": kernel, "init": of(lines, |line| line.init)})
    };
    let ours_bar = bar("nacelle", &our_timelines);
    let of_floors = |part: fn(&BootFloor) -> f64| median(&floors.iter().skip(1).map(part).collect::<Vec<_>>());
    let against = |name: &str, vmm: f64, kernel: f64, total: f64| {
        serde_json::json!({"name": name, "vmm": vmm, "kernel": kernel, "init": 0.0,
                           "to qemu microvm": total / median(&peers), "ours to it": median(&ours) / total})
    };
    let floor =
        against("minimal VMM", of_floors(|one| one.vmm), of_floors(|one| one.kernel), of_floors(BootFloor::total));
    let kernel = ours_bar["kernel"].as_f64().unwrap_or(f64::NAN);
    let kernel = against("kernel alone", 0.0, kernel, kernel);
    let details = serde_json::json!([ours_bar, bar("qemu microvm", &their_timelines), floor, kernel]);
    BenchResult { ours, peers, details, ..BenchResult::new("ms", "qemu microvm") }
}

/// Measures the time from process start to the agent's first message for a restore from a snapshot of a guest that waits for its
/// configuration; the peer is a boot of the same guest.
pub fn snapshot(runs: usize) -> BenchResult {
    let files = GuestFiles::with_agent();
    let setup = files.describe(1);
    // As templates of pods are kept, built and rehearsed.
    let place = files.directory.path().join("templates");
    fs::create_dir(&place).expect("a directory");
    let place = place.to_str().expect("a path in UTF-8");
    run_program("mount", ["-t", "tmpfs", "-o", "huge=within_size", "templates", place]).ok();
    let directory = Path::new(place).join("snapshot");
    let template = VmDescription { template: true, ..setup.clone() };
    let saved = parse_number(
        &BenchVm::start(Vmm::Ours, &template).send_command(&format!("{SAVE_COMMAND}{}", directory.display())),
    );
    let memory = fs::metadata(directory.join("memory")).expect("the snapshot's memory");
    let restored = VmDescription { from: Some(directory.clone()), ..setup.clone() };
    let rehearsed = VmDescription { small_pages: true, ..restored.clone() };
    BenchVm::start(Vmm::Ours, &rehearsed).send_command(&format!("{RECORD_COMMAND}{}", directory.display()));
    let (ours, peers) = alternate(runs, |vmm| {
        let setup = if vmm == Vmm::Ours { &restored } else { &setup };
        BenchVm::start(Vmm::Ours, setup).timeline.total
    });
    run_program("umount", [place]).ok();
    let details = serde_json::json!([{"name": "saving", "ms": saved, "KiB": memory.blocks() / 2}]);
    BenchResult { ours, peers, details, ..BenchResult::new("ms", "a cold boot") }
}

/// Measures random reads of 4 KiB per second.
pub fn blk(runs: usize) -> BenchResult {
    let files = GuestFiles::with_commands(Path::new(DISKS));
    let setup = files.describe(256);
    let command = format!("reads 1 {} {READERS}", sample_seconds());
    let (ours, peers) = alternate(runs, |vmm| parse_number(&BenchVm::start(vmm, &setup).send_command(&command)));
    BenchResult { ours, peers, ..BenchResult::new("reads/s", "qemu microvm, io_uring") }
}

pub fn parse_number(answer: &str) -> f64 {
    answer.parse().unwrap_or_else(|_no_number| panic!("the guest says {answer:?}"))
}

/// Measures TCP from the guest to the node in MB/s.
pub fn net_send(runs: usize) -> BenchResult {
    measure_network(runs, |machine, seconds| {
        let listener = TcpListener::bind((NODE, 0)).expect("a port");
        let to = listener.local_addr().expect("an address").port();
        let sink = std::thread::spawn(move || {
            let (mut stream, _guest) = listener.accept().expect("the guest connects");
            let mut buffer = vec![0; 128 << 10];
            while stream.read(&mut buffer).is_ok_and(|count| count > 0) {}
        });
        let answer = machine.send_command(&format!("send {NODE} {to} {seconds}"));
        sink.join().expect("the sink ends with the connection");
        parse_number(&answer)
    })
}

/// Measures TCP from the node to the guest in MB/s.
pub fn net_receive(runs: usize) -> BenchResult {
    measure_network(runs, |machine, seconds| {
        let source = std::thread::spawn(move || {
            let end = Instant::now() + Duration::from_secs(120);
            let mut stream = loop {
                match TcpStream::connect((GUEST, PORT)) {
                    Ok(stream) => break stream,
                    Err(error) => assert!(Instant::now() < end, "the guest does not listen: {error}"),
                }
                std::thread::sleep(Duration::from_millis(20));
            };
            let (buffer, end) = (vec![0; 128 << 10], Instant::now() + Duration::from_secs(seconds.into()));
            while Instant::now() < end {
                stream.write_all(&buffer).expect("the guest reads");
            }
        });
        let answer = machine.send_command(&format!("receive {PORT}"));
        source.join().expect("the source ends in time");
        parse_number(&answer)
    })
}

const NODE: &str = "10.99.0.1";
const GUEST: &str = "10.99.0.2";
/// The port that the guest listens on.
const PORT: u16 = 5001;

/// Measures a network direction. `sample` lets a VM send or receive for this many seconds, and returns bytes per second.
fn measure_network(runs: usize, sample: impl Fn(&mut BenchVm, u32) -> f64) -> BenchResult {
    let files = GuestFiles::with_commands(&std::env::temp_dir());
    let tap = "benchtap0";
    let setup = VmDescription { tap: Some(tap.to_owned()), memory_mib: 256, ..files.describe(1) };
    let (ours, peers) = alternate(runs, |vmm| {
        let mut machine = BenchVm::start(vmm, &setup);
        run::run_program("ip", ["address", "add", &format!("{NODE}/24"), "dev", tap]).ok();
        run::run_program("ip", ["link", "set", tap, "up"]).ok();
        assert_eq!(machine.send_command(&format!("address {GUEST}")), "ok");
        sample(&mut machine, WARM_UP);
        sample(&mut machine, sample_seconds()) / 1e6
    });
    BenchResult { ours, peers, ..BenchResult::new("MB/s", "qemu microvm, vhost-net") }
}

/// Measures the resident memory of the pod process except guest memory in MiB, against the budget.
pub fn memory(runs: usize) -> BenchResult {
    let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut cri = RuntimeClient::connect(&node.directory().join("nacelle.sock"), &node.directory().join("logs"));
    let mut measured = BenchResult { peers: vec![5.0], ..BenchResult::new("MiB", "budget") };
    for _ in 0..runs {
        let (pod, _) = cri.run_pod();
        let (container, _) = cri.start(&pod, &image, &["/bin/sh", "-c", "echo here; sleep 1000"]);
        cri.exec(&container, &["/bin/true"]);
        let (resident, own) = resident_outside_guest(node.pids_matching("nacelle-pod --dir ")[0]);
        measured.ours.push(resident);
        measured.details = serde_json::json!([{"resident MiB": resident, "of these its own (anonymous)": own}]);
        cri.remove_pod(&pod);
    }
    measured
}

/// A mapping in /proc/PID/smaps.
struct Mapping {
    range: Range<u64>,
    /// It may be guest memory: anonymous, or of the template from which the VM started.
    can_be_guest: bool,
    /// The memory that a device shares with the guest.
    is_shared: bool,
    /// Resident and anonymous KiB.
    resident: [u64; 2],
}

/// Returns the resident MiB of a process outside of guest memory, which is its largest run of adjoining mappings and the memory that a
/// device shares with the guest; and the part of them that is not file pages, which all pods share.
fn resident_outside_guest(pid: i32) -> (f64, f64) {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the pod process runs");
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let address = |text: &str| u64::from_str_radix(text, 16).expect("an address");
        if let Some((start, end)) = first.split_once('-') {
            let name = words.nth(3).unwrap_or_default();
            mappings.push(Mapping {
                range: address(start)..address(end),
                can_be_guest: second.starts_with("rw") && (name.is_empty() || name.ends_with("/memory")),
                is_shared: name.starts_with("/memfd:nacelle-guest"),
                resident: [0; 2],
            });
        } else if let Some(n) = ["Rss:", "Anonymous:"].iter().position(|field| first == *field) {
            let mapping = mappings.last_mut().expect("a mapping comes first");
            mapping.resident[n] += second.parse::<u64>().expect("a number");
        }
    }
    mappings.retain(|mapping| !mapping.is_shared);
    let adjoin =
        |one: &Mapping, next: &Mapping| one.can_be_guest && next.can_be_guest && one.range.end == next.range.start;
    let size = |run: &&[Mapping]| {
        run.last().map_or(0, |last| last.range.end) - run.first().map_or(0, |first| first.range.start)
    };
    let guest = mappings.chunk_by(adjoin).max_by_key(size).unwrap_or_default();
    let sum = |of: &[Mapping], n: usize| of.iter().map(|mapping| mapping.resident[n]).sum::<u64>();
    let beside = |n: usize| (sum(&mappings, n) - sum(guest, n)) as f64 / 1024.0;
    (beside(0), beside(1))
}
