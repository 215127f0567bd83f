//! Manages the VM of the pod: creation, start, requests, end. The VM's state changes only in this module. It runs in tasks of the
//! runtime; blocking work is done elsewhere.

mod orders;

use crate::added;
use crate::console::Console;
use crate::dhcp::{self, Lease};
use crate::disk::{self, Directories};
use crate::error::KeeperError;
use crate::guest_agent::Outcome;
use crate::lines::printable;
use crate::live::{self, DIED, Ends, Launched, Live};
use crate::pins::Pins;
use crate::qemu::{self, Card};
use crate::runs::{Next, Order, Runs};
use crate::shares::{self, Share};
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
pub enum State {
    /// The disks exist.
    Created,
    /// QEMU is being started.
    Starting,
    /// The VM runs or is paused.
    Running,
    /// The VM is stopped until a user starts it.
    Off,
    /// The VM has ended soon after its start, and waits for its restart.
    Crashing,
    /// The VM has ended, and its container with it.
    Ended(Exit),
}

/// The VM of a container.
pub struct Machine {
    /// The container's name.
    pub id: String,
    /// The description of the VM.
    pub document: MachineDocument,
    /// The serial console.
    pub console: Console,
    settings: Arc<Settings>,
    directory: PathBuf,
    /// The disks, until the VM has ended: then other VMs may use those of the node.
    disks: Mutex<Arc<Vec<disk::Ready>>>,
    /// The added disks. Locked while one is added or removed, and while QEMU starts.
    pub added: tokio::sync::Mutex<added::Disks>,
    firmware: Option<(PathBuf, disk::Files)>,
    kernel: Option<disk::KernelFiles>,
    /// The shared directories, until the VM has ended.
    shares: Mutex<Vec<Share>>,
    state: watch::Sender<State>,
    changing: Mutex<Changing>,
    ordered: Notify,
    /// The lock of the persistent state, until the VM has ended.
    lock: Mutex<Option<File>>,
    /// Held by the task that changes snapshots.
    snapshots: Arc<Semaphore>,
    /// The CPU pinning.
    pub pins: Pins,
}

/// The mutable part of a VM.
struct Changing {
    live: Option<Arc<Live>>,
    order: Order,
    pressing: bool,
}

