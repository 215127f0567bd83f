//! Assembles the VM: creates taps and scratch disk, starts the engine, and reports when the VM has ended.
//!
//! One thread lives as long as the VM, because an engine's process may be bound to the thread that started it; all other
//! blocking work runs on the blocking pool ([`run_blocking`]).

use crate::clock::ClockSteps;
use crate::error::PodError;
use crate::memory::MemoryLayout;
use crate::restore::{CheckpointBase, CheckpointFiles};
use crate::spec::{EngineSpec, MIN_MEMORY_MIB, PodSpec, ScratchSpec};
use crate::{agent, jail_dir, restore, scratch};
use nacelle_base::Chain;
use nacelle_base::files::{at, remove_if_there, remove_tree_if_there};
use nacelle_base::jailed::JailedFile;
use nacelle_base::machine::{ConsoleKind, MemoryPages};
use nacelle_base::net::Mac;
use nacelle_base::share::QUEUES;
use nacelle_base::task::run_blocking;
use nacelle_base::timeline::Timeline;
use nacelle_base::undo::UndoStack;
use nacelle_engine::{
    CheckedSpec, DiskSpec, Engine, EngineError, LinkListener, Machine, MachineExit, MachineSpec, NicSpec, PageTracker,
    Slot, Snapshot, StopMode,
};
use nacelle_jail::ThreadKind;
use nacelle_net::{NetNs, Tap, tap};
use std::fs::DirBuilder;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// The slot of the image disk: `disks[0]`, /dev/vda.
pub const IMAGE_DISK: usize = 0;
/// The slot of the disk for writable layers: `disks[1]`, /dev/vdb.
pub const SCRATCH_DISK: usize = 1;
/// The slot of the disk for block devices of the node: `disks[2]`, /dev/vdc.
pub const VOLUME_DISK: usize = 2;
/// The log of the guest's console, in [`crate::jail_dir`].
pub const CONSOLE_FILE: JailedFile = JailedFile::new("console.log");
/// The guest's vsock context id. Each VM has a vsock device of its own, so all guests can have the same id.
pub const GUEST_CID: u32 = 3;
/// The maximum MTU of the NIC; the guest sets the MTU of the CNI result.
pub(crate) const MAX_MTU: u32 = 65_535;
/// The maximum number of queues of a tap, which Nacelle's network device supports.
const MAX_QUEUES: usize = 8;

/// A running VM, and what must be released when it has ended.
pub struct AssembledVm {
    /// The VM.
    pub machine: Arc<dyn Machine>,
    /// Reports when and how the VM has ended.
    pub exit: agent::ExitWatch,
    /// How the VM has begun.
    pub start: VmStart,
    /// The actions that release the resources of the VM.
    pub undo: UndoStack,
    /// The layout of its memory.
    pub memory: MemoryLayout,
    /// The boot steps so far, with their durations.
    pub timeline: Timeline,
}

/// How a VM begins.
pub enum VmStart {
    /// Its agent connects for the boot handshake.
    Handshake {
        /// Accepts the agent's connection.
        incoming: Box<dyn LinkListener>,
        /// The VM was restored from a template, not booted.
        from_template: bool,
    },
    /// It continues from this checkpoint.
    Checkpoint(CheckpointBase),
}

/// Returns the name of the n-th tap, in the pod's network namespace.
pub fn tap_name(n: usize) -> String {
    format!("nacelle{n}")
}

/// The resources that are created before the VM, with rights that the process drops afterwards.
pub struct PreparedVm {
    taps: Vec<TapWithDhcp>,
    disk: PathBuf,
    /// The disk still has its name in the node's file system.
    pub has_name: bool,
    /// The virtio-fs channels to the file-server process.
    pub shares: Vec<[UnixStream; QUEUES]>,
    /// The channel for copied-in volumes to the file-server process.
    pub copied_volumes: Option<UnixStream>,
    /// Reports steps of the node's clock, for a guest with a clock of its own that follows it.
    pub clock_steps: Option<ClockSteps>,
    /// The template from which the VM is restored; `None`: it boots.
    pub template: Option<Snapshot>,
    /// The checkpoint from which the VM continues.
    pub checkpoint: Option<CheckpointFiles>,
    /// Tracks which pages the VM will have written; `None`: it cannot be saved while it runs.
    pub tracker: Option<PageTracker>,
    /// The boot steps so far, with their durations.
    pub timeline: Timeline,
}

