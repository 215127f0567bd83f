//! Starts a pod process and waits for its first reply. The process runs on when the daemon ends.

use super::cleanup::describe_exit;
use super::error::MAX_TEXT;
use super::{ClientError, PodClient, connect, ended};
use crate::codes;
use crate::identity::{self, IdentityError};
use crate::protocol::PodFeatureSet;
use crate::record;
use crate::spec::PodSpec;
use crate::sys;
use crate::text::printable;
use nacelle_base::files::at;
use nacelle_base::jailed::JailedDir;
use nacelle_base::task::run_blocking_or_panic;
use nacelle_model::process::{PodProcess, ProcessIdentity};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::Instant;

/// The log of the process itself: its standard output and error. The daemon opens it, in its own part of the run directory.
pub const LOG_FILE: &str = "pod.log";

/// The limit from the start of the process to its first reply. The process listens before it starts the VM.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);

/// Starts `PROGRAM --dir DIR` with this specification and waits for its first reply. The process has its own session, inherits
/// no descriptors, logs to `DIR/pod.log`, and outlives the caller. It does nothing before `admit` has returned, which
/// receives the identity by which the process is found again. After a failure no process runs. If the future is dropped
/// before `admit` has returned, the process ends by itself; a caller that drops it later must call [`clean_up`].
pub async fn spawn<F>(
    program: &Path,
    dir: &Path,
    spec: &PodSpec,
    admit: impl FnOnce(PodProcess) -> F,
) -> Result<PodClient, ClientError>
where
    F: Future<Output = Result<(), ClientError>>,
{
    let (program, own_dir, own_spec) = (program.to_owned(), dir.to_owned(), spec.clone());
    // Both steps run to their end on the blocking pool even if this future is dropped, so that the run directory names every process.
    let start_and_record =
        move || start_process(&program, &own_dir, &own_spec).map(|child| (record_process(&child, &own_dir), child));
    let (recorded, mut child) = run_blocking_or_panic(start_and_record).await?;
    let admitted = match recorded {
        Ok(Some(identity)) => admit(pod_process(identity, spec)).await,
        // The process has ended already; `wait_for_first_reply` reports that.
        Ok(None) => Ok(()),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = admitted {
        kill_child(child).await;
        return Err(error);
    }
    if let Some(mut pipe) = child.stdin.take() {
        // If the process is gone, `wait_for_first_reply` reports that.
        let _ = pipe.write_all(b"\n").await;
    }
    wait_for_first_reply(child, dir).await
}

/// Starts the process, which waits for a byte on its standard input. Blocks for a few file operations.
fn start_process(program: &Path, dir: &Path, spec: &PodSpec) -> Result<Child, ClientError> {
    spec.write(dir)?;
    crate::create_jail(dir)?;
    let (log, errors) = open_process_log(dir)?;
    let mut command = Command::new(program);
    command.arg("--dir").arg(dir).current_dir("/");
    command.stdin(Stdio::piped()).stdout(log).stderr(errors);
    sys::detach(&mut command);
    // Without a VM the process signals its agent, which runs in the node's namespace.
    let started = match spec.jail.is_some() && spec.engine.has_vm() {
        true => sys::spawn_in_pid_namespace(&mut command),
        false => command.spawn(),
    };
    started.map_err(|source| ClientError::Start { program: program.to_owned(), source })
}

/// Opens the process's log twice: for its standard output and for its errors.
pub(super) fn open_process_log(dir: &Path) -> Result<(File, File), ClientError> {
    let path = dir.join(LOG_FILE);
    let log = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path);
    let log = log.map_err(at("open", &path))?;
    let errors = log.try_clone().map_err(at("open", &path))?;
    Ok((log, errors))
}

/// Records in the run directory which process serves it, so that a later cleanup finds the process. Returns `None` when the
/// child has been reaped. Blocks for a few file operations.
fn record_process(child: &Child, dir: &Path) -> Result<Option<ProcessIdentity>, IdentityError> {
    let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) else { return Ok(None) };
    let identity = identity::of_pid(pid)?;
    identity::write(&identity, dir)?;
    Ok(Some(identity))
}

