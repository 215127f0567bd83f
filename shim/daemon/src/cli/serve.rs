//! Implements `nacelle serve`, which runs the daemon.

use crate::config::Config;
use crate::lifecycle::services::Processes;
use crate::lifecycle::{EngineChoice, Events};
use crate::program;
use crate::server::{self, DaemonSetup};
use crate::supervision::Supervisor;
use crate::sys;
use crate::user_range::check_user_range;
use anyhow::Context;
use nacelle_engine::probe;
use nacelle_pod::spec::Accelerator;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};

/// Returns the engines of this node according to the probe of KVM, and the result of the probe.
pub(super) fn probe_engine() -> (EngineChoice, probe::KvmVerdict) {
    let verdict = probe::probe_kvm();
    let accelerator = match probe::choose_accelerator(&verdict) {
        probe::Accelerator::Kvm => Accelerator::Kvm,
        probe::Accelerator::Tcg => Accelerator::Tcg,
    };
    let choice = EngineChoice {
        fitting: probe::default_engine(&verdict),
        qemu: nacelle_engine::qemu::PROGRAM.into(),
        accelerator,
        // Without the path of this program no pod process can be started; the start of a pod reports the reason.
        agent: program::agent_program().unwrap_or_default(),
        keeper: program::keeper_program().unwrap_or_default(),
    };
    (choice, verdict)
}

pub(super) fn serve(config: Config, mut supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    sys::set_malloc_thresholds();
    check_user_range(&config.jail)?;
    supervisor.status("recovering the pods of this node");
    let (engine, verdict) = probe_engine();
    tracing::info!(engine = %engine.fitting, "{verdict}");
    let exe =
        program::pod_program().context("cannot find the path of this program, in whose directory nacelle-pod is")?;
    let unpack = program::unpack_program()
        .context("cannot find the path of this program, in whose directory nacelle-unpack is")?;
    let networks = Arc::new(nacelle_net::NodeNetworks::new(config.network_options()));
    let setup = DaemonSetup {
        config,
        engine,
        pod_program: exe.clone(),
        pods: Arc::new(Processes { exe }),
        networks,
        unpack,
        observer: None,
        events: Events::default(),
    };
    super::runtime()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let claim = server::claim(&setup.config, &mut supervisor).await?;
        let node = server::open(setup).await?;
        let end = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping; pods continue to run");
        };
        server::serve(node, supervisor, claim, end).await?;
        Ok(ExitCode::SUCCESS)
    })
}