impl Machine {
    /// Creates the VM's files, with the disks in `handed`. Removes all of them on failure. Blocks.
    pub fn make(
        id: String,
        document: MachineDocument,
        mut handed: BTreeMap<String, File>,
        settings: Arc<Settings>,
    ) -> Result<Machine, KeeperError> {
        let directory = settings.scratch.join(format!("machine-{id}"));
        check(&document, &settings)?;
        let network = network(&document, &settings.network);
        let made = std::fs::create_dir_all(&directory)
            .map_err(|source| KeeperError::File { what: "make", path: directory.clone(), source })
            .and_then(|()| {
                let lock = document.keep.as_deref().map(lock).transpose()?;
                let directories =
                    Directories { own: &directory, pod: &settings.scratch, keep: document.keep.as_deref() };
                let disks = document.disks.iter();
                let disks = disks.map(|one| disk::prepare(one, directories, &network, &mut handed));
                let disks = disks.collect::<Result<Vec<_>, _>>()?;
                let added = added::Disks::load(directories.keep.unwrap_or(directories.pod))?;
                let firmware = match &document.firmware {
                    Firmware::Bios {} => None,
                    Firmware::Efi { code, variables, secure } => {
                        Some((code.clone(), disk::variables(variables, *secure, directories)?))
                    }
                };
                let kernel = document.kernel.as_ref().map(|kernel| disk::kernel(kernel, &directory)).transpose()?;
                let shares = shares::serve(&document.filesystems, &id, &settings.directory, &settings.shares)?;
                Ok((disks, added, firmware, kernel, lock, shares))
            });
        match made {
            Ok((disks, added, firmware, kernel, lock, shares)) => Ok(Machine {
                id,
                pins: Pins::new(document.processors.pins.clone()),
                document,
                console: Console::new(),
                settings,
                directory,
                disks: Mutex::new(Arc::new(disks)),
                added: tokio::sync::Mutex::new(added),
                firmware,
                kernel,
                shares: Mutex::new(shares),
                state: watch::channel(State::Created).0,
                changing: Mutex::new(Changing { live: None, order: Order::None, pressing: false }),
                ordered: Notify::new(),
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
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Waits for the end of the VM at most `limit`; `None` after that.
    pub async fn ended(&self, limit: Duration) -> Option<Exit> {
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|state| matches!(state, State::Ended(_)));
        match tokio::time::timeout(limit, ended).await {
            Ok(Ok(state)) => match &*state {
                State::Ended(exit) => Some(*exit),
                _ => None,
            },
            _ => None,
        }
    }

    /// Starts the VM, or leaves it stopped if its run strategy requires that. Repeated calls have no effect.
    pub async fn start(self: &Arc<Self>) -> Result<(), KeeperError> {
        let runs = Runs::new(self.document.strategy);
        let begins = runs.begins();
        let mut first = false;
        self.state.send_if_modified(|state| {
            first = *state == State::Created;
            if first {
                *state = if begins { State::Starting } else { State::Off };
            }
            first
        });
        match self.state() {
            State::Ended(_) => return Err(KeeperError::State { what: "start", state: "has ended" }),
            _ if !first => return Ok(()),
            _ => {}
        }
        let launched = match begins {
            true => match self.launch().await {
                Ok(launched) => Some(launched),
                Err(error) => {
                    self.end(DIED);
                    return Err(error);
                }
            },
            false => None,
        };
        tokio::spawn(Arc::clone(self).live_on(runs, launched));
        Ok(())
    }

    async fn launch(&self) -> Result<Launched, KeeperError> {
        let ends = Ends::make()?;
        let [monitor, console, agent] = ends.numbers();
        let disks = Arc::clone(&self.disks.lock().unwrap_or_else(PoisonError::into_inner));
        let sockets = self.shares().iter().map(|share| share.socket.clone()).collect();
        let added = self.added.lock().await;
        let known = added.known();
        let machine = qemu::Machine {
            document: &self.document,
            accelerator: self.settings.accelerator,
            disks: &disks,
            added: &known,
            shares: sockets,
            firmware: self.firmware.as_ref().map(|(code, variables)| (code.as_path(), variables)),
            kernel: self.kernel.as_ref(),
            clock: self.clock().await?,
            cards: self.cards(),
            screen: self.screen(),
            monitor,
            console,
            agent,
        };
        let launched = live::launch(machine, ends, &self.settings, &self.directory).await?;
        let pinned = self.pins.pin(&launched.live).await;
        if pinned.is_err() {
            launched.live.kill();
        }
        // A change of the pins from here on finds QEMU running.
        let pins = pinned?;
        self.changing().live = Some(Arc::clone(&launched.live));
        drop(pins);
        if self.changing().order == Order::End {
            // The VM was killed while it was about to start.
            launched.live.kill();
        }
        self.state.send_replace(State::Running);
        Ok(launched)
    }

    async fn clock(&self) -> Result<Option<String>, KeeperError> {
        let needed = self.settings.accelerator == Accelerator::Tcg && self.document.board == Board::Microvm;
        // The measurement takes 2 ms.
        if needed { Ok(run_blocking("measure the emulated TSC", emulated_tsc_parameter).await?) } else { Ok(None) }
    }

    /// Runs the VM again and again, until the container ends.
    async fn live_on(self: Arc<Self>, mut runs: Runs, mut launched: Option<Launched>) {
        let mut next = Next::Off;
        loop {
            if let Some(Launched { live, console, events }) = launched.take() {
                let since = Instant::now();
                self.console.connect(console, record).await;
                // DHCP is answered as long as the VM runs.
                let _answers = self.answer_dhcp();
                let code = live.ended(events).await;
                next = runs.next(code, since.elapsed(), self.ended_with_order());
                if next == Next::End {
                    return self.over(code).await;
                }
            }
            let waited = match next {
                Next::Again(pause) => {
                    let state = if pause.is_zero() { State::Starting } else { State::Crashing };
                    self.state.send_replace(state);
                    self.wait_for_order(pause, &[Order::On, Order::Again, Order::Off]).await
                }
                Next::Off | Next::End => {
                    self.state.send_replace(State::Off);
                    self.wait_for_order(Duration::MAX, &[Order::On, Order::Again]).await
                }
            };
            match waited {
                Order::End => return self.over(0).await,
                Order::Off => next = Next::Off,
                Order::None | Order::On | Order::Again => match self.launch().await {
                    Ok(running) => launched = Some(running),
                    Err(error) => {
                        tracing::error!("the machine does not start: {}", Chain(&error));
                        next = runs.next(DIED, Duration::ZERO, Order::None);
                        if next == Next::End {
                            return self.over(DIED).await;
                        }
                    }
                },
            }
        }
    }

    /// Ends the container: removes the files of the VM.
    async fn over(self: &Arc<Self>, code: u32) {
        let gone = Arc::clone(self);
        if let Ok(Err(error)) = run_blocking("remove the files of the VM", move || gone.remove()).await {
            tracing::warn!("{}", Chain(&error));
        }
        self.end(code);
    }

    fn cards(&self) -> Vec<Card> {
        let interfaces = self.settings.network.interfaces.iter();
        let pairs = self.document.cards.iter().zip(self.settings.taps.iter().zip(interfaces));
        let card = |(card, (tap, interface)): (&machine::Card, (&Vec<OwnedFd>, &Interface))| {
            let given = interface.mac.as_slice().try_into().unwrap_or_default();
            Card {
                taps: tap.iter().map(AsRawFd::as_raw_fd).collect(),
                model: card.model,
                mac: card.mac.unwrap_or(given),
                mtu: interface.mtu,
                boot_order: card.boot_order,
            }
        };
        pairs.map(card).collect()
    }

    /// Answers the DHCP requests of the VM's cards, until the result is dropped.
    fn answer_dhcp(&self) -> JoinSet<()> {
        let mut answers = JoinSet::new();
        let network = network(&self.document, &self.settings.network);
        let cards = network.interfaces.iter().enumerate().zip(&self.settings.dhcp).take(self.document.cards.len());
        for ((n, interface), socket) in cards {
            let mac = interface.mac.as_slice().try_into().unwrap_or_default();
            let Some(lease) = Lease::new(&network, n, mac) else { continue };
            let served = socket.try_clone().map(|socket| dhcp::serve(socket, lease));
            let name = interface.name.clone();
            answers.spawn(async move {
                let ended = match served {
                    Ok(served) => served.await,
                    Err(error) => Err(error),
                };
                if let Err(error) = ended {
                    tracing::warn!(%error, interface = %name, "nobody answers the machine's questions of DHCP any more");
                }
            });
        }
        answers
    }

    fn end(&self, code: u32) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
        self.console.end();
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        *self.disks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::default();
        self.state.send_replace(State::Ended(Exit { code, finished_at_unix_nanos: at, ..Exit::default() }));
    }

    fn shares(&self) -> MutexGuard<'_, Vec<Share>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn live(&self) -> Result<Arc<Live>, KeeperError> {
        let live = self.changing().live.clone();
        let state = match self.state() {
            State::Created | State::Starting => "has not started",
            State::Off | State::Crashing => "is off",
            State::Running | State::Ended(_) => "has ended",
        };
        live.ok_or(KeeperError::State { what: "ask it", state })
    }

    /// Sends QEMU a command.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.live()?.ask(command, arguments).await
    }

