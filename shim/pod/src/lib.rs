//! Owns: the process of one PodSandbox (`nacelle pod`): its machine, the agent in it, log files, exit codes; and
//! the daemon's client for it. docs/pod-process.md is the map.
//! May use: `base`, `proto`, `engine`, `net`. Knows no CRI.

pub mod client;
pub mod codes;
pub mod identity;
pub mod record;
pub mod spec;

mod sys;

use std::path::Path;
use std::process::ExitCode;

/// The socket on which the process answers, in its run directory; mode 0600.
pub const SOCKET_FILE: &str = "pod.sock";
/// The scratch disk, in the run directory.
pub const SCRATCH_FILE: &str = "scratch.ext4";

/// The pod process: serves the pod in `dir` until it is stopped. The exit code is 0 after an orderly stop.
pub fn run(dir: &Path) -> ExitCode {
    match spec::PodSpec::read(dir) {
        Ok(spec) => {
            tracing::info!(pod = %spec.id, "pod process");
            ExitCode::SUCCESS
        }
        Err(error) => {
            tracing::error!("{}", nacelle_base::Chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Now, in nanoseconds since 1970.
pub(crate) fn now_nanos() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
