//! Owns: the one machine of the pod: made, started, asked, ended. Its state changes here and nowhere else.
//! Threads: tasks of the runtime; what blocks is done elsewhere.

mod orders;

use crate::added;
use crate::console::Console;
use crate::dhcp::{self, Lease};
use crate::disk::{self, Folders};
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
use nacelle_engine::qemu::emulated_tsc;
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

/// Where VNC listens, in the pod's folder.
pub const SCREEN_SOCKET: &str = "screen.sock";

/// What a machine runs with.
#[derive(Debug)]
pub struct Settings {
    /// The pod's folder: sockets.
    pub folder: PathBuf,
    /// For disks.
    pub scratch: PathBuf,
    /// QEMU's program.
    pub qemu: PathBuf,
    /// What it runs guests with.
    pub accelerator: Accelerator,
    /// Of the pod's interfaces that it has cards for, each with its queues.
    pub taps: Vec<Vec<OwnedFd>>,
    /// Where guests ask for their addresses, on each of them.
    pub dhcp: Vec<OwnedFd>,
    /// The ways to the process that has the folders of the node that are shared with the guest.
    pub shares: Vec<[UnixStream; QUEUES]>,
    /// The pod's network.
    pub network: BootConfig,
}

/// How it is.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// Its disks are there.
    Created,
    /// QEMU is being started.
    Starting,
    /// It runs, or stands still.
    Running,
    /// It is off until somebody wants it to run.
    Off,
    /// It has ended soon after its start, and waits before it runs again.
    Crashing,
    /// It has ended, and its container with it.
    Ended(Exit),
}

/// The machine.
pub struct Machine {
    /// Its container's name.
    pub id: String,
    /// What it is.
    pub document: MachineDocument,
    /// Its serial console.
    pub console: Console,
    settings: Arc<Settings>,
    folder: PathBuf,
    /// Until it has ended: then others may have what is the node's of them.
    disks: Mutex<Arc<Vec<disk::Ready>>>,
    /// Those that it got beside these. Held while one is added or removed, and while QEMU starts.
    pub added: tokio::sync::Mutex<added::Disks>,
    firmware: Option<(PathBuf, disk::Files)>,
    kernel: Option<disk::KernelFiles>,
    /// Until it has ended.
    shares: Mutex<Vec<Share>>,
    state: watch::Sender<State>,
    changing: Mutex<Changing>,
    ordered: Notify,
    /// What it keeps is its own, until it has ended.
    lock: Mutex<Option<File>>,
    /// Whoever changes snapshots has it.
    snapshots: Arc<Semaphore>,
    /// Where its processors run.
    pub pins: Pins,
}

/// What changes while it lives.
struct Changing {
    live: Option<Arc<Live>>,
    order: Order,
    pressing: bool,
}

impl Machine {
    /// Makes its disks, of which those in `handed` were handed over; if that fails, nothing is left of them. Blocks.
    pub fn make(
        id: String,
        document: MachineDocument,
        mut handed: BTreeMap<String, File>,
        settings: Arc<Settings>,
    ) -> Result<Machine, KeeperError> {
        let folder = settings.scratch.join(format!("machine-{id}"));
        check(&document, &settings)?;
        let network = network(&document, &settings.network);
        let made = std::fs::create_dir_all(&folder)
            .map_err(|source| KeeperError::File { what: "make", path: folder.clone(), source })
            .and_then(|()| {
                let lock = document.keep.as_deref().map(lock).transpose()?;
                let folders = Folders { own: &folder, pod: &settings.scratch, keep: document.keep.as_deref() };
                let disks = document.disks.iter();
                let disks = disks.map(|one| disk::prepare(one, folders, &network, &mut handed));
                let disks = disks.collect::<Result<Vec<_>, _>>()?;
                let added = added::Disks::load(folders.keep.unwrap_or(folders.pod))?;
                let firmware = match &document.firmware {
                    Firmware::Bios {} => None,
                    Firmware::Efi { code, variables, secure } => {
                        Some((code.clone(), disk::variables(variables, *secure, folders)?))
                    }
                };
                let kernel = document.kernel.as_ref().map(|kernel| disk::kernel(kernel, &folder)).transpose()?;
                let shares = shares::serve(&document.filesystems, &id, &settings.folder, &settings.shares)?;
                Ok((disks, added, firmware, kernel, lock, shares))
            });
        match made {
            Ok((disks, added, firmware, kernel, lock, shares)) => Ok(Machine {
                id,
                pins: Pins::new(document.processors.pins.clone()),
                document,
                console: Console::new(),
                settings,
                folder,
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
                // The first error is the one that matters.
                let _ = remove_tree_if_there(&folder);
                Err(error)
            }
        }
    }

    /// How it is.
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Waits until it has ended; none after `limit`.
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

    /// Starts it, or lets it be off where its strategy says so. Said twice, it is one start.
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
        let launched = live::launch(machine, ends, &self.settings, &self.folder).await?;
        let pinned = self.pins.pin(&launched.live).await;
        if pinned.is_err() {
            launched.live.kill();
        }
        // Whoever changes them from here on finds QEMU there.
        let pins = pinned?;
        self.changing().live = Some(Arc::clone(&launched.live));
        drop(pins);
        if self.changing().order == Order::End {
            // It was told while it was about to start.
            launched.live.kill();
        }
        self.state.send_replace(State::Running);
        Ok(launched)
    }

