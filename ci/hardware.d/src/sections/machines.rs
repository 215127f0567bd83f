//! Measures VMs without pods: boot compared with peers, snapshots, disk and network.

use super::World;
use crate::memory::{beside_guest, mappings};
use crate::peers::{self, Peer};
use crate::report::{Report, Samples, rounds};
use crate::vm::{Description, ECHO, Machine, Pages, RECEIVE, SAVE, SEND, Under, ms};
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

impl World {
    /// Returns a VM with anonymous memory and the measuring guest.
    pub(super) fn machine(&self, name: &str) -> anyhow::Result<Description> {
        Ok(Description {
            kernel: self.pods.kernel.clone(),
            initrd: self.guest.clone(),
            memory_mib: peers::MEMORY_MIB,
            under: Under::Anonymous,
            pages: Pages::Transparent,
            disk: None,
            network: false,
            from: None,
            directory: self.directory(name)?,
        })
    }
}

/// Measures the time from the start of a process to a ready pod, and to a guest's init for the VM alone and for peers.
pub fn boot<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let (peers, machine) = (Peer::installed(), world.machine("boot")?);
    let mut setup = Samples::default();
    let mut beside = vec![Samples::default(); 2 + peers.len()];
    let all = rounds(until, 1, world.count(20), 2 + peers.len(), |kind| {
        let (took, resident) = match kind {
            0 => {
                let pod = world.runtime.block_on(world.pods.start())?;
                (pod.ready, beside_guest(&mappings(pod.pid())?))
            }
            1 => {
                let machine = Machine::start(&machine, world.step())?;
                setup.values.push(ms(machine.started, machine.times.running));
                let mark = machine.times.mark.context("the guest's init has printed no mark")?;
                (ms(machine.started, mark), beside_guest(&mappings(machine.pid())?))
            }
            peer => peers[peer - 2].boot(&machine.kernel, &machine.initrd, &machine.directory, world.step())?,
        };
        beside[kind].values.push(resident);
        Ok(took)
    })?;
    let guest = json!({"guest_mib": peers::MEMORY_MIB, "vcpus": 1});
    for (kind, samples) in all.iter().enumerate() {
        let mut config = guest.clone();
        let vmm = if kind < 2 { "nacelle" } else { peers[kind - 2].name() };
        config["vmm"] = json!(vmm);
        let name = if kind == 0 { "boot.pod_ready" } else { "boot.init" };
        report.samples(name, "ms", config.clone(), samples)?;
        config["of"] = json!(if kind == 0 { "pod process" } else { "VMM" });
        report.samples("boot.beside_guest", "MiB resident", config, &beside[kind])?;
    }
    report.samples("boot.vmm_setup", "ms", guest, &setup)
}

/// Saves and restores a VM whose agent waits for its configuration: from the start of the process to the agent's hello, compared
/// with booting the same VM.
pub fn snapshot<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let machine = Description { initrd: world.pods.initrd.clone(), ..world.machine("snapshot")? };
    let mut saves = Samples::default();
    let mut saved = PathBuf::new();
    for number in 0..world.count(5) {
        if number > 0 && Instant::now() >= until {
            saves.cut = true;
            break;
        }
        saved = world.disk.join(format!("saved-{number}"));
        let mut one = Machine::start(&machine, world.step())?;
        saves.values.push(one.ask_one(&format!("{SAVE}{}", saved.display()), world.step())?);
    }
    let guest = json!({"guest_mib": machine.memory_mib, "guest": "agent before its configuration"});
    report.samples("snapshot.save", "ms", guest.clone(), &saves)?;
    let memory = fs::metadata(saved.join("memory")).context("the snapshot has no memory")?;
    report.value("snapshot.size", "MiB", guest.clone(), memory.blocks() as f64 / 2048.0)?;
    let restored = Description { from: Some(saved), ..machine.clone() };
    let all = rounds(until, 1, world.count(20), 2, |kind| {
        let machine = Machine::start(if kind == 0 { &restored } else { &machine }, world.step())?;
        Ok(ms(machine.started, machine.times.hello))
    })?;
    for (name, samples) in ["snapshot.restore_to_hello", "snapshot.boot_to_hello"].into_iter().zip(&all) {
        report.samples(name, "ms", guest.clone(), samples)?;
    }
    Ok(())
}

/// Measures virtio-blk in the guest past its page cache, the same loops on the host over the same file, and a round trip over
/// vsock.
pub fn disk<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let mib = if world.quick { 32 } else { 512 };
    let path = world.disk.join("disk");
    fill(&path, mib)?;
    let description = Description { disk: Some(path.clone()), ..world.machine("with-disk")? };
    let mut machine = Machine::start(&description, world.step())?;
    let time = world.loop_ms(2000);
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
    let all = rounds(until, 0, world.count(3), 8, |kind| {
        if let Some(command) = guest.get(kind) {
            return Ok(machine.ask_one(command, world.step())? / scale(kind));
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
        report.samples(name, unit, config, samples)?;
    }
    let trips = Samples { values: machine.ask(&format!("{ECHO}{}", world.count(500)), world.step())?, cut: false };
    report.samples("vsock.round_trip", "ms", json!({}), &trips)
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
pub fn network<W: Write>(world: &World, report: &mut Report<W>, until: Instant) -> anyhow::Result<()> {
    let description = Description { network: true, memory_mib: 256, ..world.machine("network")? };
    let mut machine = Machine::start(&description, world.step())?;
    machine.ask("address", world.step())?;
    let time = world.loop_ms(3000);
    let commands = [format!("{SEND}{time}"), format!("{RECEIVE}{time}")];
    let all = rounds(until, usize::from(!world.quick), world.count(4), 2, |kind| {
        Ok(machine.ask_one(&commands[kind], world.step())? / 1e6)
    })?;
    let vhost = Path::new("/dev/vhost-net").exists();
    for (direction, samples) in ["guest to host", "host to guest"].into_iter().zip(&all) {
        report.samples(
            "network.tcp",
            "MB/s",
            json!({"direction": direction, "vhost_net": vhost, "streams": 1}),
            samples,
        )?;
    }
    Ok(())
}
