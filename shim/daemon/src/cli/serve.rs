//! Implements `nacelle serve`, which runs the daemon.

use super::{ConfigArgument, ExitStatus};
use crate::config::{Config, DEFAULT_PATH};
use crate::lifecycle::services::Processes;
use crate::lifecycle::{EngineChoice, Events};
use crate::log::LogControl;
use crate::program;
use crate::server::{self, DaemonSetup};
use crate::supervision::Supervisor;
use crate::sys;
use crate::user_range::check_user_range;
use anyhow::Context;
use nacelle_base::task::run_blocking;
use nacelle_engine::probe;
use nacelle_pod::spec::Accelerator;
use std::path::Path;
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::task::AbortOnDropHandle;

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

pub(super) fn serve(
    argument: &ConfigArgument,
    mut supervisor: Supervisor,
    log: LogControl,
) -> anyhow::Result<ExitStatus> {
    let config = Config::load_to_serve(argument.config.as_deref())?;
    log.configure(&config.log.filter);
    let path = argument.config.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
    tracing::info!(version = program::version(), config = %path.display(), log = %log.filter(), "nacelle starts");
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
        let reload =
            reload_at_hangup(signal(SignalKind::hangup())?, argument.clone(), setup.config.clone(), log.clone());
        let _reload = AbortOnDropHandle::new(tokio::spawn(reload));
        let claim = server::claim(&setup.config, &mut supervisor).await?;
        let node = server::open(setup).await?;
        let end = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping; pods continue to run");
        };
        server::serve(node, supervisor, claim, log, end).await?;
        Ok(ExitStatus::Success)
    })
}

/// Reads the configuration again at each SIGHUP, and applies the log filter. The other settings are those of the start; the log
/// names those that changed since. An invalid configuration changes nothing.
async fn reload_at_hangup(mut hangup: Signal, argument: ConfigArgument, used: Config, log: LogControl) {
    while hangup.recv().await.is_some() {
        let argument = argument.clone();
        let read =
            run_blocking("read the configuration", move || Config::load_to_serve(argument.config.as_deref())).await;
        match read.map_err(anyhow::Error::from).and_then(|read| Ok(read?)) {
            Err(error) => tracing::error!("the changed configuration is not used: {error:#}"),
            Ok(config) => {
                log.configure(&config.log.filter);
                let waiting = used.keys_that_differ(&config).join(", ");
                if waiting.is_empty() {
                    tracing::info!(log = %log.filter(), "the configuration was read again");
                } else {
                    let log = log.filter();
                    tracing::warn!(%log, waiting, "the configuration was read again; some settings need a restart of the daemon");
                }
            }
        }
    }
}
