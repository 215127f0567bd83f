//! Manages the VM of the pod: creation, start, requests, end. The VM's state changes only in this module. It runs in tasks of the
//! runtime; blocking work is done elsewhere.

mod power;

use crate::console::SerialConsole;
use crate::dhcp::{self, Lease};
use crate::disk::{self, DiskDirectories};
use crate::error::KeeperError;
use crate::guest_agent::CommandResult;
use crate::hotplug_list::HotplugDisks;
use crate::json_lines::printable;
use crate::pins::CpuPinning;
use crate::qemu::{self, NetworkCard};
use crate::qemu_process::{self, QEMU_DIED, QemuProcess, QemuSockets, StartedQemu};
use crate::restart::{AfterRun, PowerRequest, RestartPolicy};
use crate::shares::{self, SharedDirectory};
use crate::sys;
use nacelle_base::Chain;
use nacelle_base::files::remove_tree_if_there;
use nacelle_base::share::QUEUES;
use nacelle_base::task::run_blocking;
use nacelle_engine::Accelerator;
use nacelle_engine::qemu::emulated_tsc_parameter;
use nacelle_model::machine::{self, Board, Bus, CardModel, Firmware, MachineDocument};
use nacelle_proto::agent::{BootConfig, Exit};
use nacelle_proto::common::Interface;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// The name of the VNC socket in the pod's directory.
pub const SCREEN_SOCKET: &str = "screen.sock";

/// The environment of a VM.
#[derive(Debug)]
pub struct Settings {
    /// The pod's directory, for sockets.
    pub directory: PathBuf,
    /// The directory for disks.
    pub scratch: PathBuf,
    /// The path of QEMU.
    pub qemu: PathBuf,
    /// The accelerator that QEMU uses.
    pub accelerator: Accelerator,
    /// The taps of the pod's interfaces for which the VM has cards, each with its queues.
    pub taps: Vec<Vec<OwnedFd>>,
    /// The packet sockets for DHCP requests, one per tap.
    pub dhcp: Vec<OwnedFd>,
    /// The connections to the file-server process, which has the directories of the node that are shared with the guest.
    pub shares: Vec<[UnixStream; QUEUES]>,
    /// The pod's network.
    pub network: BootConfig,
}

/// The state of a VM.
#[derive(Clone, Debug, PartialEq)]
pub enum PodVmState {
    /// The disks exist.
    Created,
    /// QEMU is being started.
    Starting,
    /// The VM runs or is paused.
    Running,
    /// The VM is stopped until a user starts it.
    Stopped,
    /// The VM has ended soon after its start, and waits for its restart.
    CrashLoopBackOff,
    /// The VM has ended, and its container with it.
    Ended(Exit),
}

/// The VM of a container.
pub struct PodVm {
    /// The container's name.
    pub id: String,
    /// The description of the VM.
    pub document: MachineDocument,
    /// The serial console.
    pub console: SerialConsole,
    settings: Arc<Settings>,
    directory: PathBuf,
    /// The disks, until the VM has ended: then other VMs may use those of the node.
    disks: Mutex<Arc<Vec<disk::PreparedDisk>>>,
    /// The hot-plugged disks. Locked while one is added or removed, and while QEMU starts.
    pub hotplug: tokio::sync::Mutex<HotplugDisks>,
    firmware: Option<(PathBuf, disk::DiskFiles)>,
    kernel: Option<disk::KernelFiles>,
    /// The shared directories, until the VM has ended.
    shares: Mutex<Vec<SharedDirectory>>,
    state: watch::Sender<PodVmState>,
    /// Notified after each event of QEMU: pause, resume, reset, the guest agent opens or closes its port.
    qemu_events: watch::Sender<()>,
    run_state: Mutex<RunState>,
    power_requested: Notify,
    /// The lock of the persistent state, until the VM has ended.
    lock: Mutex<Option<File>>,
    /// Held by the task that changes snapshots.
    snapshots: Arc<Semaphore>,
    /// The CPU pinning.
    pub pinning: CpuPinning,
}

/// The mutable part of a VM.
struct RunState {
    qemu: Option<Arc<QemuProcess>>,
    power_request: PowerRequest,
    is_pressing_power_button: bool,
}

