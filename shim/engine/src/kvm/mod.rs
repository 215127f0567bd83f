//! Implements the engine that runs VMs in this process, on KVM, with the VMM and devices of `vmm`. It knows no pods. Each
//! VM has a warden thread, which waits for its end, and the threads of its vCPUs and devices.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nacelle_base::Chain;
use nacelle_base::machine::{ConsoleKind, MemoryPages};
use nacelle_jail::ThreadKind;
use nacelle_vmm::Device;
use nacelle_vmm::balloon::Balloon;
use nacelle_vmm::fs::Fs;
use nacelle_vmm::hotplug;
use nacelle_vmm::machine::{self, HostPages, MAX_DEVICES, MemoryBacking, VmBuilder, VmConfig, VmExit};
use nacelle_vmm::net::{self, Net, NetConfig};
use nacelle_vmm::rng::Rng;
use nacelle_vmm::snapshot::{self, PageTracker, Snapshot, SnapshotFiles};
use nacelle_vmm::vsock::Vsock;

use crate::console::{self, ConsoleLog, PANIC_MESSAGE};
use crate::disk::create_slot;
use crate::exit_latch::{self, ExitLatch};
use crate::link::VsockLink;
use crate::machine::{
    Engine, ExitKind, GuestLink, Machine, MachineExit, MachineStatus, MemoryHotplug, Pausable, PauseSteps, Restorer,
    RunningSaveReport, Snapshottable, StopMode,
};
use crate::{CheckedSpec, EngineError, EngineKind, Limits, MachineSpec, Slot, Touched};

/// The maximum number of devices besides those of the specification (and the console): vsock, rng, the share, balloon.
const OWN_DEVICES: usize = 4;
/// The kernel parameters of every VM: no output on the console, and a reset at a panic (the VMM adds the way to reset).
/// Free page reporting takes 32 blocks of free memory out of use at a time until the host has released them, and checks
/// only that as many of the order named here remain: with the kernel's default order (2 MiB) these may be all blocks (of up
/// to 4 MiB) that a small guest has free, which crashes it on a busy node. With one vCPU, Linux would replace thousands of
/// lock prefixes at each boot, switching address spaces twice for each (docs/contributor/machine.md has the cost). Per-CPU memory
/// in pages: otherwise it grows in units of 2 MiB, for each of which the kernel clears a table of 4 MiB.
const CMDLINE: [&str; 5] =
    ["quiet", "panic=-1", "noreplace-smp", "page_reporting.page_reporting_order=10", "percpu_alloc=page"];
/// Informs the agent that its VM is to be saved. The kernel does not know the parameter, and passes it to init's environment.
const TEMPLATE_PARAMETER: &str = "nacelle_template=1";
/// The maximum duration of one wait; the warden then waits again.
const MAX_WAIT: Duration = Duration::from_secs(86_400);

/// The engine. It holds no resources.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvmEngine {}

impl KvmEngine {
    /// Returns an engine on this node's `/dev/kvm`. [`probe_kvm`](crate::probe_kvm()) determines whether that runs guests.
    pub fn new() -> KvmEngine {
        KvmEngine {}
    }
}

impl Engine for KvmEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Kvm
    }

    fn limits(&self) -> Limits {
        Limits {
            vcpus: machine::MAX_VCPUS.min(crate::spec::MAX_VCPUS),
            devices: MAX_DEVICES - OWN_DEVICES,
            cpu_models: false,
        }
    }

    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        boot(spec, false)
    }

    fn as_restorer(&self) -> Option<&dyn Restorer> {
        Some(self)
    }
}

impl Restorer for KvmEngine {
    fn start_template(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        boot(spec, true)
    }

    fn restore(&self, spec: CheckedSpec, saved: Snapshot) -> Result<Box<dyn Machine>, EngineError> {
        restore(spec, &saved, HostPages::Transparent)
    }

    fn restore_in_small_pages(&self, spec: CheckedSpec, saved: Snapshot) -> Result<Box<dyn Machine>, EngineError> {
        restore(spec, &saved, HostPages::Small)
    }
}

fn restore(spec: CheckedSpec, saved: &Snapshot, pages: HostPages) -> Result<Box<dyn Machine>, EngineError> {
    let spec = spec.into_inner();
    let hotplug_mib = spec.hotplug_mib;
    let restore_error = |source| EngineError::Machine { what: "restore", source };
    for (what, saved, here) in [
        ("vCPUs", saved.vcpus(), spec.vcpus.into()),
        ("MiB of memory", saved.memory_mib() as usize, spec.memory_mib as usize),
        ("MiB in huge pages", 0, hugetlb_mib(&spec) as usize),
    ] {
        if saved != here {
            return Err(restore_error(machine::Error::Mismatch { what, saved, here }));
        }
    }
    let finish_restore = |builder: VmBuilder| builder.restore(saved.state()).map_err(restore_error);
    let builder = || saved.builder_with(hotplug_mib, pages).map_err(restore_error);
    assemble_vm(spec, true, builder, finish_restore)
}

