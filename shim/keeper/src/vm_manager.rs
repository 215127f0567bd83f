//! Manages the pod's containers, each of which is a VM, one after the other, and the commands in them.

use crate::error::KeeperError;
use crate::guest_agent::CommandResult;
use crate::verbs;
use crate::vm::{PodVm, PodVmState, Settings};
use nacelle_base::Chain;
use nacelle_base::json;
use nacelle_base::task::run_blocking;
use nacelle_model::machine::MachineDocument;
use nacelle_proto::agent::{ContainerState, Exit};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

/// The maximum number of running commands.
const MAX_RUNNING_COMMANDS: usize = 256;
/// The number of ended commands that are remembered: their output is in memory.
const MAX_FINISHED_COMMANDS: usize = 8;
/// The maximum number of disks that wait for their VM.
const MAX_PENDING_DISKS: usize = 256;
/// The exit code of a command that the guest could not start.
const CANNOT_START: u32 = 126;
/// The exit code of a command that was killed.
const KILLED: u32 = 137;
/// The time limit for the end of a VM that was powered off.
const VM_END_TIMEOUT: Duration = Duration::from_secs(60);

/// A command in the guest.
pub struct GuestCommand {
    number: u64,
    done: watch::Sender<Option<Arc<(CommandResult, Exit)>>>,
    task: Mutex<Option<AbortHandle>>,
    /// The channel for the stream of a command with a long answer, until a client reads it.
    reader: Mutex<Option<oneshot::Sender<UnixStream>>>,
}

impl GuestCommand {
    fn new(number: u64, reader: Option<oneshot::Sender<UnixStream>>) -> GuestCommand {
        GuestCommand { number, done: watch::channel(None).0, task: Mutex::new(None), reader: Mutex::new(reader) }
    }

    /// Passes the stream of its output to a command with a long answer. Returns the stream for other commands, and for later
    /// readers.
    pub fn attach_reader(&self, stream: UnixStream) -> Result<(), UnixStream> {
        match self.reader.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(reader) => reader.send(stream),
            None => Err(stream),
        }
    }

    /// Waits for the result at most `limit`; `None` after that.
    pub async fn wait_for_end(&self, limit: Duration) -> Option<Arc<(CommandResult, Exit)>> {
        let mut done = self.done.subscribe();
        let ended = tokio::time::timeout(limit, done.wait_for(Option::is_some)).await;
        ended.ok()?.ok()?.clone()
    }

    fn finish(&self, outcome: CommandResult) {
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
    pub fn abandon(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
        self.finish(CommandResult { code: KILLED, ..CommandResult::default() });
    }
}

#[derive(Default)]
struct ManagerState {
    /// The number of commands so far.
    last_command_number: u64,
    vms: Vec<Arc<PodVm>>,
    /// The commands by the name of their VM and their own.
    execs: BTreeMap<(String, String), Arc<GuestCommand>>,
    /// The offered disks by increasing numbers.
    pending_disks: BTreeMap<u64, PendingDisk>,
    last_disk_number: u64,
}

/// A disk that was handed over for a VM that is not created yet.
struct PendingDisk {
    /// The VM's name.
    id: String,
    /// The disk's name.
    disk: String,
    file: File,
}

impl ManagerState {
    fn find_vm(&self, id: &str) -> Option<Arc<PodVm>> {
        self.vms.iter().find(|vm| vm.id == id).cloned()
    }
}

/// Forgets ended commands, the oldest first, until `MAX_FINISHED_COMMANDS` are left.
fn remove_finished(execs: &mut BTreeMap<(String, String), Arc<GuestCommand>>) {
    let mut ended: Vec<u64> =
        execs.values().filter(|exec| exec.done.borrow().is_some()).map(|exec| exec.number).collect();
    ended.sort_unstable();
    if let Some(last) = ended.len().checked_sub(MAX_FINISHED_COMMANDS).and_then(|over| ended.get(..over)?.last()) {
        execs.retain(|_, exec| exec.done.borrow().is_none() || exec.number > *last);
    }
}

/// The state of the pod.
pub struct VmManager {
    settings: Arc<Settings>,
    state: Mutex<ManagerState>,
}

