//! Implements what the binaries `nacelle`, `nacelle-pod` and `nacelle-keeper` do at their start, log and limit on open files, and
//! finds the paths of the other binaries.

use crate::bounded_log::BoundedLog;
use clap::ValueEnum;
use std::path::PathBuf;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::prelude::*;

/// The program of pod processes, in the directory of the daemon's.
const POD_PROGRAM: &str = "nacelle-pod";
/// The keeper, which runs the VM of a machine pod, in the same directory.
const KEEPER_PROGRAM: &str = "nacelle-keeper";
/// The workers that decode layers of images, in the same directory.
const UNPACK_PROGRAM: &str = "nacelle-unpack";
/// The agent, the same as in the guests' initramfs, in the same directory.
const AGENT_PROGRAM: &str = "nacelle-agent";

/// The format of the log on standard error.
#[derive(Clone, Copy, ValueEnum)]
pub enum LogFormat {
    /// Text for humans.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// The environment variable with the format.
    pub const VARIABLE: &str = "NACELLE_LOG_FORMAT";
}

/// Starts logging to standard error, with the filter in NACELLE_LOG or, without it, from level info.
pub fn init_log(format: LogFormat) {
    init(format, std::io::stderr);
}

/// As [`init_log`], for a process whose standard error is a file: the file keeps the newest 1 MiB.
pub fn init_pod_log(format: LogFormat) {
    init(format, BoundedLog::stderr());
}

fn init(format: LogFormat, writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) {
    let configured = std::env::var("NACELLE_LOG").ok().and_then(|filter| filter.parse().ok());
    let filter = configured.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false).log_internal_errors(false);
    let registry = tracing_subscriber::registry();
    match format {
        LogFormat::Text => registry.with(layer.with_target(false).with_filter(filter)).init(),
        LogFormat::Json => registry.with(layer.json().with_filter(filter)).init(),
    }
}

/// Starts logging to standard output, which a machine pod's flight recorder keeps together with the guest's console.
pub fn init_recorder_log() {
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stdout).with_ansi(false).with_target(false);
    let filter = Targets::new().with_default(LevelFilter::INFO);
    tracing_subscriber::registry().with(layer.with_filter(filter)).init();
}

/// Raises the soft limit on open files to the hard limit. The usual soft limit of 1024 is for programs that use select(2), and
/// each connection of a pod needs two descriptors.
pub fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let result = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) });
    if let Err(error) = result {
        tracing::warn!("cannot raise the limit on open files: {error}");
    }
}

/// Returns the path of the agent's program, for pods without a guest.
pub fn agent_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(AGENT_PROGRAM))
}

/// Returns the path of the keeper's program.
pub fn keeper_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(KEEPER_PROGRAM))
}

/// Returns the path of the program that decodes layers of images.
pub fn unpack_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(UNPACK_PROGRAM))
}

/// Returns the path of the program of pod processes.
pub fn pod_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(POD_PROGRAM))
}
