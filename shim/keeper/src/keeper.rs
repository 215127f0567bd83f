//! Manages the pod's containers, each of which is a VM, one after the other, and the commands in them.

use crate::error::KeeperError;
use crate::guest_agent::Outcome;
use crate::machine::{Machine, Settings, State};
use crate::verbs;
use nacelle_base::Chain;
use nacelle_base::json;
use nacelle_base::task::run_blocking;
use nacelle_model::machine::{INTERFACE, MachineDocument};
use nacelle_proto::agent::{ContainerState, Exit};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

/// The maximum number of running commands.
const MAX_EXECS: usize = 256;
/// The number of ended commands that are remembered: their output is in memory.
const MAX_ENDED: usize = 8;
/// The maximum number of disks that wait for their VM.
const MAX_OFFERS: usize = 256;
/// The exit code of a command that the guest could not start.
const NOT_BEGUN: u32 = 126;
/// The exit code of a command that was killed.
const KILLED: u32 = 137;
/// The time limit for the end of a VM that was powered off.
const END: Duration = Duration::from_secs(60);

/// A command in the guest.
pub struct Exec {
    number: u64,
    done: watch::Sender<Option<Arc<(Outcome, Exit)>>>,
    task: Mutex<Option<AbortHandle>>,
    /// The channel for the stream of a command with a long answer, until a client reads it.
    reader: Mutex<Option<oneshot::Sender<UnixStream>>>,
}

impl Exec {
    fn new(number: u64, reader: Option<oneshot::Sender<UnixStream>>) -> Exec {
        Exec { number, done: watch::channel(None).0, task: Mutex::new(None), reader: Mutex::new(reader) }
    }

    /// Passes the stream of its output to a command with a long answer. Returns the stream for other commands, and for later
    /// readers.
    pub fn read_by(&self, stream: UnixStream) -> Result<(), UnixStream> {
        match self.reader.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(reader) => reader.send(stream),
            None => Err(stream),
        }
    }

    /// Waits for the result at most `limit`; `None` after that.
    pub async fn ended(&self, limit: Duration) -> Option<Arc<(Outcome, Exit)>> {
        let mut done = self.done.subscribe();
        let ended = tokio::time::timeout(limit, done.wait_for(Option::is_some)).await;
        ended.ok()?.ok()?.clone()
    }

    fn finish(&self, outcome: Outcome) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
        let exit = Exit { code: outcome.code, finished_at_unix_nanos: at, ..Exit::default() };
        self.done.send_if_modified(|done| {
            let first = done.is_none();
            if first {
                *done = Some(Arc::new((outcome, exit)));
            }
            first
        });
    }

    /// Abandons the command. It may continue in the guest: the guest agent has no command to kill it.
    pub fn give_up(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
        self.finish(Outcome { code: KILLED, ..Outcome::default() });
    }
}

#[derive(Default)]
struct Known {
    /// The number of commands so far.
    begun: u64,
    machines: Vec<Arc<Machine>>,
    /// The commands by the name of their VM and their own.
    execs: BTreeMap<(String, String), Arc<Exec>>,
    /// The offered disks by increasing numbers.
    offers: BTreeMap<u64, Offer>,
    offered: u64,
}

/// A disk that was handed over for a VM that is not created yet.
struct Offer {
    /// The VM's name.
    id: String,
    /// The disk's name.
    disk: String,
    file: File,
}

impl Known {
    fn machine(&self, id: &str) -> Option<Arc<Machine>> {
        self.machines.iter().find(|machine| machine.id == id).cloned()
    }
}

/// Forgets ended commands, the oldest first, until `MAX_ENDED` are left.
fn forget_ended(execs: &mut BTreeMap<(String, String), Arc<Exec>>) {
    let mut ended: Vec<u64> =
        execs.values().filter(|exec| exec.done.borrow().is_some()).map(|exec| exec.number).collect();
    ended.sort_unstable();
    if let Some(last) = ended.len().checked_sub(MAX_ENDED).and_then(|over| ended.get(..over)?.last()) {
        execs.retain(|_, exec| exec.done.borrow().is_none() || exec.number > *last);
    }
}