    /// Sends QEMU a command with a descriptor.
    pub async fn hand(&self, command: &str, arguments: Value, descriptor: OwnedFd) -> Result<Value, KeeperError> {
        self.live()?.hand(command, arguments, descriptor).await
    }

    /// Sends the guest agent a command other than guest-exec.
    pub async fn ask_guest(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.live()?.agent.command(command, arguments).await
    }

    /// Returns how often the VM was resumed after a pause.
    pub fn resumed(&self) -> Result<u64, KeeperError> {
        Ok(self.live()?.resumed())
    }

    /// Returns a permit that prevents other tasks from taking, loading or deleting snapshots until it is dropped.
    pub fn snapshots_alone(&self) -> Result<OwnedSemaphorePermit, KeeperError> {
        let state = "has its snapshots or its disks in use: wait until that is done";
        let alone = Arc::clone(&self.snapshots).try_acquire_owned();
        alone.map_err(|_busy| KeeperError::State { what: "change its snapshots", state })
    }

    /// Returns the block nodes of which QEMU can take snapshots.
    pub async fn kept_nodes(&self) -> Vec<String> {
        let disks = Arc::clone(&self.disks.lock().unwrap_or_else(PoisonError::into_inner));
        let added = self.added.lock().await.known();
        qemu::kept_nodes(&disks, &added, self.firmware.as_ref().map(|(_, variables)| variables))
    }

