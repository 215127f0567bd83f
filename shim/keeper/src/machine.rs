//! Owns: the one machine of the pod: made, started, asked, ended. Its state changes here and nowhere else.
//! Threads: tasks of the runtime; what blocks is done elsewhere.

use crate::console::Console;
use crate::disk;
use crate::error::KeeperError;
use crate::guest_agent::GuestAgent;
use crate::lines::{Event, Lines};
use crate::qemu::{self, Card};
use crate::spec::{Firmware, MachineDocument};
use crate::sys;
use nacelle_base::files::remove_tree_if_there;
use nacelle_engine::program::Program;
use nacelle_engine::{Accelerator, ExitKind, MachineExit};
use nacelle_proto::agent::{BootConfig, Exit};
use serde_json::{Value, json};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};

/// Where VNC listens, in the pod's folder.
pub const SCREEN_SOCKET: &str = "screen.sock";
/// What QEMU itself prints, in the folder for disks.
const QEMU_LOG: &str = "qemu.log";
/// The longest line of QEMU's monitor.
const LONGEST: u64 = 1 << 20;
/// For an answer of QEMU's monitor.
const ANSWER: Duration = Duration::from_secs(60);
/// Between two presses of the power button: a guest that boots does not notice it.
const PRESS: Duration = Duration::from_secs(5);
/// How often the guest's balloon says how much memory is free, in seconds.
const BALLOON_SECONDS: u32 = 5;

const KILLED: u32 = 137;
/// The guest's kernel gave up, as a process that aborts.
const PANICKED: u32 = 134;
/// QEMU ended by itself.
const DIED: u32 = 255;

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
    /// Of the pod's interfaces.
    pub taps: Vec<OwnedFd>,
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
    /// It has ended.
    Ended(Exit),
}

/// QEMU, and the ways to it.
struct Live {
    program: Arc<Program>,
    monitor: tokio::sync::Mutex<Lines>,
    agent: GuestAgent,
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
    disks: Vec<disk::Ready>,
    firmware: Option<(PathBuf, PathBuf)>,
    state: watch::Sender<State>,
    live: Mutex<Option<Arc<Live>>>,
    pressing: Mutex<bool>,
}