/// Boots a VM. With `announce_all_windows`, its kernel knows the windows of devices that clones may have.
fn boot(spec: CheckedSpec, announce_all_windows: bool) -> Result<Box<dyn Machine>, EngineError> {
    let spec = spec.into_inner();
    // Checks the files before memory and vCPUs are created.
    for path in [&spec.kernel, &spec.initrd] {
        fs::File::open(path).map_err(file_error("open", path))?;
    }
    let create_error = |source| EngineError::Machine { what: "create", source };
    let mut config = VmConfig { announce_all_windows, ..vm_config(&spec) };
    if announce_all_windows {
        config.cmdline.push(TEMPLATE_PARAMETER.to_owned());
    }
    assemble_vm(
        spec,
        false,
        || VmBuilder::new(config).map_err(create_error),
        |builder| builder.start().map_err(create_error),
    )
}

/// Returns how many MiB of the memory are pages of the node's hugetlb pool.
fn hugetlb_mib(spec: &MachineSpec) -> u32 {
    match spec.memory_pages {
        MemoryPages::Transparent => 0,
        MemoryPages::Hugetlb => spec.memory_mib,
    }
}

fn file_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> EngineError {
    let path = path.to_owned();
    move |source| EngineError::File { what, path, source }
}

/// Assembles a VM: creates console, disks and link, calls `builder`, adds the devices, and calls `finish`.
fn assemble_vm(
    spec: MachineSpec,
    paused: bool,
    builder: impl FnOnce() -> Result<VmBuilder, EngineError>,
    finish: impl FnOnce(VmBuilder) -> Result<machine::VmHandle, EngineError>,
) -> Result<Box<dyn Machine>, EngineError> {
    let in_huge_pages = spec.memory_pages == MemoryPages::Hugetlb;
    let (memory_mib, hotplug_mib) = (spec.memory_mib, spec.hotplug_mib);
    let console = ConsoleLog::create(&spec.console_log).map_err(file_error("open", &spec.console_log))?;
    let console = Arc::new(Mutex::new(console));
    let slots = spec.disks.iter().map(create_slot).collect::<Result<Vec<_>, _>>()?;
    let vsock_error = |source| EngineError::Vsock { cid: spec.guest_cid, source };
    let vsock = Vsock::new(spec.guest_cid).map_err(vsock_error)?;
    let vsock_device = vsock.device();
    let link = Arc::new(VsockLink::new(vsock).map_err(vsock_error)?);

    let failed = |source| EngineError::Machine { what: "create", source };
    let mut builder = builder()?;
    let sink = || {
        let console = Arc::clone(&console);
        Box::new(move |bytes: &[u8]| lock(&console).append(bytes))
    };
    builder.serial(sink()).map_err(failed)?;
    let on_virtio = spec.console == ConsoleKind::Virtio;
    let virtio_console = on_virtio.then(|| nacelle_vmm::console::VirtioConsole::new(sink()).device());
    for device in create_devices(spec, &slots, vsock_device, virtio_console)? {
        builder.attach(device).map_err(failed)?;
    }
    let vm = Arc::new(finish(builder)?);
    let running =
        Arc::new(RunningVm { vm: Mutex::new(Some(vm)), paused: AtomicBool::new(paused), ended: ExitLatch::default() });
    let warden = {
        let (running, link) = (Arc::clone(&running), Arc::clone(&link));
        let builder = thread::Builder::new().name("kvm-warden".into());
        let spawned =
            nacelle_jail::spawn(ThreadKind::Warden, builder, move || running.wait_and_record_exit(&link, &console));
        spawned.map_err(|source| EngineError::Resources { what: "a thread for the machine", source })?
    };
    Ok(Box::new(KvmMachine { running, warden: Some(warden), link, slots, in_huge_pages, memory_mib, hotplug_mib }))
}

fn vm_config(spec: &MachineSpec) -> VmConfig {
    let parameters = console::kernel_parameters(spec.console).iter().chain(&CMDLINE).copied();
    VmConfig {
        vcpus: spec.vcpus,
        memory_mib: spec.memory_mib,
        hotplug_mib: spec.hotplug_mib,
        backing: MemoryBacking::Private,
        pages: match spec.memory_pages {
            MemoryPages::Transparent => HostPages::Transparent,
            MemoryPages::Hugetlb => HostPages::Hugetlb,
        },
        kernel: spec.kernel.clone(),
        initrd: Some(spec.initrd.clone()),
        announce_all_windows: false,
        cmdline: parameters.map(str::to_owned).chain(spec.cmdline.iter().cloned()).collect(),
    }
}