    /// Runs a command in the guest.
    pub async fn run(&self, args: &[String]) -> Result<Outcome, KeeperError> {
        self.live()?.agent.run(args).await
    }

    /// Releases the VM's resources of the node and removes its files. Blocks.
    pub fn remove(&self) -> Result<(), KeeperError> {
        drop(std::mem::take(&mut *self.shares()));
        remove_tree_if_there(&self.directory).map_err(|error| KeeperError::Resources {
            what: "rid of the machine's disks",
            source: std::io::Error::other(error),
        })
    }

    /// Returns the path of the VNC socket, if the VM has a screen.
    pub fn screen(&self) -> Option<PathBuf> {
        self.document.screen.then(|| self.settings.directory.join(SCREEN_SOCKET))
    }

    /// Returns the CPU time in nanoseconds, and the memory in use in bytes: as the guest reports it, or else all of its memory.
    pub async fn used(&self) -> Result<(u64, u64), KeeperError> {
        let live = self.live()?;
        let nanos = sys::processor_nanos(live.pid()).unwrap_or_default();
        let all = self.document.memory_mib << 20;
        if !self.document.balloon {
            return Ok((nanos, all));
        }
        let arguments = json!({ "path": "/machine/peripheral/balloon", "property": "guest-stats" });
        let told = self.ask("qom-get", arguments).await?;
        Ok((nanos, in_use(&told, all)))
    }
}

/// Returns how much of the memory `all` the guest uses, from its balloon statistics.
fn in_use(told: &Value, all: u64) -> u64 {
    let figure = |name: &str| told.get("stats")?.get(name)?.as_u64().filter(|bytes| *bytes <= all);
    match (figure("stat-total-memory"), figure("stat-available-memory")) {
        (Some(total), Some(available)) => all - total + total.saturating_sub(available),
        _ => all,
    }
}