impl Machine {
    /// Makes its disks; if that fails, nothing is left of them. Blocks.
    pub fn make(id: String, document: MachineDocument, settings: Arc<Settings>) -> Result<Machine, KeeperError> {
        let folder = settings.scratch.join(format!("machine-{id}"));
        check(&document, &settings)?;
        let network = network(&document, &settings.network);
        let made = std::fs::create_dir_all(&folder)
            .map_err(|source| KeeperError::File { what: "make", path: folder.clone(), source })
            .and_then(|()| {
                let disks = document.disks.iter().map(|one| disk::prepare(one, &folder, &settings.scratch, &network));
                let disks = disks.collect::<Result<Vec<_>, _>>()?;
                let firmware = match &document.firmware {
                    Firmware::Bios {} => None,
                    Firmware::Efi { code, variables } => Some((code.clone(), disk::variables(variables, &folder)?)),
                };
                Ok((disks, firmware))
            });
        match made {
            Ok((disks, firmware)) => Ok(Machine {
                id,
                document,
                console: Console::new(),
                settings,
                folder,
                disks,
                firmware,
                state: watch::channel(State::Created).0,
                live: Mutex::new(None),
                pressing: Mutex::new(false),
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

    /// Starts it. Said twice, it is one start.
    pub async fn start(self: &Arc<Self>) -> Result<(), KeeperError> {
        let mut first = false;
        self.state.send_if_modified(|state| {
            first = *state == State::Created;
            if first {
                *state = State::Starting;
            }
            first
        });
        match self.state() {
            State::Starting if first => {}
            State::Starting | State::Running => return Ok(()),
            _ => return Err(KeeperError::State { what: "start", state: "has ended" }),
        }
        match self.launch().await {
            Ok(events) => {
                self.state.send_replace(State::Running);
                tokio::spawn(Arc::clone(self).watch(events));
                Ok(())
            }
            Err(error) => {
                self.live.lock().unwrap_or_else(PoisonError::into_inner).take();
                self.end(DIED);
                Err(error)
            }
        }
    }

    async fn launch(&self) -> Result<mpsc::Receiver<Event>, KeeperError> {
        let pair = || UnixStream::pair().map_err(|source| KeeperError::Resources { what: "QEMU's sockets", source });
        let [(monitor, far_monitor), (console, far_console), (agent, far_agent)] = [pair()?, pair()?, pair()?];
        let screen = self.document.screen.then(|| self.settings.folder.join(SCREEN_SOCKET));
        let machine = qemu::Machine {
            document: &self.document,
            accelerator: self.settings.accelerator,
            disks: &self.disks,
            firmware: self.firmware.as_ref().map(|(code, variables)| (code.as_path(), variables.clone())),
            cards: self.cards(),
            screen,
            monitor: far_monitor.as_raw_fd(),
            console: far_console.as_raw_fd(),
            agent: far_agent.as_raw_fd(),
        };
        let (args, inherited) = (machine.args(), machine.inherited());
        tracing::debug!(?args, "starting QEMU");
        let (qemu, log) = (self.settings.qemu.clone(), self.folder.join(QEMU_LOG));
        let started = blocking(move || Program::start(&qemu, args, inherited, &log)).await?;
        let program = Arc::new(started?);
        drop((far_monitor, far_console, far_agent));
        self.console.connect(stream(console)?, record).await;
        let (mut monitor, events) = Lines::new(stream(monitor)?, "QEMU", LONGEST);
        // It answers when it has understood its arguments, and has opened all its files.
        let ready = monitor.ask("qmp_capabilities", Value::Null, ANSWER).await;
        if let Err(error) = ready {
            let waited = Arc::clone(&program);
            let exit = blocking(move || waited.wait(Duration::from_secs(2))).await?;
            return Err(match exit.map(|exit| exit.how) {
                Some(ExitKind::Died { message, .. }) => KeeperError::Refused {
                    whom: "QEMU",
                    command: "the machine".into(),
                    words: crate::lines::printable(&message.replace('\n', " | ")),
                },
                _ => error,
            });
        }
        if self.document.balloon {
            let arguments = json!({
                "path": "/machine/peripheral/balloon",
                "property": "guest-stats-polling-interval",
                "value": BALLOON_SECONDS,
            });
            monitor.ask("qom-set", arguments, ANSWER).await?;
        }
        let live = Live { program, monitor: tokio::sync::Mutex::new(monitor), agent: GuestAgent::new(stream(agent)?) };
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(live));
        Ok(events)
    }

    fn cards(&self) -> Vec<Card> {
        let interfaces = self.settings.network.interfaces.iter();
        let pairs = self.document.cards.iter().zip(self.settings.taps.iter().zip(interfaces));
        let card = |(card, (tap, interface)): (&crate::spec::Card, (&OwnedFd, &nacelle_proto::agent::Interface))| {
            let given = interface.mac.as_slice().try_into().unwrap_or_default();
            Card {
                tap: tap.as_raw_fd() as RawFd,
                model: card.model,
                mac: card.mac.unwrap_or(given),
                mtu: interface.mtu,
                boot_order: card.boot_order,
            }
        };
        pairs.map(card).collect()
    }

    /// Listens to QEMU until it has ended.
    async fn watch(self: Arc<Self>, mut events: mpsc::Receiver<Event>) {
        let mut reason = None;
        while let Some(Event { name, data }) = events.recv().await {
            tracing::info!(event = name, data = %crate::lines::printable(&data.to_string()), "the machine");
            if name == "SHUTDOWN" {
                reason = data.get("reason").and_then(Value::as_str).map(str::to_owned);
            }
        }
        let Ok(live) = self.live() else { return };
        let program = Arc::clone(&live.program);
        let exit = loop {
            let waiting = Arc::clone(&program);
            match blocking(move || waiting.wait(Duration::from_secs(60))).await {
                Ok(Some(exit)) => break exit,
                // It has closed its monitor and lives: nobody can say what it does.
                Ok(None) => program.kill(),
                Err(_) => return,
            }
        };
        self.live.lock().unwrap_or_else(PoisonError::into_inner).take();
        // What it wrote was its own.
        let gone = Arc::clone(&self);
        if let Ok(Err(error)) = blocking(move || gone.remove()).await {
            tracing::warn!("{}", nacelle_base::Chain(&error));
        }
        self.end(code(&exit, reason.as_deref()));
    }

    fn end(&self, code: u32) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
        self.console.end();
        self.state.send_replace(State::Ended(Exit { code, oom_killed: false, finished_at_unix_nanos: at }));
    }

    fn live(&self) -> Result<Arc<Live>, KeeperError> {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let state = match self.state() {
            State::Created | State::Starting => "has not started",
            State::Running | State::Ended(_) => "has ended",
        };
        live.ok_or(KeeperError::State { what: "ask it", state })
    }

    /// Asks QEMU.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        let live = self.live()?;
        let mut monitor = live.monitor.lock().await;
        monitor.ask(command, arguments, ANSWER).await
    }

    /// Asks the guest agent something that is no command.
    pub async fn ask_guest(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.live()?.agent.command(command, arguments).await
    }

    /// Runs a command in the guest.
    pub async fn run(&self, args: &[String]) -> Result<crate::guest_agent::Outcome, KeeperError> {
        self.live()?.agent.run(args).await
    }

    /// Presses the power button, again and again until the machine has ended.
    pub fn press(self: &Arc<Self>) {
        let mut pressing = self.pressing.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *pressing, true) {
            return;
        }
        let machine = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                // One that stands still hears nothing.
                let pressed = match machine.ask("cont", Value::Null).await {
                    Ok(_) => machine.ask("system_powerdown", Value::Null).await,
                    refused => refused,
                };
                if let Err(error) = pressed {
                    tracing::info!("the power button is not pressed: {}", nacelle_base::Chain(&error));
                }
                if machine.ended(PRESS).await.is_some() {
                    return;
                }
            }
        });
    }

    /// Takes its power away. One that has not started never will.
    pub fn kill(&self) {
        let mut never = false;
        self.state.send_if_modified(|state| {
            never = *state == State::Created;
            false
        });
        match self.live() {
            Ok(live) => live.program.kill(),
            Err(_) if never => self.end(KILLED),
            Err(_) => {}
        }
    }

    /// Removes what it had on the node's disk. Blocks.
    pub fn remove(&self) -> Result<(), KeeperError> {
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
        let nanos = sys::processor_nanos(live.program.pid()).unwrap_or_default();
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

/// The exit code of a machine.
fn code(exit: &MachineExit, reason: Option<&str>) -> u32 {
    match (&exit.how, reason) {
        (ExitKind::Killed, _) => KILLED,
        (_, Some("guest-panic")) | (ExitKind::Panicked, _) => PANICKED,
        (ExitKind::Shutdown, _) => 0,
        (ExitKind::Died { message, .. }, _) => {
            tracing::error!(message, "QEMU ended by itself");
            DIED
        }
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
    if document.cards.len() > settings.taps.len().min(settings.network.interfaces.len()) {
        return field("cards", document.cards.len().to_string(), "the pod has fewer network interfaces");
    }
    let plain = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    match document.disks.iter().find(|disk| !plain(&disk.name)) {
        Some(disk) => field("disks[].name", disk.name.clone(), "letters, digits and '-' are expected"),
        None => Ok(()),
    }
}

/// The flight recorder is what this process prints: the pod process keeps the end of it.
fn record(piece: &[u8]) {
    use std::io::Write;
    // Whoever reads it is gone: then nobody misses it.
    let _ = std::io::stdout().write_all(piece).and_then(|()| std::io::stdout().flush());
}

fn stream(stream: UnixStream) -> Result<tokio::net::UnixStream, KeeperError> {
    let made = stream.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(stream));
    made.map_err(|source| KeeperError::Resources { what: "QEMU's sockets", source })
}

/// Runs something that blocks.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, KeeperError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| KeeperError::Resources { what: "a thread", source: std::io::Error::other(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_has_its_code() {
        let exit = |how| MachineExit { how, console_tail: String::new() };
        let died = ExitKind::Died { code: Some(1), signal: None, message: String::new() };
        assert_eq!(code(&exit(ExitKind::Shutdown), Some("guest-shutdown")), 0);
        assert_eq!(code(&exit(ExitKind::Shutdown), Some("guest-panic")), PANICKED);
        assert_eq!(code(&exit(ExitKind::Killed), None), KILLED);
        assert_eq!(code(&exit(died), None), DIED);
    }

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
