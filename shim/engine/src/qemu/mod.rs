//! Implements the engine that runs VMs in QEMU's microvm, with the devices of `vmm` over vhost-user. It knows no pods. Each
//! VM has a warden thread (`process`) and the threads of its devices.

mod args;
mod qmp;
mod tsc;

pub use qmp::QmpError;
pub use tsc::emulated_tsc_parameter;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nacelle_base::machine::{ConsoleKind, MemoryPages, Topology};
use nacelle_base::share::QUEUES;
use nacelle_base::{Chain, files};
use nacelle_vmm::fs::Fs;
use nacelle_vmm::hotplug::release_ranges;
use nacelle_vmm::machine::unused_hotplug_ranges;
use nacelle_vmm::rng::Rng;
use nacelle_vmm::vhost_user::{self, VhostUserServer};
use nacelle_vmm::vsock::Vsock;

use self::args::{MAX_DEVICES, MicroVm, QemuDevice, VhostKind};
use self::qmp::Qmp;
use crate::console::ConsoleLog;
use crate::disk::create_slot;
use crate::link::VsockLink;
use crate::machine::{Engine, GuestLink, Machine, MachineExit, MachineStatus, MemoryHotplug, Pausable, StopMode};
use crate::process::{MachineProcess, Process};
use crate::{Accelerator, CheckedSpec, EngineError, EngineKind, Limits, MachineSpec, Slot};

/// The path of QEMU on Debian.
pub const PROGRAM: &str = "/usr/bin/qemu-system-x86_64";

/// The limit for QEMU to stop or resume its vCPUs.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of devices besides those of the specification (and the console): vsock, rng and the share.
const OWN_DEVICES: usize = 3;

/// The engine. It holds no resources.
#[derive(Clone, Debug)]
pub struct QemuEngine {
    program: PathBuf,
    accelerator: Accelerator,
}

impl QemuEngine {
    /// Returns an engine that runs `program` (an absolute path; see [`PROGRAM`]) with `accelerator` (see [`choose_accelerator`](crate::choose_accelerator)).
    pub fn new(program: impl Into<PathBuf>, accelerator: Accelerator) -> QemuEngine {
        QemuEngine { program: program.into(), accelerator }
    }
}

impl Engine for QemuEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }

    fn limits(&self) -> Limits {
        Limits { vcpus: crate::spec::MAX_VCPUS, devices: MAX_DEVICES - OWN_DEVICES, cpu_models: true }
    }

    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        let mut spec = spec.into_inner();
        let share = std::mem::take(&mut spec.shares).into_iter().next();
        let file_error = |what, path: &Path| {
            let path = path.to_owned();
            move |source| EngineError::File { what, path, source }
        };
        // QEMU would report a missing file too, but only after it has started.
        for path in [&spec.kernel, &spec.initrd] {
            fs::File::open(path).map_err(file_error("open", path))?;
        }
        let console = ConsoleLog::create(&spec.console_log).map_err(file_error("open", &spec.console_log))?;
        let slots = spec.disks.iter().map(create_slot).collect::<Result<Vec<_>, _>>()?;
        let vsock_error = |source| EngineError::Vsock { cid: spec.guest_cid, source };
        let vsock = Vsock::new(spec.guest_cid).map_err(vsock_error)?;

        let (devices, backends) = create_devices(&spec, share, &slots, &vsock)?;
        let (qmp, qemu_end) =
            UnixStream::pair().map_err(|source| EngineError::Resources { what: "the monitor's socket", source })?;
        let machine = MicroVm {
            accelerator: self.accelerator,
            topology: spec.topology.unwrap_or(Topology::single_socket(spec.vcpus.into())),
            cpu_model: spec.cpu_model.as_ref(),
            memory_mib: spec.memory_mib,
            hotplug_mib: spec.hotplug_mib,
            memory_pages: spec.memory_pages,
            console: spec.console,
            kernel: &spec.kernel,
            initrd: &spec.initrd,
            timer_parameters: match self.accelerator {
                Accelerator::Tcg => tsc::kernel_parameters(),
                Accelerator::Kvm => &[],
            },
            cmdline: &spec.cmdline,
            devices,
            qmp: qemu_end.as_raw_fd(),
        };
        let link = Arc::new(VsockLink::new(vsock).map_err(vsock_error)?);
        let on_exit = {
            let link = Arc::clone(&link);
            move || link.mark_ended()
        };
        tracing::debug!(program = %self.program.display(), ?machine, "starting QEMU");
        let (process, warden) =
            Process::start(&self.program, machine.args(), machine.inherited_descriptors(), console, on_exit)?;
        Ok(Box::new(QemuMachine {
            process: MachineProcess::new(process, warden),
            link,
            slots,
            qmp: Mutex::new(Qmp::new(qmp)),
            paused: AtomicBool::new(false),
            memory_mib: spec.memory_mib,
            hotplug_mib: spec.hotplug_mib,
            backends,
        }))
    }
}

