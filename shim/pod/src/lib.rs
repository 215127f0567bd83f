//! Owns: the process of one PodSandbox (`nacelle-pod`): its machine, the agent in it, log files, exit codes; and
//! the daemon's client for it. docs/contributor/pod-process.md is the map.
//! May use: `base`, `proto`, `engine`, `fs`, `net`, `jail`. Knows no CRI.

mod actor;
mod agent;
mod boot;
pub mod client;
pub mod codes;
mod container;
mod devices;
mod error;
mod exec;
mod fan;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod guest_values;
mod host;
pub mod identity;
mod images;
mod jail;
mod log;
mod machine;
mod memory;
pub mod passed;
mod process;
pub mod processors;
mod pushed;
pub mod record;
pub mod scratch;
mod server;
pub mod share;
pub mod spec;
mod state;
mod stops;
mod streams;
mod sys;
mod teardown;

pub use error::PodError;
pub use host::{group_usage, is_of_containers};
pub use machine::{CONSOLE_FILE, tap_name};
pub use nacelle_jail::cgroup::{Usage as GroupUsage, cpu_limit, memory_limit};

use nacelle_base::Chain;
use nacelle_base::files::{FileError, at};
use nacelle_base::jailed::{JailedDir, JailedFile};
use nacelle_base::retry::retry_interrupted;
use nacelle_engine::Engine;
use nacelle_engine::keeper::Keeper;
use nacelle_engine::kvm::Kvm;
use nacelle_engine::qemu::Qemu;
use spec::{Accelerator, EngineSpec};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// The socket on which the process answers, in [`jail_dir`]; mode 0600.
pub const SOCKET_FILE: JailedFile = JailedFile::new("pod.sock");

/// The socket of the streams, in [`jail_dir`]; mode 0600.
pub const STREAM_SOCKET_FILE: JailedFile = JailedFile::new("stream.sock");

/// The part of a pod's run directory that its process writes, and the only one that it sees in its jail. The rest of the run
/// directory is the daemon's. The daemon reaches what lies in this part through [`jailed`] only.
pub fn jail_dir(dir: &Path) -> PathBuf {
    dir.join("jail")
}

/// The same part as the daemon reads it: everything in it may be hostile.
pub fn jailed(dir: &Path) -> JailedDir {
    JailedDir::new(jail_dir(dir))
}

/// Makes that part, mode 0700, in a run directory that exists. It may exist already.
pub fn make_jail(dir: &Path) -> Result<(), FileError> {
    let part = jail_dir(dir);
    DirBuilder::new().mode(0o700).recursive(true).create(&part).map_err(at("create", &part))
}

/// Waits for the byte on standard input that the daemon sends when it has recorded the process; before it the process does nothing.
/// False: standard input ended, so that the start was given up.
pub fn told() -> bool {
    let mut word = [0];
    matches!(retry_interrupted(|| nix::unistd::read(std::io::stdin(), &mut word)), Ok(1))
}

/// The pod process: serves the pod in `dir` until it is stopped. The exit code is 0 after an orderly stop. Nothing may
/// be open but the standard streams: it is closed.
pub fn run(dir: &Path) -> ExitCode {
    if let Err(error) = nacelle_jail::close_inherited() {
        tracing::error!("{}", Chain(&error));
        return ExitCode::FAILURE;
    }
    run_with(dir, |spec| {
        let engine: Arc<dyn Engine> = match &spec.engine {
            EngineSpec::Kvm {} => Arc::new(Kvm::new()),
            EngineSpec::Qemu { binary, accelerator } => Arc::new(Qemu::new(binary, accelerator_of(*accelerator))),
            EngineSpec::Keeper { program, qemu, accelerator, .. } => Arc::new(Keeper {
                program: program.clone(),
                qemu: qemu.clone(),
                accelerator: accelerator_of(*accelerator),
                scratch: spec.scratch_file(),
            }),
            EngineSpec::Host { agent, shares } => Arc::new(host::engine(spec, dir, agent, *shares)?),
        };
        Ok(engine)
    })
}

fn accelerator_of(said: Accelerator) -> nacelle_engine::Accelerator {
    match said {
        Accelerator::Kvm => nacelle_engine::Accelerator::Kvm,
        Accelerator::Tcg => nacelle_engine::Accelerator::Tcg,
    }
}

/// As [`run`], with an engine of the caller's choice.
pub fn run_with(dir: &Path, engine: impl FnOnce(&spec::PodSpec) -> Result<Arc<dyn Engine>, PodError>) -> ExitCode {
    match process::run(dir, engine) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // For whoever started it: it may have no log yet but its standard error.
            tracing::error!("{}", Chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Now, in nanoseconds since 1970.
pub(crate) fn now_nanos() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
