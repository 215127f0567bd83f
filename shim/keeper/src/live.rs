//! Manages one run of the VM: starts QEMU, sends it commands, and determines the exit code from its events.

use crate::credentials::Given;
use crate::error::KeeperError;
use crate::guest_agent::GuestAgent;
use crate::lines::{Event, Lines, printable};
use crate::machine::Settings;
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
use tokio::sync::{Mutex, mpsc};

/// The file for QEMU's own output, in the VM's directory.
const QEMU_LOG: &str = "qemu.log";
/// The maximum length of a line of QEMU's monitor in bytes.
const LONGEST: u64 = 1 << 20;
/// The time limit of an answer of QEMU's monitor.
const ANSWER: Duration = Duration::from_secs(60);
/// The time limit from the end of QEMU's monitor to the end of its process.
const LAST: Duration = Duration::from_secs(60);
/// The interval in seconds of the balloon's memory statistics.
const BALLOON_SECONDS: u32 = 5;

/// The exit code of a VM that was powered off.
pub const KILLED: u32 = 137;
/// The exit code after a kernel panic of the guest: that of an aborted process.
const PANICKED: u32 = 134;
/// The exit code after an unexpected end of QEMU.
pub const DIED: u32 = 255;

/// A running QEMU and the connections to it.
pub struct Live {
    program: Arc<MachineProgram>,
    monitor: Mutex<Lines>,
    resumed: AtomicU64,
    /// The guest agent.
    pub agent: GuestAgent,
    /// The credentials that the guest has received.
    pub given: Given,
}

/// QEMU's ends of the connections.
pub struct Ends {
    ours: [UnixStream; 3],
    theirs: [OwnedFd; 3],
}

impl Ends {
    /// Creates the connections of a VM that is about to start.
    pub fn make() -> Result<Ends, KeeperError> {
        let pair = || UnixStream::pair().map_err(|source| KeeperError::Resources { what: "QEMU's sockets", source });
        let [(monitor, their_monitor), (console, their_console), (agent, their_agent)] = [pair()?, pair()?, pair()?];
        let theirs = [their_monitor.into(), their_console.into(), their_agent.into()];
        Ok(Ends { ours: [monitor, console, agent], theirs })
    }

    /// Returns the descriptor numbers of monitor, console and agent that QEMU inherits.
    pub fn numbers(&self) -> [i32; 3] {
        self.theirs.each_ref().map(AsRawFd::as_raw_fd)
    }
}

/// A VM that runs.
pub struct Launched {
    /// QEMU and the connections to it.
    pub live: Arc<Live>,
    /// The serial console.
    pub console: tokio::net::UnixStream,
    /// QEMU's events.
    pub events: mpsc::Receiver<Event>,
}

/// Starts QEMU. When this returns, QEMU has parsed its command line and opened all its files.
pub async fn launch(
    machine: qemu::Machine<'_>,
    ends: Ends,
    settings: &Settings,
    directory: &Path,
) -> Result<Launched, KeeperError> {
    let (args, inherited, balloon) = (machine.args(), machine.inherited(), machine.document.balloon);
    tracing::debug!(?args, "starting QEMU");
    let Ends { ours: [monitor, console, agent], theirs } = ends;
    let (qemu, log) = (settings.qemu.clone(), directory.join(QEMU_LOG));
    let started = run_blocking("start QEMU", move || {
        let started = MachineProgram::start(&qemu, args, inherited, &log);
        drop(theirs);
        started
    });
    let program = Arc::new(started.await??);
    let (mut monitor, events) = Lines::new(stream(monitor)?, "QEMU", LONGEST);
    if let Err(error) = monitor.ask("qmp_capabilities", Value::Null, ANSWER).await {
        let waited = Arc::clone(&program);
        let exit = run_blocking("wait for QEMU", move || waited.wait(Duration::from_secs(2))).await?;
        return Err(match exit.map(|exit| exit.how) {
            Some(ExitKind::Died { message, .. }) => KeeperError::Refused {
                whom: "QEMU",
                command: "the machine".into(),
                words: printable(&message.replace('\n', " | ")),
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
        monitor.ask("qom-set", arguments, ANSWER).await?;
    }
    let live = Live {
        program,
        monitor: Mutex::new(monitor),
        resumed: AtomicU64::new(0),
        agent: GuestAgent::new(stream(agent)?),
        given: Given::default(),
    };
    Ok(Launched { live: Arc::new(live), console: stream(console)?, events })
}

impl Live {
    /// Sends QEMU a command.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.monitor.lock().await.ask(command, arguments, ANSWER).await
    }

    /// Sends QEMU a command with a descriptor.
    pub async fn hand(&self, command: &str, arguments: Value, descriptor: OwnedFd) -> Result<Value, KeeperError> {
        self.monitor.lock().await.ask_with(command, arguments, Some(descriptor), ANSWER).await
    }

    /// Returns how often the VM was resumed after a pause.
    pub fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Relaxed)
    }

    /// Powers the VM off by killing QEMU.
    pub fn kill(&self) {
        self.program.kill();
    }

    /// Returns the PID of QEMU.
    pub fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Waits for the end of the VM and returns its exit code.
    pub async fn ended(&self, mut events: mpsc::Receiver<Event>) -> u32 {
        let mut reason = None;
        while let Some(Event { name, data }) = events.recv().await {
            tracing::info!(event = name, data = %printable(&data.to_string()), "the machine");
            if name == "RESUME" {
                self.resumed.fetch_add(1, Ordering::Relaxed);
            }
            if name == "SHUTDOWN" {
                reason = data.get("reason").and_then(Value::as_str).map(str::to_owned);
            }
        }
        loop {
            let waiting = Arc::clone(&self.program);
            match run_blocking("wait for QEMU", move || waiting.wait(LAST)).await {
                Ok(Some(exit)) => return code(&exit, reason.as_deref()),
                // QEMU has closed its monitor but still runs: its state is unknown.
                Ok(None) => self.kill(),
                Err(_) => return DIED,
            }
        }
    }
}

/// Returns the exit code of a VM.
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

fn stream(stream: UnixStream) -> Result<tokio::net::UnixStream, KeeperError> {
    let made = stream.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(stream));
    made.map_err(|source| KeeperError::Resources { what: "QEMU's sockets", source })
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
}