/// Creates the devices in the order in which the guest finds them, and the servers behind the vhost-user ones.
fn create_devices(
    spec: &MachineSpec,
    share: Option<[UnixStream; QUEUES]>,
    slots: &[Slot],
    vsock: &Vsock,
) -> Result<(Vec<QemuDevice>, Vec<Backend>), EngineError> {
    let (mut backends, mut devices) = (Vec::new(), Vec::with_capacity(MAX_DEVICES));
    let mut serve = |kind, name, device| {
        let backend = Backend::serve(&spec.run_dir, name, device)?;
        let (name, socket) = (backend.name.clone(), backend.socket.clone());
        backends.push(backend);
        Ok(QemuDevice::VhostUser { kind, name, socket })
    };
    for (index, slot) in slots.iter().enumerate() {
        devices.push(serve(VhostKind::Block, format!("disk{index}"), slot.device())?);
    }
    for nic in &spec.nics {
        devices.push(QemuDevice::Net { tap: nic.tap.as_raw_fd(), mac: nic.mac, mtu: nic.mtu });
    }
    devices.push(serve(VhostKind::Vsock, "vsock".into(), vsock.device())?);
    devices.push(serve(VhostKind::Rng, "rng".into(), Rng::new().device())?);
    if let Some(streams) = share {
        let share_error = |source| EngineError::Resources { what: "the connection to the file-server process", source };
        let fs = Fs::new(streams).map_err(share_error)?.sharing_queues();
        devices.push(serve(VhostKind::Fs, "share".into(), fs.device())?);
    }
    devices.extend((spec.console == ConsoleKind::Virtio).then_some(QemuDevice::Console));
    // The balloon is optional: it only saves memory of the node. The node may give a released huge page to another
    // process, which would kill QEMU at the guest's next access.
    if devices.len() < MAX_DEVICES && spec.memory_pages == MemoryPages::Transparent {
        devices.push(QemuDevice::Balloon);
    }
    Ok((devices, backends))
}

/// A device of Nacelle behind a socket in the run directory. Dropping it ends the device and removes the socket.
struct Backend {
    name: String,
    socket: PathBuf,
    server: Option<VhostUserServer>,
}

impl Backend {
    /// Serves the device. The socket listens when this returns.
    fn serve(run_dir: &Path, name: String, device: Box<dyn nacelle_vmm::Device>) -> Result<Backend, EngineError> {
        let socket = run_dir.join(format!("{name}.sock"));
        let listener = UnixListener::bind(&socket).map_err(|source| EngineError::File {
            what: "listen on",
            path: socket.clone(),
            source,
        })?;
        let mut backend = Backend { name, socket, server: None };
        let device_name = &backend.name;
        let server = vhost_user::serve(device, listener)
            .map_err(|source| EngineError::Serve { device: device_name.clone(), source })?;
        backend.server = Some(server);
        Ok(backend)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop();
        }
        if let Err(error) = files::remove_if_there(&self.socket) {
            tracing::warn!(error = %Chain(&error), "cannot remove a device's socket");
        }
    }
}

struct QemuMachine {
    // Dropped first: QEMU has ended when the other fields are dropped.
    process: MachineProcess,
    link: Arc<VsockLink>,
    slots: Vec<Slot>,
    qmp: Mutex<Qmp>,
    paused: AtomicBool,
    memory_mib: u32,
    hotplug_mib: u32,
    backends: Vec<Backend>,
}

impl Machine for QemuMachine {
    fn status(&self) -> MachineStatus {
        self.process.status(self.paused.load(Ordering::SeqCst))
    }

    fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.process.wait(timeout)
    }

    fn stop(&self, how: StopMode) -> Result<MachineExit, EngineError> {
        self.process.stop(how)
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
}

impl MemoryHotplug for QemuMachine {
    fn release_unused(&self, used_mib: u32) -> Result<(), EngineError> {
        let ended = EngineError::Ended { what: "release memory of" };
        // All devices map the same memory; releasing it through one mapping releases it for all, and for QEMU.
        let memory =
            self.backends.iter().filter_map(|backend| backend.server.as_ref()).find_map(VhostUserServer::memory);
        let unused = unused_hotplug_ranges(self.memory_mib, self.hotplug_mib, used_mib);
        let memory = memory.ok_or(ended)?;
        release_ranges(&memory, &unused).map_err(|source| EngineError::ReleaseMemory { source })
    }
}

impl QemuMachine {
    fn run_qmp_command(&self, what: &'static str, command: &'static str, paused: bool) -> Result<(), EngineError> {
        let mut qmp = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        if self.wait(Duration::ZERO).is_some() {
            return Err(EngineError::Ended { what });
        }
        qmp.execute(command, CONTROL_TIMEOUT).map_err(|source| match self.wait(Duration::ZERO) {
            Some(_) => EngineError::Ended { what },
            None => EngineError::Control { what, source },
        })?;
        self.paused.store(paused, Ordering::SeqCst);
        Ok(())
    }
}

impl Pausable for QemuMachine {
    fn pause(&self) -> Result<(), EngineError> {
        self.run_qmp_command("pause", "stop", true)
    }

    fn resume(&self) -> Result<(), EngineError> {
        self.run_qmp_command("resume", "cont", false)
    }
}