impl PreparedVm {
    /// Returns what every pod has. The disk has no name.
    fn new(taps: Vec<TapWithDhcp>, disk: PathBuf, timeline: Timeline) -> PreparedVm {
        PreparedVm {
            taps,
            disk,
            has_name: false,
            shares: Vec::new(),
            copied_volumes: None,
            clock_steps: None,
            template: None,
            checkpoint: None,
            tracker: None,
            timeline,
        }
    }
}

/// Creates taps and scratch disk. A pod without a guest has neither; a machine pod has a directory in place of the disk.
/// Releases everything on failure. Blocks for a few milliseconds.
pub fn prepare(spec: &PodSpec) -> Result<PreparedVm, PodError> {
    let disk = spec.scratch_file();
    let timeline = Timeline::default();
    if matches!(spec.engine, EngineSpec::Host { .. }) {
        return Ok(PreparedVm::new(Vec::new(), disk, timeline));
    }
    if !spec.engine.has_disks() {
        remove_tree_if_there(&disk)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&disk).map_err(at("create", &disk))?;
        let step = timeline.begin("taps");
        let created = create_taps(spec)?;
        step.done();
        return Ok(PreparedVm::new(created, disk, timeline));
    }
    let step = timeline.begin("taps and scratch disk");
    let (taps, copied) = std::thread::scope(|scope| {
        let copied = scope.spawn(|| {
            remove_if_there(&disk)?;
            let (ScratchSpec { size_mib, templates }, to) = (&spec.scratch, &disk);
            match &spec.checkpoint {
                Some(base) => restore::copy_scratch(base, *size_mib, to),
                None => Ok(scratch::copy_template(&scratch::create_template(templates, *size_mib)?, to)?),
            }
        });
        (create_taps(spec), copied.join())
    });
    let copied = copied.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    match (taps, copied) {
        (Ok(taps), Ok(())) => {
            step.done();
            let watched = ClockSteps::watch();
            let clock_steps =
                watched.inspect_err(|error| tracing::warn!("cannot watch the node's clock for steps: {error}")).ok();
            Ok(PreparedVm { has_name: true, clock_steps, ..PreparedVm::new(taps, disk, timeline) })
        }
        (Err(error), _) => {
            // The caller needs the first error.
            let _ = remove_if_there(&disk);
            Err(error)
        }
        (Ok(_), Err(error)) => Err(error),
    }
}