impl VmManager {
    /// Returns the state of a pod without a container.
    pub fn new(settings: Settings) -> VmManager {
        VmManager { settings: Arc::new(settings), state: Mutex::default() }
    }

    /// Returns the VM of this name.
    pub fn find_vm(&self, id: &str) -> Result<Arc<PodVm>, KeeperError> {
        self.state().find_vm(id).ok_or_else(|| KeeperError::NoContainer { id: id.to_owned() })
    }

    /// Returns the VM that was created last.
    pub fn newest(&self) -> Option<Arc<PodVm>> {
        self.state().vms.last().cloned()
    }

    fn state(&self) -> MutexGuard<'_, ManagerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a disk until its VM is created, or until it is withdrawn by the returned number.
    pub fn add_pending_disk(&self, id: String, disk: String, file: File) -> Result<u64, KeeperError> {
        let mut state = self.state();
        if state.pending_disks.len() >= MAX_PENDING_DISKS {
            let source = std::io::ErrorKind::QuotaExceeded.into();
            return Err(KeeperError::Resource {
                what: "keep another disk for a VM that is not created yet (maximum 256)",
                source,
            });
        }
        state.last_disk_number += 1;
        let number = state.last_disk_number;
        state.pending_disks.insert(number, PendingDisk { id, disk, file });
        Ok(number)
    }

    /// Releases an offered disk, unless a VM has taken it.
    pub fn release_pending_disk(&self, number: u64) {
        self.state().pending_disks.remove(&number);
    }

    /// Takes the disks for a VM by their names; the newest one of each name.
    fn take_pending_disks(&self, id: &str) -> BTreeMap<String, File> {
        let mut state = self.state();
        let (taken, remaining) =
            std::mem::take(&mut state.pending_disks).into_iter().partition(|(_, disk)| disk.id == id);
        state.pending_disks = remaining;
        let taken: BTreeMap<u64, PendingDisk> = taken;
        taken.into_values().map(|disk| (disk.disk, disk.file)).collect()
    }

    /// Creates the VM from its document and the disks that were handed over for it.
    pub async fn create(&self, id: String, document: &[u8]) -> Result<(), KeeperError> {
        if self.state().find_vm(&id).is_some() {
            return Ok(());
        }
        // A new VM may replace one that has ended, because its files are gone.
        if let Some(vm) = self.newest().filter(|vm| !matches!(vm.state(), PodVmState::Ended(_))) {
            return Err(KeeperError::AlreadyExists { id: vm.id.clone() });
        }
        let document: MachineDocument =
            json::read(document).map_err(|source| KeeperError::InvalidDocument { source })?;
        let is_valid = !id.is_empty() && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if !is_valid || id.len() > 128 {
            let rule = "1 to 128 letters, digits, '-' or '_' are expected";
            return Err(KeeperError::InvalidField { field: "id", value: crate::json_lines::printable(&id), rule });
        }
        let settings = Arc::clone(&self.settings);
        let disks = self.take_pending_disks(&id);
        let vm = run_blocking("create the VM", move || PodVm::create(id, document, disks, settings)).await??;
        self.state().vms.push(Arc::new(vm));
        Ok(())
    }

    /// Kills the VM and removes its files.
    pub async fn remove(&self, id: &str) -> Result<(), KeeperError> {
        let Ok(vm) = self.find_vm(id) else { return Ok(()) };
        vm.kill();
        if vm.wait_for_end(VM_END_TIMEOUT).await.is_none() {
            return Err(KeeperError::Timeout { peer: "QEMU", command: "its exit".into(), limit: VM_END_TIMEOUT });
        }
        let removed = Arc::clone(&vm);
        run_blocking("remove the files of the VM", move || removed.remove()).await??;
        let mut state = self.state();
        state.vms.retain(|vm| vm.id != id);
        state.execs.retain(|(vm_id, _), exec| {
            if vm_id == id {
                exec.abandon();
            }
            vm_id != id
        });
        Ok(())
    }