    async fn clock(&self) -> Result<Option<String>, KeeperError> {
        let needed = self.settings.accelerator == Accelerator::Tcg && self.document.board == Board::Microvm;
        // It is measured, for 2 ms.
        if needed { Ok(run_blocking("measure the emulated TSC", emulated_tsc).await?) } else { Ok(None) }
    }

    /// From run to run, until the container ends.
    async fn live_on(self: Arc<Self>, mut runs: Runs, mut launched: Option<Launched>) {
        let mut next = Next::Off;
        loop {
            if let Some(Launched { live, console, events }) = launched.take() {
                let since = Instant::now();
                self.console.connect(console, record).await;
                // As long as it runs.
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

    /// The end of it all: what it wrote for itself is removed.
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

    /// Answers what its cards ask of DHCP, until the result is dropped.
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

    /// Asks QEMU.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.live()?.ask(command, arguments).await
    }

    /// Asks QEMU, and hands a descriptor over.
    pub async fn hand(&self, command: &str, arguments: Value, descriptor: OwnedFd) -> Result<Value, KeeperError> {
        self.live()?.hand(command, arguments, descriptor).await
    }

    /// Asks the guest agent something that is no command.
    pub async fn ask_guest(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.live()?.agent.command(command, arguments).await
    }

    /// How often it has gone on after it stood still.
    pub fn resumed(&self) -> Result<u64, KeeperError> {
        Ok(self.live()?.resumed())
    }

    /// Nobody else takes, loads or deletes snapshots until the result is dropped.
    pub fn snapshots_alone(&self) -> Result<OwnedSemaphorePermit, KeeperError> {
        let state = "has its snapshots or its disks in use: wait until that is done";
        let alone = Arc::clone(&self.snapshots).try_acquire_owned();
        alone.map_err(|_busy| KeeperError::State { what: "change its snapshots", state })
    }

    /// The nodes of QEMU's block layer of which it can take snapshots.
    pub async fn kept_nodes(&self) -> Vec<String> {
        let disks = Arc::clone(&self.disks.lock().unwrap_or_else(PoisonError::into_inner));
        let added = self.added.lock().await.known();
        qemu::kept_nodes(&disks, &added, self.firmware.as_ref().map(|(_, variables)| variables))
    }

    /// Runs a command in the guest.
    pub async fn run(&self, args: &[String]) -> Result<Outcome, KeeperError> {
        self.live()?.agent.run(args).await
    }

    /// Removes what it had of the node, and on its disk. Blocks.
    pub fn remove(&self) -> Result<(), KeeperError> {
        drop(std::mem::take(&mut *self.shares()));
        remove_tree_if_there(&self.folder).map_err(|error| KeeperError::Resources {
            what: "rid of the machine's disks",
            source: std::io::Error::other(error),
        })
    }

    /// Where VNC listens.
    pub fn screen(&self) -> Option<PathBuf> {
        self.document.screen.then(|| self.settings.folder.join(SCREEN_SOCKET))
    }

    /// Processor time in nanoseconds, and memory in use in bytes as the guest says, or all that it has.
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

/// What of `all` its memory a guest uses, by its balloon's word.
fn in_use(told: &Value, all: u64) -> u64 {
    let figure = |name: &str| told.get("stats")?.get(name)?.as_u64().filter(|bytes| *bytes <= all);
    match (figure("stat-total-memory"), figure("stat-available-memory")) {
        (Some(total), Some(available)) => all - total + total.saturating_sub(available),
        _ => all,
    }
}

/// Takes what a machine keeps for this process alone. The kernel lets go of it when the process ends, however that is.
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

/// The pod's network, with the addresses of the machine's own cards.
fn network(document: &MachineDocument, pod: &BootConfig) -> BootConfig {
    let mut network = pod.clone();
    for (interface, card) in network.interfaces.iter_mut().zip(&document.cards) {
        if let Some(mac) = card.mac {
            interface.mac = mac.to_vec();
        }
    }
    network
}

/// What cannot be on this node, before anything is made.
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

/// Whether the devices of the node can be devices of the machine.
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

/// Whether the board can have all these devices.
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

/// The flight recorder is what this process prints: the pod process keeps the end of it.
fn record(piece: &[u8]) {
    use std::io::Write;
    // Whoever reads it is gone: then nobody misses it.
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
        // QEMU's word for "not said".
        assert_eq!(in_use(&told(u64::MAX, 5), 1000), 1000);
        assert_eq!(in_use(&Value::Null, 1000), 1000);
    }
}