/// Waits for the first reply of the process.
async fn wait_for_first_reply(mut child: Child, dir: &Path) -> Result<PodClient, ClientError> {
    let log_path = dir.join(LOG_FILE);
    let deadline = Instant::now() + START_LIMIT;
    let failure = loop {
        match connect(dir).await {
            Ok(mut client) if Some(client.identity.pid) == child.id().and_then(|pid| pid.try_into().ok()) => {
                // The program was replaced by an incompatible one while this daemon runs.
                if let Err(error) = client.peer().require(PodFeatureSet::BASE) {
                    break error.into();
                }
                // This task alone reaps the process while this daemon lives; afterwards init does.
                let (sender, status) = watch::channel(None);
                client.exit_status = Some(status.clone());
                exit_statuses().insert(dir.to_owned(), status);
                tokio::spawn(async move { sender.send_replace(child.wait().await.ok()) });
                return Ok(client);
            }
            Ok(_) => {}
            // A process that has ended says why below; one that is slow has until the deadline.
            Err(
                ClientError::NotRunning { .. }
                | ClientError::Connect { .. }
                | ClientError::Ended { .. }
                | ClientError::OutOfMemory { .. }
                | ClientError::Timeout { .. },
            ) => {}
            Err(error) => break error,
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(describe_failed_start(dir, status, log_path).await);
        }
        if Instant::now() >= deadline {
            break ClientError::Timeout { what: "reply", limit: START_LIMIT };
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    kill_child(child).await;
    Err(failure)
}

/// Returns why a process ended before its first reply: the signal, what it recorded, or else the end of its log.
async fn describe_failed_start(dir: &Path, status: ExitStatus, log: PathBuf) -> ClientError {
    if status.signal().is_some() {
        return ended(dir, describe_exit(Some(status))).await;
    }
    // The process has written the record: an unusable one is none.
    let recorded = record::read(dir).ok().flatten().map(|record| printable(&record.failure, MAX_TEXT));
    match (recorded.filter(|failure| !failure.is_empty()), status.code().and_then(codes::kind_of_exit_code)) {
        (Some(message), Some(kind)) => ClientError::Rejected { kind, message },
        _ => {
            let tail = match log_tail(dir) {
                Some(tail) if tail.is_empty() => ", which is empty".to_owned(),
                Some(tail) => format!(": {tail}"),
                None => String::new(),
            };
            ClientError::EndedBeforeReply { status, log, tail }
        }
    }
}

/// Returns the identity of the pod process and the resources that this specification gives it.
fn pod_process(identity: ProcessIdentity, spec: &PodSpec) -> PodProcess {
    let cgroup = spec.jail.as_ref().and_then(|jail| jail.cgroup.clone());
    PodProcess { identity, cgroup, scratch: spec.scratch_file() }
}

/// Kills a child. The child is not reaped yet, so its pid is not reused.
async fn kill_child(mut child: Child) {
    if let Err(error) = child.kill().await {
        tracing::error!(%error, "cannot kill a pod process that did not start");
    }
}

pub(super) type ExitStatusWatch = watch::Receiver<Option<ExitStatus>>;

/// The exit statuses of the processes that this daemon started, by run directory, until they are cleaned up.
pub(super) fn exit_statuses() -> MutexGuard<'static, BTreeMap<PathBuf, ExitStatusWatch>> {
    static EXIT_STATUSES: Mutex<BTreeMap<PathBuf, ExitStatusWatch>> = Mutex::new(BTreeMap::new());
    EXIT_STATUSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the last lines of the process's log, joined to one line.
pub(super) fn log_tail(dir: &Path) -> Option<String> {
    // The daemon owns the file, but its content and length are under the control of the process.
    let bytes = JailedDir::new(dir).tail(LOG_FILE, 2048).ok()??;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Some(lines.get(lines.len().saturating_sub(5)..).unwrap_or_default().join(" | "))
}