/// The state of the pod.
pub struct Keeper {
    settings: Arc<Settings>,
    known: Mutex<Known>,
}

impl Keeper {
    /// Returns the state of a pod without a container.
    pub fn new(settings: Settings) -> Keeper {
        Keeper { settings: Arc::new(settings), known: Mutex::default() }
    }

    /// Returns the VM of this name.
    pub fn machine(&self, id: &str) -> Result<Arc<Machine>, KeeperError> {
        self.known().machine(id).ok_or_else(|| KeeperError::NoContainer { id: id.to_owned() })
    }

    /// Returns the VM that was created last.
    pub fn last(&self) -> Option<Arc<Machine>> {
        self.known().machines.last().cloned()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the addresses of the guest without their prefix lengths, those of the pod's default interface first.
    pub fn addresses(&self) -> Vec<String> {
        let mut interfaces: Vec<_> = self.settings.network.interfaces.iter().collect();
        interfaces.sort_by_key(|interface| interface.name != INTERFACE);
        let all = interfaces.into_iter().flat_map(|interface| &interface.addresses);
        all.map(|address| address.split('/').next().unwrap_or_default().to_owned()).collect()
    }

    /// Keeps a disk until its VM is created, or until it is withdrawn by the returned number.
    pub fn offer(&self, id: String, disk: String, file: File) -> Result<u64, KeeperError> {
        let mut known = self.known();
        if known.offers.len() >= MAX_OFFERS {
            let source = std::io::ErrorKind::QuotaExceeded.into();
            return Err(KeeperError::Resources { what: "room for one more disk", source });
        }
        known.offered += 1;
        let number = known.offered;
        known.offers.insert(number, Offer { id, disk, file });
        Ok(number)
    }

    /// Releases an offered disk, unless a VM has taken it.
    pub fn withdraw(&self, number: u64) {
        self.known().offers.remove(&number);
    }

    /// Takes the disks for a VM by their names; the newest one of each name.
    fn take_offers(&self, id: &str) -> BTreeMap<String, File> {
        let mut known = self.known();
        let (taken, left) = std::mem::take(&mut known.offers).into_iter().partition(|(_, offer)| offer.id == id);
        known.offers = left;
        let taken: BTreeMap<u64, Offer> = taken;
        taken.into_values().map(|offer| (offer.disk, offer.file)).collect()
    }

    /// Creates the VM from its document and the disks that were handed over for it.
    pub async fn create(&self, id: String, document: &[u8]) -> Result<(), KeeperError> {
        if self.known().machine(&id).is_some() {
            return Ok(());
        }
        // A new VM may replace one that has ended, because its files are gone.
        if let Some(machine) = self.last().filter(|machine| !matches!(machine.state(), State::Ended(_))) {
            return Err(KeeperError::Second { id: machine.id.clone() });
        }
        let document: MachineDocument = json::read(document).map_err(|source| KeeperError::Document { source })?;
        let plain = !id.is_empty() && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if !plain || id.len() > 128 {
            let rule = "1 to 128 letters, digits, '-' or '_' are expected";
            return Err(KeeperError::Field { field: "id", value: crate::lines::printable(&id), rule });
        }
        let settings = Arc::clone(&self.settings);
        let handed = self.take_offers(&id);
        let machine = run_blocking("create the VM", move || Machine::make(id, document, handed, settings)).await??;
        self.known().machines.push(Arc::new(machine));
        Ok(())
    }

    /// Kills the VM and removes its files.
    pub async fn remove(&self, id: &str) -> Result<(), KeeperError> {
        let Ok(machine) = self.machine(id) else { return Ok(()) };
        machine.kill();
        if machine.ended(END).await.is_none() {
            return Err(KeeperError::TooSlow { whom: "QEMU", command: "the end".into(), limit: END });
        }
        let gone = Arc::clone(&machine);
        run_blocking("remove the files of the VM", move || gone.remove()).await??;
        let mut known = self.known();
        known.machines.retain(|machine| machine.id != id);
        known.execs.retain(|(of, _), exec| {
            if of == id {
                exec.give_up();
            }
            of != id
        });
        Ok(())
    }

    /// Starts a command.
    pub fn exec(&self, id: &str, exec_id: String, args: Vec<String>) -> Result<(), KeeperError> {
        let machine = self.machine(id)?;
        match machine.state() {
            State::Running => {}
            State::Ended(_) => return Err(KeeperError::State { what: "run a command", state: "has ended" }),
            // Verbs work in these states too.
            State::Off | State::Crashing if verbs::of(&args).is_some() => {}
            State::Off | State::Crashing => return Err(KeeperError::State { what: "run a command", state: "is off" }),
            _ => return Err(KeeperError::State { what: "run a command", state: "has not started" }),
        }

        let (give, reader) = oneshot::channel();
        let exec = {
            let (mut known, key) = (self.known(), (id.to_owned(), exec_id));
            if known.execs.contains_key(&key) {
                return Ok(());
            }
            forget_ended(&mut known.execs);
            if known.execs.len() >= MAX_EXECS {
                let source = std::io::ErrorKind::QuotaExceeded.into();
                return Err(KeeperError::Resources { what: "room for one more command", source });
            }
            known.begun += 1;
            let exec = Arc::new(Exec::new(known.begun, verbs::has_long_answer(&args).then_some(give)));
            known.execs.insert(key, Arc::clone(&exec));
            exec
        };
        let running = Arc::clone(&exec);
        let task = tokio::spawn(async move {
            let outcome = match verbs::of(&args) {
                Some(verb) => verbs::run(&machine, verb, reader).await,
                None => machine.run(&args).await,
            };
            running.finish(outcome.unwrap_or_else(|error| Outcome {
                code: NOT_BEGUN,
                stdout: Vec::new(),
                stderr: format!("{}\n", Chain(&error)).into_bytes(),
            }));
        });
        *exec.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.abort_handle());
        Ok(())
    }