    /// Starts a command.
    pub fn start_command(&self, id: &str, exec_id: String, args: Vec<String>) -> Result<(), KeeperError> {
        let vm = self.find_vm(id)?;
        match vm.state() {
            PodVmState::Running => {}
            PodVmState::Ended(_) => return Err(KeeperError::WrongState { what: "run a command", state: "has ended" }),
            // Verbs work in these states too.
            PodVmState::Stopped | PodVmState::CrashLoopBackOff if verbs::parse_verb(&args).is_some() => {}
            PodVmState::Stopped | PodVmState::CrashLoopBackOff => {
                return Err(KeeperError::WrongState { what: "run a command", state: "is stopped" });
            }
            _ => return Err(KeeperError::WrongState { what: "run a command", state: "has not started" }),
        }

        let (send_reader, reader) = oneshot::channel();
        let exec = {
            let (mut state, key) = (self.state(), (id.to_owned(), exec_id));
            if state.execs.contains_key(&key) {
                return Ok(());
            }
            remove_finished(&mut state.execs);
            if state.execs.len() >= MAX_RUNNING_COMMANDS {
                let source = std::io::ErrorKind::QuotaExceeded.into();
                return Err(KeeperError::Resource { what: "run another command (maximum 256)", source });
            }
            state.last_command_number += 1;
            let exec = Arc::new(GuestCommand::new(
                state.last_command_number,
                verbs::streams_output(&args).then_some(send_reader),
            ));
            state.execs.insert(key, Arc::clone(&exec));
            exec
        };
        let running = Arc::clone(&exec);
        let task = tokio::spawn(async move {
            let outcome = match verbs::parse_verb(&args) {
                Some(verb) => verbs::run(&vm, verb, reader).await,
                None => vm.run(&args).await,
            };
            running.finish(outcome.unwrap_or_else(|error| CommandResult {
                code: CANNOT_START,
                stdout: Vec::new(),
                stderr: format!("{}\n", Chain(&error)).into_bytes(),
            }));
        });
        *exec.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.abort_handle());
        Ok(())
    }

    /// Returns a command.
    pub fn find_command(&self, id: &str, exec_id: &str) -> Result<Arc<GuestCommand>, KeeperError> {
        self.find_vm(id)?;
        let exec = self.state().execs.get(&(id.to_owned(), exec_id.to_owned())).cloned();
        exec.ok_or_else(|| KeeperError::NoExec { id: id.to_owned(), exec: exec_id.to_owned() })
    }

    /// Abandons a command. A command that is not known yet will not be run: the signal came before the request.
    pub fn abandon(&self, id: &str, exec_id: String) -> Result<(), KeeperError> {
        self.find_vm(id)?;
        let (mut state, key) = (self.state(), (id.to_owned(), exec_id));
        if let Some(exec) = state.execs.get(&key) {
            exec.abandon();
            return Ok(());
        }
        remove_finished(&mut state.execs);
        state.last_command_number += 1;
        let exec = GuestCommand::new(state.last_command_number, None);
        exec.abandon();
        state.execs.insert(key, Arc::new(exec));
        Ok(())
    }

    /// Returns the containers for the pod process.
    pub fn list(&self) -> Vec<ContainerState> {
        let container_state = |vm: &Arc<PodVm>| {
            let (started, exit) = match vm.state() {
                PodVmState::Created => (false, None),
                PodVmState::Starting | PodVmState::Running | PodVmState::Stopped | PodVmState::CrashLoopBackOff => {
                    (true, None)
                }
                PodVmState::Ended(exit) => (true, Some(exit)),
            };
            ContainerState { id: vm.id.clone(), started, exit }
        };
        self.state().vms.iter().map(container_state).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_commands_are_removed_oldest_first() {
        let exec = |number: u64, ended: bool| {
            let exec = GuestCommand::new(number, None);
            if ended {
                exec.finish(CommandResult::default());
            }
            // The names are not in the order of the commands.
            (("m".to_owned(), format!("{:03}", 999 - number)), Arc::new(exec))
        };
        let mut execs: BTreeMap<_, _> = (0..20).map(|number| exec(number, number != 3)).collect();
        remove_finished(&mut execs);
        let mut remaining: Vec<u64> = execs.values().map(|exec| exec.number).collect();
        remaining.sort_unstable();
        assert_eq!(remaining, [3, 12, 13, 14, 15, 16, 17, 18, 19]);
        remove_finished(&mut execs);
        assert_eq!(execs.len(), 9);
    }
}
