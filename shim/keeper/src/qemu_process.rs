//! Manages one run of the VM: starts QEMU, sends it commands, and determines the exit code from its events.

use crate::credentials::InstalledCredentials;
use crate::error::KeeperError;
use crate::guest_agent::GuestAgent;
use crate::json_lines::{JsonLines, QemuEvent, printable};
use crate::qemu;
use nacelle_base::task::run_blocking;
use nacelle_engine::program::MachineProgram;
use nacelle_engine::{ExitKind, MachineExit};
use serde_json::{Value, json};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, watch};

/// The file for QEMU's own output, in the VM's directory.
const QEMU_LOG: &str = "qemu.log";
/// The maximum length of a line of QEMU's monitor in bytes.
const MAX_MONITOR_LINE: u64 = 1 << 20;
/// The time limit of an answer of QEMU's monitor.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit from the end of QEMU's monitor to the end of its process.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval in seconds of the balloon's memory statistics.
const BALLOON_SECONDS: u32 = 5;

/// The exit code of a VM that was powered off.
pub const KILLED: u32 = 137;
/// The exit code after a kernel panic of the guest: that of an aborted process.
const PANICKED: u32 = 134;
/// The exit code after an unexpected end of QEMU.
pub const QEMU_DIED: u32 = 255;

/// A running QEMU and the connections to it.
pub struct QemuProcess {
    program: Arc<MachineProgram>,
    monitor: Mutex<JsonLines>,
    resume_count: AtomicU64,
    /// The guest agent.
    pub agent: GuestAgent,
    /// The credentials that the guest has received.
    pub credentials: InstalledCredentials,
}

/// QEMU's ends of the connections.
pub struct QemuSockets {
    ours: [UnixStream; 3],
    theirs: [OwnedFd; 3],
}

impl QemuSockets {
    /// Creates the connections of a VM that is about to start.
    pub fn create() -> Result<QemuSockets, KeeperError> {
        let pair =
            || UnixStream::pair().map_err(|source| KeeperError::Resource { what: "create QEMU's sockets", source });
        let [(monitor, their_monitor), (console, their_console), (agent, their_agent)] = [pair()?, pair()?, pair()?];
        let theirs = [their_monitor.into(), their_console.into(), their_agent.into()];
        Ok(QemuSockets { ours: [monitor, console, agent], theirs })
    }

    /// Returns the descriptor numbers of monitor, console and agent that QEMU inherits.
    pub fn inherited_numbers(&self) -> [i32; 3] {
        self.theirs.each_ref().map(AsRawFd::as_raw_fd)
    }
}

/// A VM that runs.
pub struct StartedQemu {
    /// QEMU and the connections to it.
    pub qemu: Arc<QemuProcess>,
    /// The serial console.
    pub console: tokio::net::UnixStream,
    /// QEMU's events.
    pub events: mpsc::Receiver<QemuEvent>,
}

/// Starts QEMU from its program, with its log in `directory`. When this returns, QEMU has parsed its command line and opened all its files.
pub async fn launch(
    config: qemu::QemuConfig<'_>,
    sockets: QemuSockets,
    program: &Path,
    directory: &Path,
) -> Result<StartedQemu, KeeperError> {
    let (args, inherited, balloon) = (config.args(), config.inherited(), config.document.balloon);
    tracing::debug!(?args, "starting QEMU");
    let QemuSockets { ours: [monitor, console, agent], theirs } = sockets;
    let (qemu, log) = (program.to_owned(), directory.join(QEMU_LOG));
    let started = run_blocking("start QEMU", move || {
        let started = MachineProgram::start(&qemu, args, inherited, &log);
        drop(theirs);
        started
    });
    let program = Arc::new(started.await??);
    let (mut monitor, events) = JsonLines::new(to_async(monitor)?, "QEMU", MAX_MONITOR_LINE);
    if let Err(error) = monitor.execute("qmp_capabilities", Value::Null, COMMAND_TIMEOUT).await {
        let waited = Arc::clone(&program);
        let exit = run_blocking("wait for QEMU", move || waited.wait(Duration::from_secs(2))).await?;
        return Err(match exit.map(|exit| exit.how) {
            Some(ExitKind::Died { message, .. }) => KeeperError::Rejected {
                peer: "QEMU",
                command: "the command line".into(),
                message: printable(&message.replace('\n', " | ")),
            },
            _ => error,
        });
    }
    if balloon {
        let arguments = json!({
            "path": "/machine/peripheral/balloon",
            "property": "guest-stats-polling-interval",
            "value": BALLOON_SECONDS,
        });
        monitor.execute("qom-set", arguments, COMMAND_TIMEOUT).await?;
    }
    let live = QemuProcess {
        program,
        monitor: Mutex::new(monitor),
        resume_count: AtomicU64::new(0),
        agent: GuestAgent::new(to_async(agent)?),
        credentials: InstalledCredentials::default(),
    };
    Ok(StartedQemu { qemu: Arc::new(live), console: to_async(console)?, events })
}