impl PodVm {
    /// Creates the VM's files, with the disks in `handed_over`. Removes all of them on failure. Blocks.
    pub fn create(
        id: String,
        document: MachineDocument,
        mut handed_over: BTreeMap<String, File>,
        settings: Arc<Settings>,
    ) -> Result<PodVm, KeeperError> {
        let directory = settings.scratch.join(format!("machine-{id}"));
        check_document(&document, &settings)?;
        let network = guest_network(&document, &settings.network);
        let files = std::fs::create_dir_all(&directory)
            .map_err(|source| KeeperError::File { what: "create", path: directory.clone(), source })
            .and_then(|()| {
                let lock = document.keep.as_deref().map(lock_state).transpose()?;
                let directories =
                    DiskDirectories { own: &directory, pod: &settings.scratch, keep: document.keep.as_deref() };
                let disks = document.disks.iter();
                let disks = disks.map(|one| disk::prepare_disk(one, directories, &network, &mut handed_over));
                let disks = disks.collect::<Result<Vec<_>, _>>()?;
                let hotplug = HotplugDisks::load(directories.keep.unwrap_or(directories.pod))?;
                let firmware = match &document.firmware {
                    Firmware::Bios {} => None,
                    Firmware::Efi { code, variables, secure } => {
                        Some((code.clone(), disk::prepare_efi_variables(variables, *secure, directories)?))
                    }
                };
                let kernel =
                    document.kernel.as_ref().map(|kernel| disk::copy_kernel(kernel, &directory)).transpose()?;
                let shares =
                    shares::serve_directories(&document.filesystems, &id, &settings.directory, &settings.shares)?;
                Ok((disks, hotplug, firmware, kernel, lock, shares))
            });
        match files {
            Ok((disks, hotplug, firmware, kernel, lock, shares)) => Ok(PodVm {
                id,
                pinning: CpuPinning::new(document.processors.pins.clone()),
                document,
                console: SerialConsole::new(),
                settings,
                directory,
                disks: Mutex::new(Arc::new(disks)),
                hotplug: tokio::sync::Mutex::new(hotplug),
                firmware,
                kernel,
                shares: Mutex::new(shares),
                state: watch::Sender::new(PodVmState::Created),
                qemu_events: watch::Sender::new(()),
                run_state: Mutex::new(RunState {
                    qemu: None,
                    power_request: PowerRequest::None,
                    is_pressing_power_button: false,
                }),
                power_requested: Notify::new(),
                lock: Mutex::new(lock),
                snapshots: Arc::new(Semaphore::new(1)),
            }),
            Err(error) => {
                // The first error is returned.
                let _ = remove_tree_if_there(&directory);
                Err(error)
            }
        }
    }

    /// Returns the VM's state.
    pub fn state(&self) -> PodVmState {
        self.state.borrow().clone()
    }

    /// Returns receivers that are notified when the state changes, and after each event of QEMU.
    pub fn changes(&self) -> (watch::Receiver<PodVmState>, watch::Receiver<()>) {
        (self.state.subscribe(), self.qemu_events.subscribe())
    }

