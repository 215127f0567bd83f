//! Measures VMs without pods: boot compared with peers, snapshots, disk and network.

use super::SectionInput;
use crate::memory::{mappings, overhead_mib};
use crate::peers::{self, Peer};
use crate::report::{FigureReport, Samples, sample_rounds};
use crate::vm::{Backing, BackingPages, ECHO, MeasuredVm, RECEIVE, SAVE, SEND, VmParameters, milliseconds_between};
use anyhow::Context;
use nacelle_hardware::disk;
use serde_json::json;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The number of concurrent readers, for some queue depth.
const READERS: u32 = 8;

impl SectionInput {
    /// Returns a VM with anonymous memory and the measuring guest.
    pub(super) fn vm_description(&self, name: &str) -> anyhow::Result<VmParameters> {
        Ok(VmParameters {
            kernel: self.pods.kernel.clone(),
            initrd: self.guest.clone(),
            memory_mib: peers::MEMORY_MIB,
            backing: Backing::Anonymous,
            pages: BackingPages::Transparent,
            disk: None,
            network: false,
            from: None,
            directory: self.create_directory(name)?,
        })
    }
}

/// Measures the time from the start of a process to a ready pod, and to a guest's init for the VM alone and for peers.
pub fn boot<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let (peers, description) = (Peer::installed(), input.vm_description("boot")?);
    let mut setup = Samples::default();
    let mut overhead = vec![Samples::default(); 2 + peers.len()];
    let all = sample_rounds(until, 1, input.sample_count(20), 2 + peers.len(), |kind| {
        let (took, resident) = match kind {
            0 => {
                let pod = input.runtime.block_on(input.pods.start())?;
                (pod.ready, overhead_mib(&mappings(pod.pid())?))
            }
            1 => {
                let vm = MeasuredVm::start(&description, input.step_deadline())?;
                setup.values.push(milliseconds_between(vm.started, vm.times.running));
                let mark = vm.times.mark.context("the guest's init has printed no mark")?;
                (milliseconds_between(vm.started, mark), overhead_mib(&mappings(vm.pid())?))
            }
            peer => peers[peer - 2].boot(
                &description.kernel,
                &description.initrd,
                &description.directory,
                input.step_deadline(),
            )?,
        };
        overhead[kind].values.push(resident);
        Ok(took)
    })?;
    let guest = json!({"guest_mib": peers::MEMORY_MIB, "vcpus": 1});
    for (kind, samples) in all.iter().enumerate() {
        let mut config = guest.clone();
        let vmm = if kind < 2 { "nacelle" } else { peers[kind - 2].name() };
        config["vmm"] = json!(vmm);
        let name = if kind == 0 { "boot.pod_ready" } else { "boot.init" };
        report.write_samples(name, "ms", config.clone(), samples)?;
        config["of"] = json!(if kind == 0 { "pod process" } else { "VMM" });
        report.write_samples("boot.beside_guest", "MiB resident", config, &overhead[kind])?;
    }
    report.write_samples("boot.vmm_setup", "ms", guest, &setup)
}

/// Saves and restores a VM whose agent waits for its configuration: from the start of the process to the agent's hello, compared
/// with booting the same VM.
pub fn snapshot<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let description = VmParameters { initrd: input.pods.initrd.clone(), ..input.vm_description("snapshot")? };
    let mut saves = Samples::default();
    let mut saved = PathBuf::new();
    for number in 0..input.sample_count(5) {
        if number > 0 && Instant::now() >= until {
            saves.cut = true;
            break;
        }
        saved = input.disk.join(format!("saved-{number}"));
        let mut saved_vm = MeasuredVm::start(&description, input.step_deadline())?;
        saves.values.push(saved_vm.query_one(&format!("{SAVE}{}", saved.display()), input.step_deadline())?);
    }
    let guest = json!({"guest_mib": description.memory_mib, "guest": "agent before its configuration"});
    report.write_samples("snapshot.save", "ms", guest.clone(), &saves)?;
    let memory = fs::metadata(saved.join("memory")).context("the snapshot has no memory")?;
    report.write_value("snapshot.size", "MiB", guest.clone(), memory.blocks() as f64 / 2048.0)?;
    let restored = VmParameters { from: Some(saved), ..description.clone() };
    let all = sample_rounds(until, 1, input.sample_count(20), 2, |kind| {
        let vm = MeasuredVm::start(if kind == 0 { &restored } else { &description }, input.step_deadline())?;
        Ok(milliseconds_between(vm.started, vm.times.hello))
    })?;
    for (name, samples) in ["snapshot.restore_to_hello", "snapshot.boot_to_hello"].into_iter().zip(&all) {
        report.write_samples(name, "ms", guest.clone(), samples)?;
    }
    Ok(())
}