    /// Returns a command.
    pub fn command(&self, id: &str, exec_id: &str) -> Result<Arc<Exec>, KeeperError> {
        self.machine(id)?;
        let exec = self.known().execs.get(&(id.to_owned(), exec_id.to_owned())).cloned();
        exec.ok_or_else(|| KeeperError::NoExec { id: id.to_owned(), exec: exec_id.to_owned() })
    }

    /// Abandons a command. A command that is not known yet will not be run: the signal came before the request.
    pub fn give_up(&self, id: &str, exec_id: String) -> Result<(), KeeperError> {
        self.machine(id)?;
        let (mut known, key) = (self.known(), (id.to_owned(), exec_id));
        if let Some(exec) = known.execs.get(&key) {
            exec.give_up();
            return Ok(());
        }
        forget_ended(&mut known.execs);
        known.begun += 1;
        let exec = Exec::new(known.begun, None);
        exec.give_up();
        known.execs.insert(key, Arc::new(exec));
        Ok(())
    }

    /// Returns the containers for the pod process.
    pub fn list(&self) -> Vec<ContainerState> {
        let told = |machine: &Arc<Machine>| {
            let (started, exit) = match machine.state() {
                State::Created => (false, None),
                State::Starting | State::Running | State::Off | State::Crashing => (true, None),
                State::Ended(exit) => (true, Some(exit)),
            };
            ContainerState { id: machine.id.clone(), started, exit }
        };
        self.known().machines.iter().map(told).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_is_forgotten_the_oldest_first() {
        let exec = |number: u64, ended: bool| {
            let exec = Exec::new(number, None);
            if ended {
                exec.finish(Outcome::default());
            }
            // The names are not in the order of the commands.
            (("m".to_owned(), format!("{:03}", 999 - number)), Arc::new(exec))
        };
        let mut execs: BTreeMap<_, _> = (0..20).map(|number| exec(number, number != 3)).collect();
        forget_ended(&mut execs);
        let mut left: Vec<u64> = execs.values().map(|exec| exec.number).collect();
        left.sort_unstable();
        assert_eq!(left, [3, 12, 13, 14, 15, 16, 17, 18, 19]);
        forget_ended(&mut execs);
        assert_eq!(execs.len(), 9);
    }
}
