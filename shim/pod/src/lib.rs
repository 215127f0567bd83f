//! Implements the process of one PodSandbox (`nacelle-pod`), which runs the VM, talks to the agent in it, writes log files
//! and records exit codes, and the daemon's client for that process. It knows no CRI.
//!
//! docs/contributor/pod-process.md describes the whole. Inside Nacelle the crate depends on `base`, `proto`, `engine`,
//! `fs`, `net`, `jail` and `model`.

mod actor;
pub mod affinity;
mod agent;
mod boot;
mod broadcast;
mod checkpoint;
pub mod client;
mod clock;
pub mod codes;
mod container;
mod copied_volumes;
mod device_table;
mod devices;
mod error;
mod exec;
mod file_server_channel;
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
mod process;
pub mod protocol;
pub mod record;
mod restore;
mod returned_files;
pub mod run_dir;
pub mod scratch;
mod server;
pub mod share;
mod socket_volumes;
pub mod spec;
mod state;
mod stops;
mod streams;
mod sys;
mod teardown;
pub mod template;
mod text;
pub mod vfio_dir;

pub use error::PodError;
pub use host::{cgroup_usage, holds_containers};
pub use jail::{
    Access as PathAccess, ExpectedJail, MountNamespaceError, ResourceLimits, check_idmapped_mounts, expected_jail,
};
pub use log::rfc3339;
pub use machine::{CONSOLE_FILE, tap_name};
pub use nacelle_jail::cgroup::{
    MemoryPolicy, Usage as GroupUsage, cpu_limit, is_unified, memory_limit, set_memory_policy,
};
pub use nacelle_jail::disk_limits::check_disk_limits;
pub use nacelle_jail::set_oom_score;
pub use run_dir::{SOCKET_FILE, STREAM_SOCKET_FILE, create_jail, jail_dir, jailed};

use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Chain, Classify};
use nacelle_engine::Engine;
use nacelle_engine::keeper::KeeperEngine;
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::qemu::QemuEngine;
use spec::{Accelerator, EngineSpec};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// Waits for the byte on standard input that the daemon sends when it has recorded the process; the process must do nothing
/// before. Returns false if standard input ended, because the start was cancelled.
pub fn wait_for_admission() -> bool {
    let mut byte = [0];
    matches!(retry_interrupted(|| nix::unistd::read(std::io::stdin(), &mut byte)), Ok(1))
}

/// Runs the pod process: serves the pod in `dir` until it is stopped. The exit code is 0 after an orderly stop. Closes all
/// inherited descriptors except the standard streams.
pub fn run(dir: &Path) -> ExitCode {
    if let Err(error) = nacelle_jail::close_inherited() {
        tracing::error!("{}", Chain(&error));
        return ExitCode::FAILURE;
    }
    run_with(dir, |spec| {
        let engine: Arc<dyn Engine> = match &spec.engine {
            EngineSpec::Kvm {} => Arc::new(KvmEngine::new()),
            EngineSpec::Qemu { binary, accelerator } => {
                Arc::new(QemuEngine::new(binary, engine_accelerator(*accelerator)))
            }
            EngineSpec::Keeper { program, qemu, accelerator, .. } => Arc::new(KeeperEngine {
                program: program.clone(),
                qemu: qemu.clone(),
                accelerator: engine_accelerator(*accelerator),
                scratch: spec.scratch_file(),
            }),
            EngineSpec::Host { agent, shares } => Arc::new(host::start_agent(spec, dir, agent, *shares)?),
        };
        Ok(engine)
    })
}

fn engine_accelerator(accelerator: Accelerator) -> nacelle_engine::Accelerator {
    match accelerator {
        Accelerator::Kvm => nacelle_engine::Accelerator::Kvm,
        Accelerator::Tcg => nacelle_engine::Accelerator::Tcg,
    }
}

/// Like [`run`], with an engine of the caller's choice.
pub fn run_with(dir: &Path, engine: impl FnOnce(&spec::PodSpec) -> Result<Arc<dyn Engine>, PodError>) -> ExitCode {
    match process::run(dir, engine) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let kind = error.kind();
            let failure = Chain(&error).to_string();
            tracing::error!("{failure}");
            // The daemon reads the record and the exit code of a process that has not replied. A process that the daemon did not
            // start for this directory must not write the record of another, which may not have written it yet.
            let is_foreign = matches!(error, PodError::ForeignProcess { .. });
            if !is_foreign && let Err(error) = record::write_failed_start(dir, failure) {
                tracing::warn!("cannot record why the pod process ends: {}", Chain(&error));
            }
            ExitCode::from(codes::exit_code(kind))
        }
    }
}

/// Returns the current time in nanoseconds since 1970.
pub(crate) fn now_nanos() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
