//! Implements what the binaries `nacelle`, `nacelle-pod` and `nacelle-keeper` do at their start, log and limit on open files, and
//! finds the paths of the other binaries.

use clap::ValueEnum;
use std::path::PathBuf;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// The program of pod processes. It is installed beside the daemon's.
const POD_PROGRAM: &str = "nacelle-pod";
/// The keeper of machines of machine pods. It is installed there too.
const KEEPER_PROGRAM: &str = "nacelle-keeper";
/// The agent, the same that guests have in their initramfs. It is installed there too.
const AGENT_PROGRAM: &str = "nacelle-agent";

/// How log lines are written to standard error.
#[derive(Clone, Copy, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

impl LogFormat {
    /// The variable of the environment that names the format.
    pub const VARIABLE: &str = "NACELLE_LOG_FORMAT";
}

/// Writes the log to standard error from now on: what NACELLE_LOG lets through, else what is at least an info.
pub fn log(format: LogFormat) {
    let wanted = std::env::var("NACELLE_LOG").ok().and_then(|filter| filter.parse().ok());
    let filter = wanted.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let registry = tracing_subscriber::registry();
    match format {
        LogFormat::Text => registry.with(lines.with_target(false).with_filter(filter)).init(),
        LogFormat::Json => registry.with(lines.json().with_filter(filter)).init(),
    }
}

/// Writes the log to standard output, which is the flight recorder of a machine pod: its lines are among those of the guest.
pub fn log_for_the_recorder() {
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stdout).with_ansi(false).with_target(false);
    let filter = Targets::new().with_default(LevelFilter::INFO);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
}

/// Allows as many open files as the hard limit does: a connection of a pod takes two, and the usual soft limit of 1024
/// is a guess about programs that use select(2).
pub fn more_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) });
    if let Err(error) = raised {
        tracing::warn!("the limit on open files stays as it is: {error}");
    }
}

/// The agent's program, for pods that have no guest.
pub fn agent_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(AGENT_PROGRAM))
}

/// The program that keeps machines of machine pods.
pub fn keeper_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(KEEPER_PROGRAM))
}

/// The program of pod processes.
pub fn pod_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(POD_PROGRAM))
}