    /// Waits for the end of the VM at most `limit`; `None` after that.
    pub async fn wait_for_end(&self, limit: Duration) -> Option<Exit> {
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|state| matches!(state, PodVmState::Ended(_)));
        match tokio::time::timeout(limit, ended).await {
            Ok(Ok(state)) => match &*state {
                PodVmState::Ended(exit) => Some(*exit),
                _ => None,
            },
            _ => None,
        }
    }

    /// Starts the VM, or leaves it stopped if its run strategy requires that. Repeated calls have no effect.
    pub async fn start(self: &Arc<Self>) -> Result<(), KeeperError> {
        let policy = RestartPolicy::new(self.document.strategy);
        let starts = policy.starts_immediately();
        let mut first = false;
        self.state.send_if_modified(|state| {
            first = *state == PodVmState::Created;
            if first {
                *state = if starts { PodVmState::Starting } else { PodVmState::Stopped };
            }
            first
        });
        match self.state() {
            PodVmState::Ended(_) => return Err(KeeperError::WrongState { what: "start", state: "has ended" }),
            _ if !first => return Ok(()),
            _ => {}
        }
        let launched = match starts {
            true => match self.launch().await {
                Ok(launched) => Some(launched),
                Err(error) => {
                    self.set_ended(QEMU_DIED);
                    return Err(error);
                }
            },
            false => None,
        };
        tokio::spawn(Arc::clone(self).run_until_end(policy, launched));
        Ok(())
    }

    async fn launch(&self) -> Result<StartedQemu, KeeperError> {
        let sockets = QemuSockets::create()?;
        let [monitor, console, agent] = sockets.inherited_numbers();
        let disks = Arc::clone(&self.disks.lock().unwrap_or_else(PoisonError::into_inner));
        let share_sockets = self.shares().iter().map(|share| share.socket.clone()).collect();
        let hotplug = self.hotplug.lock().await;
        let hotplugged = hotplug.with_files();
        let config = qemu::QemuConfig {
            document: &self.document,
            accelerator: self.settings.accelerator,
            disks: &disks,
            hotplug: &hotplugged,
            shares: share_sockets,
            firmware: self.firmware.as_ref().map(|(code, variables)| (code.as_path(), variables)),
            kernel: self.kernel.as_ref(),
            clock: self.tsc_parameter().await?,
            cards: self.cards(),
            screen: self.screen(),
            monitor,
            console,
            agent,
        };
        let launched = qemu_process::launch(config, sockets, &self.settings.qemu, &self.directory).await?;
        let pinned = self.pinning.pin(&launched.qemu).await;
        if pinned.is_err() {
            launched.qemu.kill();
        }
        // A change of the pins from here on finds QEMU running.
        let pinning = pinned?;
        self.run_state().qemu = Some(Arc::clone(&launched.qemu));
        drop(pinning);
        if self.run_state().power_request == PowerRequest::End {
            // The VM was killed while it was about to start.
            launched.qemu.kill();
        }
        self.state.send_replace(PodVmState::Running);
        Ok(launched)
    }

    async fn tsc_parameter(&self) -> Result<Option<String>, KeeperError> {
        let needed = self.settings.accelerator == Accelerator::Tcg && self.document.board == Board::Microvm;
        // The measurement takes 2 ms.
        if needed { Ok(run_blocking("measure the emulated TSC", emulated_tsc_parameter).await?) } else { Ok(None) }
    }

    /// Runs the VM again and again, until the container ends.
    async fn run_until_end(self: Arc<Self>, mut policy: RestartPolicy, mut launched: Option<StartedQemu>) {
        let mut after_run = AfterRun::StayOff;
        loop {
            if let Some(StartedQemu { qemu, console, events }) = launched.take() {
                let since = Instant::now();
                self.console.connect(console, record_output).await;
                // DHCP is answered as long as the VM runs.
                let _servers = self.answer_dhcp();
                let code = qemu.wait_until_ended(events, &self.qemu_events).await;
                after_run = policy.after_run(code, since.elapsed(), self.finish_run());
                if after_run == AfterRun::EndContainer {
                    return self.end_with_code(code).await;
                }
            }
            let waited = match after_run {
                AfterRun::Restart(pause) => {
                    let state = if pause.is_zero() { PodVmState::Starting } else { PodVmState::CrashLoopBackOff };
                    self.state.send_replace(state);
                    self.wait_for_power_request(
                        pause,
                        &[PowerRequest::Start, PowerRequest::Restart, PowerRequest::Stop],
                    )
                    .await
                }
                AfterRun::StayOff | AfterRun::EndContainer => {
                    self.state.send_replace(PodVmState::Stopped);
                    self.wait_for_power_request(Duration::MAX, &[PowerRequest::Start, PowerRequest::Restart]).await
                }
            };
            match waited {
                PowerRequest::End => return self.end_with_code(0).await,
                PowerRequest::Stop => after_run = AfterRun::StayOff,
                PowerRequest::None | PowerRequest::Start | PowerRequest::Restart => match self.launch().await {
                    Ok(running) => launched = Some(running),
                    Err(error) => {
                        tracing::error!("the VM failed to start: {}", Chain(&error));
                        after_run = policy.after_run(QEMU_DIED, Duration::ZERO, PowerRequest::None);
                        if after_run == AfterRun::EndContainer {
                            return self.end_with_code(QEMU_DIED).await;
                        }
                    }
                },
            }
        }
    }

    /// Ends the container: removes the files of the VM.
    async fn end_with_code(self: &Arc<Self>, code: u32) {
        let removed = Arc::clone(self);
        if let Ok(Err(error)) = run_blocking("remove the files of the VM", move || removed.remove()).await {
            tracing::warn!("{}", Chain(&error));
        }
        self.set_ended(code);
    }

    fn cards(&self) -> Vec<NetworkCard> {
        let interfaces = self.settings.network.interfaces.iter();
        let pairs = self.document.cards.iter().zip(self.settings.taps.iter().zip(interfaces));
        let card = |(card, (tap, interface)): (&machine::Card, (&Vec<OwnedFd>, &Interface))| {
            let cni_mac = interface.mac.as_slice().try_into().unwrap_or_default();
            NetworkCard {
                taps: tap.iter().map(AsRawFd::as_raw_fd).collect(),
                model: card.model,
                mac: card.mac.unwrap_or(cni_mac),
                mtu: interface.mtu,
                boot_order: card.boot_order,
            }
        };
        pairs.map(card).collect()
    }

    /// Answers the DHCP requests of the VM's cards, until the result is dropped.
    fn answer_dhcp(&self) -> JoinSet<()> {
        let mut servers = JoinSet::new();
        let network = guest_network(&self.document, &self.settings.network);
        let cards = network.interfaces.iter().enumerate().zip(&self.settings.dhcp).take(self.document.cards.len());
        for ((n, interface), socket) in cards {
            let mac = interface.mac.as_slice().try_into().unwrap_or_default();
            let Some(lease) = Lease::new(&network, n, mac) else { continue };
            let served = socket.try_clone().map(|socket| dhcp::serve(socket, lease));
            let name = interface.name.clone();
            servers.spawn(async move {
                let ended = match served {
                    Ok(served) => served.await,
                    Err(error) => Err(error),
                };
                if let Err(error) = ended {
                    tracing::warn!(%error, interface = %name, "the DHCP server of the interface has failed");
                }
            });
        }
        servers
    }

    fn set_ended(&self, code: u32) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
        self.console.end();
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        *self.disks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::default();
        self.state.send_replace(PodVmState::Ended(Exit { code, finished_at_unix_nanos: at, ..Exit::default() }));
    }

    fn shares(&self) -> MutexGuard<'_, Vec<SharedDirectory>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_state(&self) -> MutexGuard<'_, RunState> {
        self.run_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn qemu(&self) -> Result<Arc<QemuProcess>, KeeperError> {
        let qemu = self.run_state().qemu.clone();
        let state = match self.state() {
            PodVmState::Created | PodVmState::Starting => "has not started",
            PodVmState::Stopped | PodVmState::CrashLoopBackOff => "is stopped",
            PodVmState::Running | PodVmState::Ended(_) => "has ended",
        };
        qemu.ok_or(KeeperError::WrongState { what: "send QEMU a command", state })
    }

    /// Sends QEMU a command.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.qemu()?.execute(command, arguments).await
    }

    /// Sends QEMU a command with a descriptor.
    pub async fn execute_with_descriptor(
        &self,
        command: &str,
        arguments: Value,
        descriptor: OwnedFd,
    ) -> Result<Value, KeeperError> {
        self.qemu()?.execute_with_descriptor(command, arguments, descriptor).await
    }

    /// Sends the guest agent a command other than guest-exec.
    pub async fn guest_command(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.qemu()?.agent.command(command, arguments).await
    }

    /// Returns how often the VM was resumed after a pause.
    pub fn resume_count(&self) -> Result<u64, KeeperError> {
        Ok(self.qemu()?.resume_count())
    }

    /// Returns a permit that prevents other tasks from taking, loading or deleting snapshots until it is dropped.
    pub fn lock_snapshots(&self) -> Result<OwnedSemaphorePermit, KeeperError> {
        let state = "is using its snapshots or its disks: wait until that is done";
        let alone = Arc::clone(&self.snapshots).try_acquire_owned();
        alone.map_err(|_busy| KeeperError::WrongState { what: "change its snapshots", state })
    }

    /// Returns the block nodes of which QEMU can take snapshots.
    pub async fn snapshot_nodes(&self) -> Vec<String> {
        let disks = Arc::clone(&self.disks.lock().unwrap_or_else(PoisonError::into_inner));
        let hotplug = self.hotplug.lock().await.with_files();
        qemu::snapshot_nodes(&disks, &hotplug, self.firmware.as_ref().map(|(_, variables)| variables))
    }

    /// Runs a command in the guest.
    pub async fn run(&self, args: &[String]) -> Result<CommandResult, KeeperError> {
        self.qemu()?.agent.run(args).await
    }

    /// Releases the VM's resources of the node and removes its files. Blocks.
    pub fn remove(&self) -> Result<(), KeeperError> {
        drop(std::mem::take(&mut *self.shares()));
        remove_tree_if_there(&self.directory).map_err(|error| KeeperError::Resource {
            what: "remove the VM's disks",
            source: std::io::Error::other(error),
        })
    }

    /// Returns the path of the VNC socket, if the VM has a screen.
    pub fn screen(&self) -> Option<PathBuf> {
        self.document.screen.then(|| self.settings.directory.join(SCREEN_SOCKET))
    }

    /// Returns the CPU time in nanoseconds, and the memory in use in bytes: as the guest reports it, or else all of its memory.
    pub async fn resource_usage(&self) -> Result<(u64, u64), KeeperError> {
        let qemu = self.qemu()?;
        let nanos = sys::cpu_time_nanos(qemu.pid()).unwrap_or_default();
        let total_memory = self.document.memory_mib << 20;
        if !self.document.balloon {
            return Ok((nanos, total_memory));
        }
        let arguments = json!({ "path": "/machine/peripheral/balloon", "property": "guest-stats" });
        let reply = self.execute("qom-get", arguments).await?;
        Ok((nanos, in_use(&reply, total_memory)))
    }
}