impl QemuProcess {
    /// Sends QEMU a command.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.monitor.lock().await.execute(command, arguments, COMMAND_TIMEOUT).await
    }

    /// Sends QEMU a command with a descriptor.
    pub async fn execute_with_descriptor(
        &self,
        command: &str,
        arguments: Value,
        descriptor: OwnedFd,
    ) -> Result<Value, KeeperError> {
        self.monitor.lock().await.execute_with_descriptor(command, arguments, Some(descriptor), COMMAND_TIMEOUT).await
    }

    /// Returns how often the VM was resumed after a pause.
    pub fn resume_count(&self) -> u64 {
        self.resume_count.load(Ordering::Relaxed)
    }

    /// Powers the VM off by killing QEMU.
    pub fn kill(&self) {
        self.program.kill();
    }

    /// Returns the PID of QEMU.
    pub fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Waits for the end of the VM and returns its exit code. Notifies `observers` of each event.
    pub async fn wait_until_ended(&self, mut events: mpsc::Receiver<QemuEvent>, observers: &watch::Sender<()>) -> u32 {
        let mut reason = None;
        while let Some(QemuEvent { name, data }) = events.recv().await {
            tracing::info!(event = name, data = %printable(&data.to_string()), "QEMU event");
            if name == "RESUME" {
                self.resume_count.fetch_add(1, Ordering::Relaxed);
            }
            observers.send_replace(());
            if name == "SHUTDOWN" {
                reason = data.get("reason").and_then(Value::as_str).map(str::to_owned);
            }
        }
        loop {
            let waiting = Arc::clone(&self.program);
            match run_blocking("wait for QEMU", move || waiting.wait(EXIT_TIMEOUT)).await {
                Ok(Some(exit)) => return exit_code(&exit, reason.as_deref()),
                // QEMU has closed its monitor but still runs: its state is unknown.
                Ok(None) => self.kill(),
                Err(_) => return QEMU_DIED,
            }
        }
    }
}

/// Returns the exit code of a VM.
fn exit_code(exit: &MachineExit, reason: Option<&str>) -> u32 {
    match (&exit.how, reason) {
        (ExitKind::Killed, _) => KILLED,
        (_, Some("guest-panic")) | (ExitKind::Panicked, _) => PANICKED,
        (ExitKind::Shutdown, _) => 0,
        (ExitKind::Died { message, .. }, _) => {
            tracing::error!(message, "QEMU exited unexpectedly");
            QEMU_DIED
        }
    }
}

fn to_async(stream: UnixStream) -> Result<tokio::net::UnixStream, KeeperError> {
    let result = stream.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(stream));
    result.map_err(|source| KeeperError::Resource { what: "create QEMU's sockets", source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_exit_has_its_code() {
        let exit = |how| MachineExit { how, console_tail: String::new() };
        let died = ExitKind::Died { code: Some(1), signal: None, message: String::new() };
        assert_eq!(exit_code(&exit(ExitKind::Shutdown), Some("guest-shutdown")), 0);
        assert_eq!(exit_code(&exit(ExitKind::Shutdown), Some("guest-panic")), PANICKED);
        assert_eq!(exit_code(&exit(ExitKind::Killed), None), KILLED);
        assert_eq!(exit_code(&exit(died), None), QEMU_DIED);
    }
}