/// Starts the VM. Releases everything on failure. The future must not be dropped before it completes, which takes no longer
/// than the start of the engine.
pub async fn assemble(
    spec: &PodSpec,
    dir: &Path,
    engine: Arc<dyn Engine>,
    prepared: PreparedVm,
) -> Result<AssembledVm, PodError> {
    let PreparedVm { taps, disk, has_name, shares, template, checkpoint, timeline, .. } = prepared;
    let mut undo = UndoStack::new();
    if has_name {
        undo.push("scratch disk", {
            let disk = disk.clone();
            move || remove_if_there(&disk)
        });
    }
    let saved = find_saved(spec, &*engine, template, checkpoint).await?;
    let from_template = saved.is_some() && spec.checkpoint.is_none();
    let memory = MemoryLayout::new(spec, saved.as_ref().map(Snapshot::memory_mib));
    let nics = taps.into_iter().map(|(tap, dhcp)| {
        let Tap { fd, more_queues, .. } = tap;
        Ok(NicSpec { tap: fd, more_queues, dhcp, mac: random_mac()?, mtu: MAX_MTU })
    });
    let has_vm = spec.engine.has_vm();
    let machine = MachineSpec {
        // Without a guest, vCPUs and memory have no meaning.
        vcpus: if has_vm { u8::try_from(spec.max_vcpus()).unwrap_or(u8::MAX) } else { 1 },
        topology: if has_vm { spec.topology } else { None },
        cpu_model: if has_vm { spec.cpu_model.clone() } else { None },
        memory_mib: if has_vm { memory.booted_mib } else { MIN_MEMORY_MIB },
        hotplug_mib: if has_vm { memory.hotplug_mib() } else { 0 },
        memory_pages: if has_vm { spec.memory_pages } else { MemoryPages::default() },
        console: if has_vm { spec.console } else { ConsoleKind::default() },
        kernel: spec.kernel.clone(),
        initrd: spec.initrd.clone(),
        cmdline: kernel_args(&spec.kernel_args, spec.vcpus, spec.max_vcpus()),
        disks: if spec.engine.has_disks() {
            vec![
                DiskSpec::Images { serial: "images".into() },
                DiskSpec::File { path: disk.clone(), read_only: false, serial: "scratch".into() },
                DiskSpec::Volumes { serial: "volumes".into() },
            ]
        } else {
            Vec::new()
        },
        nics: nics.collect::<Result<_, PodError>>()?,
        run_dir: jail_dir(dir),
        console_log: CONSOLE_FILE.in_jail(&jail_dir(dir)),
        guest_cid: GUEST_CID,
        shares,
    };
    let step = match &saved {
        Some(_) if from_template => "machine from its template",
        Some(_) => "machine from its checkpoint",
        None => "machine",
    };
    let (machine, exit) = timeline.measure(step, start(engine, machine, saved)).await?;
    // The VM has the disk open. Without a name its blocks are freed when this process ends, however that happens.
    if has_name && let Err(error) = remove_if_there(&disk) {
        tracing::warn!(disk = %disk.display(), "{}", Chain(&error));
    }
    if let Some(base) = spec.checkpoint.clone() {
        return Ok(AssembledVm { machine, exit, start: VmStart::Checkpoint(base), undo, memory, timeline });
    }
    let listening = machine.link().listen(agent::BOOT_PORT);
    let incoming = match listening {
        Ok(incoming) => incoming,
        Err(source) => {
            let error = PodError::Link { what: "listen for the guest's agent", source };
            let error = agent::exit_or(exit, error).await;
            stop(machine, StopMode::Kill).await?;
            return Err(error);
        }
    };
    Ok(AssembledVm { machine, exit, start: VmStart::Handshake { incoming, from_template }, undo, memory, timeline })
}

/// Returns what the VM is restored from; `None`: it boots. A checkpoint is read here, in the jail, because a guest may have made it.
async fn find_saved(
    spec: &PodSpec,
    engine: &dyn Engine,
    template: Option<Snapshot>,
    checkpoint: Option<CheckpointFiles>,
) -> Result<Option<Snapshot>, PodError> {
    let can_restore = engine.as_restorer().is_some();
    let Some(base) = spec.checkpoint.clone() else { return Ok(template.filter(|_saved| can_restore)) };
    let files = checkpoint.filter(|_files| can_restore).ok_or(PodError::NoRestorer)?;
    run_blocking("read the checkpoint", move || files.read(&base)).await?.map(Some)
}

/// Returns the kernel command-line parameters. The last of equal parameters counts: a VM with a vCPU reserve boots without the reserve.
pub fn kernel_args(own: &[String], vcpus: u32, max_vcpus: u32) -> Vec<String> {
    let online = (max_vcpus > vcpus).then(|| format!("maxcpus={vcpus}"));
    own.iter().cloned().chain(online).collect()
}

/// A tap, and for a machine pod the socket that receives the guest's DHCP requests.
type TapWithDhcp = (Tap, Option<OwnedFd>);