/// Locks the persistent state for this process. The kernel releases the lock when the process ends in any way.
fn lock(keep: &Path) -> Result<File, KeeperError> {
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
fn network(document: &MachineDocument, pod: &BootConfig) -> BootConfig {
    let mut network = pod.clone();
    for (interface, card) in network.interfaces.iter_mut().zip(&document.cards) {
        if let Some(mac) = card.mac {
            interface.mac = mac.to_vec();
        }
    }
    network
}

/// Checks what this node cannot provide, before anything is created.
fn check(document: &MachineDocument, settings: &Settings) -> Result<(), KeeperError> {
    let field = |field, value: String, rule| Err(KeeperError::Field { field, value, rule });
    let count = document.processors.count();
    if count == 0 || count > 255 {
        return field("processors", count.to_string(), "1 to 255 virtual processors are expected");
    }
    if document.processors.pins.as_ref().is_some_and(|pins| u32::try_from(pins.len()) != Ok(count)) {
        return field("processors.pins", count.to_string(), "as many processors of the node are expected");
    }
    if document.cards.len() > settings.taps.len().min(settings.network.interfaces.len()) {
        return field("cards", document.cards.len().to_string(), "the pod has fewer network interfaces");
    }
    for ((card, interface), tap) in document.cards.iter().zip(&settings.network.interfaces).zip(&settings.taps) {
        if card.interface != interface.name {
            return field("cards[].interface", printable(&card.interface), "the pod's interfaces are in another order");
        }
        if usize::try_from(card.queues) != Ok(tap.len()) {
            return field("cards[].queues", card.queues.to_string(), "its tap has another number of them");
        }
    }
    passed(document)?;
    fits(document)?;
    if document.board != Board::Q35 && matches!(document.firmware, Firmware::Efi { secure: true, .. }) {
        return field("firmware.secure", "true".into(), "only the board q35 can do it");
    }
    let plain = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let strange =
        |disk: &&machine::Disk| disk.serving.shared && !matches!(disk.source, machine::DiskSource::Device { .. });
    if let Some(disk) = document.disks.iter().find(strange) {
        return field(
            "disks[].serving.shared",
            disk.name.clone(),
            "only what is the node's has others that write to it",
        );
    }
    let filesystems = document.filesystems.iter().map(|one| ("filesystems[].name", &one.name));
    let disks = document.disks.iter().map(|disk| ("disks[].name", &disk.name));
    match disks.chain(filesystems).find(|(_, name)| !plain(name)) {
        Some((at, name)) => field(at, name.clone(), "letters, digits and '-' are expected"),
        None => Ok(()),
    }
}

/// Checks whether the devices of the node can be passed through.
fn passed(document: &MachineDocument) -> Result<(), KeeperError> {
    let rule = match document.host_devices.iter().find(|device| !machine::is_pci_address(&device.address)) {
        Some(_) => "the address of a PCI device is expected",
        None if document.host_devices.len() > machine::MOST_HOST_DEVICES => {
            "there are not so many places for PCI devices of the node"
        }
        None if document.board == Board::Microvm && !document.host_devices.is_empty() => "the board microvm has no PCI",
        None => return Ok(()),
    };
    let told = document.host_devices.iter().map(|device| printable(&device.address)).collect::<Vec<_>>().join(", ");
    Err(KeeperError::Field { field: "host_devices", value: told, rule })
}

/// Checks whether the board has enough slots for all devices.
fn fits(document: &MachineDocument) -> Result<(), KeeperError> {
    let Some(places) = document.board.places() else { return Ok(()) };
    let field = |field, value: String, rule| Err(KeeperError::Field { field, value, rule });
    let strange = |disk: &&machine::Disk| !matches!(disk.bus, Bus::Virtio | Bus::Scsi);
    if let Some(disk) = document.disks.iter().find(strange) {
        return field("disks[].bus", disk.name.clone(), "the board microvm has virtio and scsi alone");
    }
    if document.cards.iter().any(|card| card.model != CardModel::Virtio) {
        return field("cards[].model", document.cards.len().to_string(), "the board microvm has virtio alone");
    }
    if document.screen || document.tablet || document.watchdog.is_some() {
        return field("board", "microvm".into(), "it has no screen, tablet or watchdog");
    }
    let count = qemu::virtio_devices(document);
    match count > places {
        true => field("disks", count.to_string(), "the board microvm has room for 24 virtio devices"),
        false => Ok(()),
    }
}

/// Writes to standard output, which is the flight recorder: the pod process keeps the end of it.
fn record(piece: &[u8]) {
    use std::io::Write;
    // If the reader is gone, the output is not needed.
    let _ = std::io::stdout().write_all(piece).and_then(|()| std::io::stdout().flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_balloon_says_is_bounded() {
        let told = |total: u64, available: u64| json!({ "stats": { "stat-total-memory": total, "stat-available-memory": available } });
        assert_eq!(in_use(&told(900, 300), 1000), 700);
        assert_eq!(in_use(&told(900, 1000), 1000), 100);
        // QEMU's value for "not reported".
        assert_eq!(in_use(&told(u64::MAX, 5), 1000), 1000);
        assert_eq!(in_use(&Value::Null, 1000), 1000);
    }
}