/// Measures virtio-blk in the guest past its page cache, the same loops on the host over the same file, and a round trip over
/// vsock.
pub fn disk<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let mib = if input.quick { 32 } else { 512 };
    let path = input.disk.join("disk");
    fill(&path, mib)?;
    let description = VmParameters { disk: Some(path.clone()), ..input.vm_description("with-disk")? };
    let mut vm = MeasuredVm::start(&description, input.step_deadline())?;
    let time = input.loop_ms(2000);
    let guest = [
        format!("read /dev/vda {time}"),
        format!("write /dev/vda {time}"),
        format!("random /dev/vda 1 {time}"),
        format!("random /dev/vda {READERS} {time}"),
    ];
    let figures = [
        ("disk.read", "MB/s", json!({"block": "1 MiB"})),
        ("disk.write", "MB/s", json!({"block": "1 MiB", "flush": "at the end"})),
        ("disk.random_read", "reads/s", json!({"block": "4 KiB", "threads": 1})),
        ("disk.random_read", "reads/s", json!({"block": "4 KiB", "threads": READERS})),
    ];
    let scale = |kind: usize| if kind % 4 < 2 { 1e6 } else { 1.0 };
    let all = sample_rounds(until, 0, input.sample_count(3), 8, |kind| {
        if let Some(command) = guest.get(kind) {
            return Ok(vm.query_one(command, input.step_deadline())? / scale(kind));
        }
        let time = Duration::from_millis(time);
        let rate = match kind - 4 {
            0 => disk::read(&path, false, time),
            1 => disk::write(&path, false, time),
            2 => disk::random_reads(&path, false, 1, time),
            _ => disk::random_reads(&path, false, READERS, time),
        };
        Ok(rate.context("the loop over the file on the host failed")? / scale(kind))
    })?;
    for (kind, samples) in all.iter().enumerate() {
        let (name, unit, mut config) = figures[kind % 4].clone();
        config["where"] = json!(if kind < 4 { "guest" } else { "host, through its page cache" });
        report.write_samples(name, unit, config, samples)?;
    }
    let trips =
        Samples { values: vm.query(&format!("{ECHO}{}", input.sample_count(500)), input.step_deadline())?, cut: false };
    report.write_samples("vsock.round_trip", "ms", json!({}), &trips)
}

/// Creates a file with content: a hole is read without the disk.
fn fill(path: &Path, mib: usize) -> anyhow::Result<()> {
    let failed = || format!("cannot write {mib} MiB to {}", path.display());
    let mut file = File::create(path).with_context(failed)?;
    let block = vec![0x5a; 1 << 20];
    (0..mib).try_for_each(|_| file.write_all(&block)).with_context(failed)?;
    file.sync_all().with_context(failed)
}

/// Measures TCP between the guest and the host, over a tap in a network namespace of its own.
pub fn network<W: Write>(input: &SectionInput, report: &mut FigureReport<W>, until: Instant) -> anyhow::Result<()> {
    let description = VmParameters { network: true, memory_mib: 256, ..input.vm_description("network")? };
    let mut vm = MeasuredVm::start(&description, input.step_deadline())?;
    vm.query("address", input.step_deadline())?;
    let time = input.loop_ms(3000);
    let commands = [format!("{SEND}{time}"), format!("{RECEIVE}{time}")];
    let all = sample_rounds(until, usize::from(!input.quick), input.sample_count(4), 2, |kind| {
        Ok(vm.query_one(&commands[kind], input.step_deadline())? / 1e6)
    })?;
    let vhost = Path::new("/dev/vhost-net").exists();
    for (direction, samples) in ["guest to host", "host to guest"].into_iter().zip(&all) {
        report.write_samples(
            "network.tcp",
            "MB/s",
            json!({"direction": direction, "vhost_net": vhost, "streams": 1}),
            samples,
        )?;
    }
    Ok(())
}