/// Creates the devices, in the order in which the guest finds them, which determines the numbers of disks and network interfaces.
/// Those that every VM has come first, so that a VM without the others can be restored as one with them.
fn create_devices(
    spec: MachineSpec,
    slots: &[Slot],
    vsock: Box<dyn Device>,
    console: Option<Box<dyn Device>>,
) -> Result<Vec<Box<dyn Device>>, EngineError> {
    let mut devices = vec![vsock, Rng::new().device()];
    // The node may give a released huge page to another process; the guest's next access would then kill this process.
    if spec.memory_pages == MemoryPages::Transparent {
        devices.push(Balloon::new().device());
    }
    devices.extend(console);
    devices.extend(slots.iter().map(Slot::device));
    for (index, nic) in spec.nics.into_iter().enumerate() {
        let nic_error = |source| EngineError::Nic { index, source };
        let mut taps = vec![nic.tap];
        taps.extend(nic.more_queues);
        // Without vhost-net, threads of this process serve the queues.
        let vhost = net::open_vhost(taps.len()).unwrap_or_else(|error| {
            tracing::warn!("cannot use vhost-net, threads of this process serve the network queues: {}", Chain(&error));
            Vec::new()
        });
        let mtu = u16::try_from(nic.mtu).unwrap_or(u16::MAX); // `check` limits it to 65535
        devices.push(Net::new(NetConfig { taps, mac: nic.mac, mtu, vhost }).map_err(nic_error)?.device());
    }
    if let Some(streams) = spec.shares.into_iter().next() {
        let share_error = |source| EngineError::Resources { what: "the connection to the file-server process", source };
        devices.push(Fs::new(streams).map_err(share_error)?.sharing_queues().device());
    }
    Ok(devices)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state that the machine and its warden share.
struct RunningVm {
    /// The VM; taken at its end, which releases memory, vCPUs and devices.
    vm: Mutex<Option<Arc<machine::VmHandle>>>,
    paused: AtomicBool,
    ended: ExitLatch,
}

impl RunningVm {
    fn vm(&self) -> Option<Arc<machine::VmHandle>> {
        lock(&self.vm).clone()
    }

    /// Waits for the end and records it.
    fn wait_and_record_exit(&self, link: &VsockLink, console: &Mutex<ConsoleLog>) {
        let Some(vm) = self.vm() else { return };
        let exit = loop {
            if let Some(exit) = vm.wait(MAX_WAIT) {
                break exit;
            }
        };
        drop(vm);
        // This also drops the devices, which may still hold console output.
        drop(lock(&self.vm).take());
        link.mark_ended();
        let console = lock(console);
        self.ended.set(MachineExit { how: exit_kind(exit, &console), console_tail: console.tail() });
    }
}

/// Converts the end of the VM. A kernel that panics resets, or causes a triple fault if it is too early for that.
fn exit_kind(exit: VmExit, console: &ConsoleLog) -> ExitKind {
    match exit {
        VmExit::Killed => ExitKind::Killed,
        VmExit::Reset | VmExit::TripleFault { .. } if console.contains(PANIC_MESSAGE) => ExitKind::Panicked,
        VmExit::Reset => ExitKind::Shutdown,
        VmExit::TripleFault { .. } | VmExit::Failed { .. } => {
            ExitKind::Died { code: None, signal: None, message: exit.to_string() }
        }
    }
}

struct KvmMachine {
    running: Arc<RunningVm>,
    warden: Option<JoinHandle<()>>,
    link: Arc<VsockLink>,
    slots: Vec<Slot>,
    in_huge_pages: bool,
    memory_mib: u32,
    hotplug_mib: u32,
}

impl Machine for KvmMachine {
    fn status(&self) -> MachineStatus {
        self.running.ended.status(self.running.paused.load(Ordering::SeqCst))
    }

    fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.running.ended.wait(timeout)
    }

    fn stop(&self, how: StopMode) -> Result<MachineExit, EngineError> {
        let end = |vm: Arc<machine::VmHandle>| vm.kill().map(drop);
        self.running.ended.stop(how, std::process::id(), || {
            let killed = self.running.vm().map_or(Ok(()), end);
            killed.map_err(|source| EngineError::Machine { what: "kill", source })
        })
    }

    fn link(&self) -> Arc<dyn GuestLink> {
        Arc::<VsockLink>::clone(&self.link)
    }

    fn disks(&self) -> &[Slot] {
        &self.slots
    }

    fn as_pausable(&self) -> Option<&dyn Pausable> {
        Some(self)
    }

    fn as_memory_hotplug(&self) -> Option<&dyn MemoryHotplug> {
        (self.hotplug_mib > 0).then_some(self as _)
    }

    fn as_snapshottable(&self) -> Option<&dyn Snapshottable> {
        // The memory of a restored VM is a file with normal pages and anonymous memory.
        (!self.in_huge_pages).then_some(self as _)
    }
}

