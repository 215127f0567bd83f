//! Runs the pod process around the actor: identity check, jail, async runtime, sockets, signals, and exit.

use crate::actor::{ActorMessage, ActorRequest, PodActor};
use crate::error::PodError;
use crate::identity;
use crate::restore::CheckpointFiles;
use crate::server::PodService;
use crate::spec::PodSpec;
use crate::{SOCKET_FILE, STREAM_SOCKET_FILE, checkpoint, jail, jail_dir, machine, share, streams, template};
use nacelle_base::files::{at, remove_if_there};
use nacelle_engine::Engine;
use nacelle_proto::pod::pod_server::PodServer;
use nacelle_proto::wire;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;

/// The grace period of containers at SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(10);
/// The limit for sending the last replies.
const LAST_REPLIES_LIMIT: Duration = Duration::from_secs(5);
/// The stack size of blocking threads, which call the engine, netlink and the file system.
const THREAD_STACK: usize = 512 << 10;

/// Serves the pod in `dir` with the engine that `engine` creates from the specification, until the pod is stopped.
pub fn run(dir: &Path, engine: impl FnOnce(&PodSpec) -> Result<Arc<dyn Engine>, PodError>) -> Result<(), PodError> {
    let spec = PodSpec::read(dir)?;
    // The daemon has recorded in this directory which process it has started.
    if identity::read(dir)? != Some(identity::of_this_process()?) {
        return Err(PodError::ForeignProcess { dir: dir.to_owned() });
    }
    // Files of the pod are private; log files are readable for the node's group, as their mode says.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o027));
    // Steps that need rights come before the jail, and the jail comes before there is a second thread or a guest.
    if spec.jail.is_some() && spec.engine.has_vm() {
        // First of all, because the file server is a fork of this process.
        nacelle_jail::drop_oom_protection();
    }
    let share = share::start(&spec, dir)?;
    let engine = engine(&spec)?;
    let mut prepared = machine::prepare(&spec)?;
    if let Some(channels) = share.map(nacelle_fs::FileServerProcess::wait_until_ready).transpose()? {
        (prepared.shares, prepared.copied_volumes) = (channels.file_requests, Some(channels.copied_in));
    }
    if spec.template.is_some() {
        let step = prepared.timeline.begin("template");
        prepared.template = template::open(&spec);
        step.done();
    }
    if let Some(base) = &spec.checkpoint {
        prepared.checkpoint = Some(CheckpointFiles::open(base)?);
    }
    prepared.tracker = checkpoint::open_tracker(&spec);
    if let Some(jail) = &spec.jail {
        jail::enter(&spec, jail, dir)?;
        prepared.has_name = false;
    }
    let runtime = runtime()?;
    let served = runtime.block_on(serve(spec, dir, engine, prepared));
    // Work that still blocks holds no resources that need cleanup.
    runtime.shutdown_background();
    let removed = [SOCKET_FILE, STREAM_SOCKET_FILE].map(|file| remove_if_there(&file.in_jail(&jail_dir(dir))));
    removed.into_iter().fold(served, |served, removed| served.and(removed.map_err(PodError::from)))
}

/// Returns an async runtime of one thread, whose blocking threads have their filter.
pub fn runtime() -> Result<tokio::runtime::Runtime, PodError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_stack_size(THREAD_STACK)
        .max_blocking_threads(64)
        .on_thread_start(|| nacelle_jail::filter_thread(nacelle_jail::ThreadKind::Blocking))
        .build()
        .map_err(|source| PodError::Thread { what: "start the async runtime", source })
}

async fn serve(
    spec: PodSpec,
    dir: &Path,
    engine: Arc<dyn Engine>,
    prepared: machine::PreparedVm,
) -> Result<(), PodError> {
    // A client that finds the second socket may rely on the first.
    let streams_listener = listen(&STREAM_SOCKET_FILE.in_jail(&jail_dir(dir)))?;
    let listener = listen(&SOCKET_FILE.in_jail(&jail_dir(dir)))?;

    let pod = spec.id.clone();
    let spec = Arc::new(spec);
    let (actor, handles) = PodActor::new(Arc::clone(&spec), dir);
    stop_on_signals(handles.inbox.clone())?;
    tokio::spawn(streams::serve(streams_listener, handles.inbox.clone()));
    let (actor_guard, actor_ended) = tokio::sync::oneshot::channel::<()>();
    let service = PodServer::new(PodService::new(handles, spec)).max_decoding_message_size(wire::MAX_LARGE_MESSAGE);
    let server = nacelle_proto::server::builder().add_service(service).serve_with_incoming_shutdown(
        UnixListenerStream::new(listener),
        async {
            // The channel is closed when the actor has ended.
            let _ = actor_ended.await;
        },
    );
    let server = tokio::spawn(server);
    tracing::info!(%pod, "the pod process accepts requests");
    actor.run(engine, prepared).await;
    drop(actor_guard);
    match tokio::time::timeout(LAST_REPLIES_LIMIT, server).await {
        Ok(Ok(Err(error))) => {
            tracing::warn!("the gRPC server of the pod process failed: {}", nacelle_base::Chain(&error))
        }
        Ok(_) => {}
        Err(_elapsed) => tracing::warn!("a client did not read the last replies"),
    }
    tracing::info!(%pod, "the pod has stopped");
    Ok(())
}

fn listen(socket: &Path) -> Result<UnixListener, PodError> {
    remove_if_there(socket)?;
    let listener = UnixListener::bind(socket).map_err(at("listen on", socket))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600)).map_err(at("protect", socket))?;
    Ok(listener)
}

/// Turns SIGTERM and SIGINT into a stop of the pod.
fn stop_on_signals(inbox: mpsc::UnboundedSender<ActorMessage>) -> Result<(), PodError> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let failed = |source| PodError::Thread { what: "handle SIGTERM and SIGINT", source };
        let mut signals = signal(kind).map_err(failed)?;
        let inbox = inbox.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                if inbox.send(ActorMessage::Request(ActorRequest::StopPod(TERM_GRACE, None))).is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}