fn create_taps(spec: &PodSpec) -> Result<Vec<TapWithDhcp>, PodError> {
    let Some(network) = &spec.network else { return Ok(Vec::new()) };
    let netns = NetNs::open(&network.netns)?;
    let serves_dhcp = matches!(spec.engine, EngineSpec::Keeper { .. });
    let create = |n| {
        let queues = match spec.engine {
            EngineSpec::Kvm {} => spec.vcpus,
            EngineSpec::Keeper { .. } => network.queues.get(n).copied().unwrap_or(1),
            EngineSpec::Qemu { .. } | EngineSpec::Host { .. } => 1,
        };
        let tap = tap::create_multi_queue(&netns, &tap_name(n), tap_queues(queues))?;
        let dhcp = if serves_dhcp { Some(tap::open_dhcp_socket(&netns, &tap.name)?) } else { None };
        Ok((tap, dhcp))
    };
    (0..network.interfaces.len()).map(create).collect()
}

/// Returns the number of queues of a tap if the VM has or wants so many.
pub(crate) fn tap_queues(wanted: u32) -> usize {
    usize::try_from(wanted).unwrap_or(1).clamp(1, MAX_QUEUES)
}

/// Returns a random locally administered address; the guest replaces it with the address of the CNI result.
pub(crate) fn random_mac() -> Result<Mac, PodError> {
    let mut mac = [0; 6];
    random(&mut mac)?;
    mac[0] = (mac[0] & 0xfc) | 2;
    Ok(mac)
}

/// Fills the buffer with random bytes.
pub fn random(bytes: &mut [u8]) -> Result<(), PodError> {
    nacelle_base::random::fill(bytes).map_err(|source| PodError::Thread { what: "read random bytes", source })
}

type StartedVm = (Arc<dyn Machine>, agent::ExitWatch);

/// Restores a VM from what was saved, or boots it.
fn start_engine(
    engine: &dyn Engine,
    spec: CheckedSpec,
    saved: Option<Snapshot>,
) -> Result<Box<dyn Machine>, EngineError> {
    let Some((restorer, saved)) = engine.as_restorer().zip(saved) else { return engine.start(spec) };
    let machine = restorer.restore(spec, saved)?;
    if let Some(pausable) = machine.as_pausable() {
        pausable.resume()?;
    }
    Ok(machine)
}

async fn start(engine: Arc<dyn Engine>, spec: MachineSpec, saved: Option<Snapshot>) -> Result<StartedVm, PodError> {
    let spec = spec.check(&engine.limits())?;
    let (sender, started) = oneshot::channel();
    let (exit_sender, exit) = watch::channel(None);
    let run = move || {
        let machine: Arc<dyn Machine> = match start_engine(&*engine, spec, saved) {
            Ok(machine) => machine.into(),
            Err(error) => {
                // If the receiver is exit, no caller needs the error.
                let _ = sender.send(Err(error));
                return;
            }
        };
        if sender.send(Ok(Arc::clone(&machine))).is_ok() {
            let exit = loop {
                if let Some(exit) = machine.wait(Duration::from_secs(3_600)) {
                    break exit;
                }
            };
            exit_sender.send_replace(Some(exit));
        }
    };
    let thread = nacelle_jail::spawn(ThreadKind::Machine, std::thread::Builder::new().name("machine".into()), run);
    thread.map_err(|source| PodError::Thread { what: "start the thread of the VM", source })?;
    let machine = started.await.map_err(|_thread_has_ended| PodError::Ending)??;
    Ok((machine, exit))
}

/// Stops a VM and waits for its end.
pub async fn stop(machine: Arc<dyn Machine>, how: StopMode) -> Result<MachineExit, PodError> {
    Ok(run_blocking("stop the VM", move || machine.stop(how)).await??)
}

/// Returns a disk slot of the VM by its number.
pub fn disk(machine: &Arc<dyn Machine>, number: usize) -> Option<Slot> {
    machine.disks().get(number).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_vcpus_are_offline_at_boot() {
        let args = |vcpus, max_vcpus| kernel_args(&["debug".into()], vcpus, max_vcpus);
        assert_eq!(args(2, 2), ["debug"]);
        assert_eq!(args(2, 4), ["debug", "maxcpus=2"]);
    }
}