/// Returns how much of the memory `total_memory` the guest uses, from its balloon statistics.
fn in_use(reply: &Value, total_memory: u64) -> u64 {
    let figure = |name: &str| reply.get("stats")?.get(name)?.as_u64().filter(|bytes| *bytes <= total_memory);
    match (figure("stat-total-memory"), figure("stat-available-memory")) {
        (Some(total), Some(available)) => total_memory - total + total.saturating_sub(available),
        _ => total_memory,
    }
}

/// Locks the persistent state for this process. The kernel releases the lock when the process ends in any way.
fn lock_state(keep: &Path) -> Result<File, KeeperError> {
    let path = keep.join("lock");
    let failed = |what| KeeperError::file(what, &path);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(failed("open"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(KeeperError::Locked { path: path.clone() }),
        Err(TryLockError::Error(source)) => Err(failed("lock")(source)),
    }
}

/// Returns the pod's network with the hardware addresses of the VM's own cards.
fn guest_network(document: &MachineDocument, pod: &BootConfig) -> BootConfig {
    let mut network = pod.clone();
    for (interface, card) in network.interfaces.iter_mut().zip(&document.cards) {
        if let Some(mac) = card.mac {
            interface.mac = mac.to_vec();
        }
    }
    network
}

/// Checks what this node cannot provide, before anything is created.
fn check_document(document: &MachineDocument, settings: &Settings) -> Result<(), KeeperError> {
    let field = |field, value: String, rule| Err(KeeperError::InvalidField { field, value, rule });
    let count = document.processors.count();
    if count == 0 || count > 255 {
        return field("processors", count.to_string(), "1 to 255 vCPUs are expected");
    }
    if document.processors.pins.as_ref().is_some_and(|pinning| u32::try_from(pinning.len()) != Ok(count)) {
        return field("processors.pins", count.to_string(), "one CPU of the node for each vCPU is expected");
    }
    if document.cards.len() > settings.taps.len().min(settings.network.interfaces.len()) {
        return field("cards", document.cards.len().to_string(), "the pod has fewer network interfaces");
    }
    for ((card, interface), tap) in document.cards.iter().zip(&settings.network.interfaces).zip(&settings.taps) {
        if card.interface != interface.name {
            return field("cards[].interface", printable(&card.interface), "the pod's interfaces are in another order");
        }
        if usize::try_from(card.queues) != Ok(tap.len()) {
            return field("cards[].queues", card.queues.to_string(), "its tap has a different number of queues");
        }
    }
    check_host_devices(document)?;
    check_slots(document)?;
    if document.board != Board::Q35 && matches!(document.firmware, Firmware::Efi { secure: true, .. }) {
        return field("firmware.secure", "true".into(), "only the board q35 supports secure boot");
    }
    let is_plain = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let has_error =
        |disk: &&machine::Disk| disk.serving.shared && !matches!(disk.source, machine::DiskSource::Device { .. });
    if let Some(disk) = document.disks.iter().find(has_error) {
        return field("disks[].serving.shared", disk.name.clone(), "only a device or a file of the node can be shared");
    }
    let filesystems = document.filesystems.iter().map(|one| ("filesystems[].name", &one.name));
    let disks = document.disks.iter().map(|disk| ("disks[].name", &disk.name));
    match disks.chain(filesystems).find(|(_, name)| !is_plain(name)) {
        Some((at, name)) => field(at, name.clone(), "letters, digits and '-' are expected"),
        None => Ok(()),
    }
}

/// Checks whether the devices of the node can be passed through.
fn check_host_devices(document: &MachineDocument) -> Result<(), KeeperError> {
    let rule = match document.host_devices.iter().find(|device| !machine::is_pci_address(&device.address)) {
        Some(_) => "the address of a PCI device is expected",
        None if document.host_devices.len() > machine::MOST_HOST_DEVICES => {
            "the board has no free slot for another PCI device of the node"
        }
        None if document.board == Board::Microvm && !document.host_devices.is_empty() => "the board microvm has no PCI",
        None => return Ok(()),
    };
    let reply = document.host_devices.iter().map(|device| printable(&device.address)).collect::<Vec<_>>().join(", ");
    Err(KeeperError::InvalidField { field: "host_devices", value: reply, rule })
}

/// Checks whether the board has enough slots for all devices.
fn check_slots(document: &MachineDocument) -> Result<(), KeeperError> {
    let Some(places) = document.board.places() else { return Ok(()) };
    let field = |field, value: String, rule| Err(KeeperError::InvalidField { field, value, rule });
    let has_error = |disk: &&machine::Disk| !matches!(disk.bus, Bus::Virtio | Bus::Scsi);
    if let Some(disk) = document.disks.iter().find(has_error) {
        return field("disks[].bus", disk.name.clone(), "the board microvm supports only virtio and scsi");
    }
    if document.cards.iter().any(|card| card.model != CardModel::Virtio) {
        return field("cards[].model", document.cards.len().to_string(), "the board microvm supports only virtio");
    }
    if document.screen || document.tablet || document.watchdog.is_some() {
        return field("board", "microvm".into(), "it has no screen, tablet or watchdog");
    }
    let count = qemu::virtio_devices(document);
    match count > places {
        true => field("disks", count.to_string(), "the board microvm has slots for 24 virtio devices"),
        false => Ok(()),
    }
}

/// Writes to standard output, which is the flight recorder: the pod process keeps the end of it.
fn record_output(piece: &[u8]) {
    use std::io::Write;
    // If the reader is gone, the output is not needed.
    let _ = std::io::stdout().write_all(piece).and_then(|()| std::io::stdout().flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balloon_statistics_are_bounded() {
        let reply = |total: u64, available: u64| json!({ "stats": { "stat-total-memory": total, "stat-available-memory": available } });
        assert_eq!(in_use(&reply(900, 300), 1000), 700);
        assert_eq!(in_use(&reply(900, 1000), 1000), 100);
        // QEMU's value for "not reported".
        assert_eq!(in_use(&reply(u64::MAX, 5), 1000), 1000);
        assert_eq!(in_use(&Value::Null, 1000), 1000);
    }
}