impl KvmMachine {
    /// A machine that its user has paused must not be resumed by the end of a brief pause.
    fn check_not_paused(&self) -> Result<(), EngineError> {
        if self.status() == MachineStatus::Paused { Err(EngineError::IsPaused) } else { Ok(()) }
    }

    fn set_paused(
        &self,
        what: &'static str,
        paused: bool,
        operation: impl Fn(&machine::VmHandle) -> Result<(), machine::Error>,
    ) -> Result<(), EngineError> {
        let vm = self.running.vm().ok_or(EngineError::Ended { what })?;
        operation(&vm).map_err(|source| match source {
            machine::Error::Ended { .. } => EngineError::Ended { what },
            source => EngineError::Machine { what, source },
        })?;
        self.running.paused.store(paused, Ordering::SeqCst);
        Ok(())
    }
}

impl Pausable for KvmMachine {
    fn pause(&self) -> Result<(), EngineError> {
        self.set_paused("pause", true, machine::VmHandle::pause)
    }

    fn resume(&self) -> Result<(), EngineError> {
        self.set_paused("resume", false, machine::VmHandle::resume)
    }
}

impl MemoryHotplug for KvmMachine {
    fn release_unused(&self, used_mib: u32) -> Result<(), EngineError> {
        let vm = self.running.vm().ok_or(EngineError::Ended { what: "release memory of" })?;
        let unused = machine::unused_hotplug_ranges(self.memory_mib, self.hotplug_mib, used_mib);
        hotplug::release_ranges(vm.memory(), &unused).map_err(|source| EngineError::ReleaseMemory { source })
    }
}

impl Snapshottable for KvmMachine {
    fn save(&self, to: &SnapshotFiles) -> Result<(), EngineError> {
        let vm = self.running.vm().ok_or(EngineError::Ended { what: "save" })?;
        snapshot::save_to_files(&vm, to).map_err(|source| EngineError::Snapshot { what: "write", source })
    }

    fn save_running(
        &self,
        to: &SnapshotFiles,
        tracker: &PageTracker,
        stop: &AtomicBool,
        steps: &mut dyn PauseSteps,
    ) -> Result<RunningSaveReport, EngineError> {
        let failed = |source| EngineError::Snapshot { what: "write", source };
        let step_failed = |source| EngineError::Step { source };
        let vm = self.running.vm().ok_or(EngineError::Ended { what: "save" })?;
        self.check_not_paused()?;
        let copy = snapshot::begin_save(&vm, to, tracker, stop).map_err(failed)?;
        let steps = StepsGuard(steps);
        steps.0.before_pause().map_err(step_failed)?;
        let paused = BriefPause::begin(self)?;
        let captured = copy.capture().map_err(failed).and_then(|captured| {
            steps.0.while_paused().map_err(step_failed)?;
            Ok(captured)
        });
        let resumed = paused.end();
        drop(steps);
        Ok(RunningSaveReport { pause: resumed?, pages: captured?.finish().map_err(failed)? })
    }

    fn record_working_set(&self, of: &SnapshotFiles, when: Touched) -> Result<(), EngineError> {
        let vm = self.running.vm().ok_or(EngineError::Ended { what: "measure the memory of" })?;
        snapshot::record_working_set(&vm, of, when).map_err(|source| EngineError::Snapshot { what: "complete", source })
    }
}

/// The steps of the caller, the last of which is taken in every case.
struct StepsGuard<'a>(&'a mut dyn PauseSteps);

impl Drop for StepsGuard<'_> {
    fn drop(&mut self) {
        self.0.after_pause();
    }
}

/// A pause of a machine that ends with this value.
struct BriefPause<'a> {
    machine: &'a KvmMachine,
    begin: Instant,
    is_over: bool,
}

impl<'a> BriefPause<'a> {
    /// Pauses a machine that runs.
    fn begin(machine: &'a KvmMachine) -> Result<BriefPause<'a>, EngineError> {
        machine.check_not_paused()?;
        let pause = BriefPause { machine, begin: Instant::now(), is_over: false };
        machine.pause()?;
        Ok(pause)
    }

    /// Resumes the machine, and returns how long it was paused.
    fn end(mut self) -> Result<Duration, EngineError> {
        self.is_over = true;
        self.machine.resume()?;
        Ok(self.begin.elapsed())
    }
}

impl Drop for BriefPause<'_> {
    fn drop(&mut self) {
        if !self.is_over
            && let Err(error) = self.machine.resume()
        {
            tracing::error!(error = %Chain(&error), "cannot resume the VM after a failure");
        }
    }
}

impl Drop for KvmMachine {
    fn drop(&mut self) {
        exit_latch::finish_drop(self.stop(StopMode::Kill), self.warden.take());
    }
}
