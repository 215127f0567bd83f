//! Runs the daemon: opens its stores, recovers the node's pods, and serves on the socket until it is asked to stop. Pods continue
//! to run after its end.

use crate::config::Config;
use crate::cri::Cri;
use crate::deadline::DeadlineLayer;
use crate::grpc_connection::GrpcConnection;
use crate::lifecycle::services::{Networks, Pods};
use crate::lifecycle::template::Templates;
use crate::lifecycle::{EngineChoice, Events, Node, NodeServices};
use crate::log::LogControl;
use crate::metrics::EventCounters;
use crate::metrics::labels::RequestResult;
use crate::metrics::requests::CountLayer;
use crate::monitoring::networks::CountedNetworks;
use crate::monitoring::{Exporter, serve_metrics};
use crate::node_service::NodeService;
use crate::socket::{SocketClaim, SocketError};
use crate::streaming::NodeStreams;
use crate::supervision::{SupervisionError, Supervisor};
use crate::traces::TraceExporter;
use nacelle_base::draft;
use nacelle_base::files::{FileError, at};
use nacelle_base::lock::{LockError, PathLock};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_image::ImageError;
use nacelle_machines::vms::{UnknownVms, Vms};
use nacelle_machines::{PodRuntime, VmService, controllers};
use nacelle_proto::cri::image_service_server::ImageServiceServer;
use nacelle_proto::cri::runtime_service_server::RuntimeServiceServer;
use nacelle_proto::node::node_server::NodeServer;
use nacelle_proto::vm::machines_server::MachinesServer;
use nacelle_store::{Change, CommitObserver, CommitPhase, Store, StoreCounts, StoreError, import_store};
use std::ops::ControlFlow;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tower::util::option_layer;

/// The largest message in bytes: the response to ExecSync with both streams full.
pub(crate) const MESSAGE_LIMIT: usize = 40 << 20;
/// Time for requests in progress when the daemon stops; their work continues without it.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(3);

/// Time to wait for the locks of a daemon that is about to end.
const LOCK_LIMIT: Duration = Duration::from_secs(10);
/// The same for an import, at whose command line an operator waits.
const IMPORT_LOCK_LIMIT: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// Pause between two attempts to retry owed CNI DELs.
const OWED_DELETES_PAUSE: Duration = Duration::from_secs(5);

/// The parts of a daemon.
pub struct DaemonSetup {
    /// The configuration.
    pub config: Config,
    /// The engines.
    pub engine: EngineChoice,
    /// The pod processes.
    pub pods: Arc<dyn Pods>,
    /// The networks.
    pub networks: Arc<dyn Networks>,
    /// The program that decodes layers of images.
    pub unpack: PathBuf,
    /// The program that runs pods and builds templates.
    pub pod_program: PathBuf,
    /// Observes each commit of the state store.
    pub observer: Option<CommitObserver>,
    /// The events of pods and containers.
    pub events: Events,
}

/// The reason why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The state store cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The image store cannot be opened.
    #[error(transparent)]
    Images(#[from] ImageError),
    /// The streaming server cannot start.
    #[error(transparent)]
    Streaming(#[from] nacelle_stream::ServerError),
    /// The socket is not available.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Another daemon uses a directory in which each daemon removes unknown files.
    #[error(
        "cannot use {setting} = {path:?}: another daemon uses that directory, and each would remove the files of the other; stop that \
         one, or set {setting} to another path"
    )]
    DirectoryInUse {
        /// The setting of the directory: "paths.run".
        setting: &'static str,
        /// The directory.
        path: PathBuf,
        /// The other daemon.
        source: LockError,
    },
    /// The socket or the settings of the service manager are invalid.
    #[error(transparent)]
    Supervision(#[from] SupervisionError),
    /// The server failed.
    #[error("cannot serve on {socket}")]
    Serve {
        /// The socket.
        socket: String,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for ServeError {
    fn kind(&self) -> FailureKind {
        match self {
            ServeError::File(error) => error.kind(),
            ServeError::Store(error) => error.kind(),
            ServeError::Images(error) => error.kind(),
            ServeError::Streaming(error) => error.kind(),
            ServeError::Supervision(error) => error.kind(),
            ServeError::Socket(error) => error.kind(),
            ServeError::DirectoryInUse { source, .. } => source.kind(),
            ServeError::Task(error) => error.kind(),
            ServeError::Serve { .. } => FailureKind::Internal,
        }
    }
}

/// Opens the stores and recovers the node's pods.
pub async fn open(setup: DaemonSetup) -> Result<Node, ServeError> {
    let DaemonSetup { config, engine, pods, networks, unpack, pod_program, observer, events } = setup;
    let opened_config = config.clone();
    let counters = EventCounters::new(config.handlers.keys());
    let observer = count_commits(counters.clone(), observer);
    let opened = run_blocking("open the stores", move || -> Result<_, ServeError> {
        let paths = &opened_config.paths;
        create_directories(&[&paths.root, &paths.run, &paths.pods(), &paths.scratch(), &paths.images()])?;
        // The state store first: its lock keeps a second daemon out.
        let (store, contents) = Store::open(&paths.store(), Some(observer))?;
        let locks = lock_directories(&opened_config, LOCK_LIMIT)?;
        // At this point only processes that hold the locks of their drafts write there.
        if let Err(error) = draft::remove_stale_drafts(&paths.root) {
            // Jailed processes write in some of the directories: their files must not prevent the daemon from serving.
            tracing::warn!(error = %Chain(&error), "cannot remove all temporary files of killed processes");
        }
        // Its directory is empty after a boot, when no subscriber knows of earlier events.
        if let Err(error) = events.keep_last_time(&paths.run.join("last-event")) {
            let error = Chain(&error);
            tracing::warn!(%error, "events may have earlier times than those of the last daemon if the clock was set back");
        }
        let images = open_images(&opened_config, &unpack)?;
        match images.verity_error() {
            None => tracing::info!("fs-verity protects the files of the image store"),
            Some(why) => tracing::info!(%why, "fs-verity does not protect the files of the image store"),
        }
        let unknown = UnknownVms::after(&contents, paths.lost_machines());
        let vms = Vms::open(paths.machines(), store.clone(), contents.vms.clone(), unknown)?;
        let templates = Templates::open(&opened_config, pod_program);
        Ok((store, contents, images, vms, templates, locks, events))
    });
    let (store, contents, images, vms, templates, locks, events) = opened.await??;
    if contents.records_lost && vms.left_in_place() == 0 {
        let store = store.clone();
        // Not awaited: until this is committed, the next start keeps unknown directories of VMs as well.
        tokio::spawn(async move {
            if let Err(error) = store.commit(vec![Change::LostRecordsHandled]).await {
                let error = Chain(&error);
                tracing::warn!(%error, "cannot record that the disks of lost VMs are kept; the next start looks for such disks again");
            }
        });
    }
    let cidrs = RwLock::new(Vec::new());
    let networks: Arc<dyn Networks> = Arc::new(CountedNetworks::new(networks, counters.clone()));
    let services =
        NodeServices { config, engine, store, images, vms, templates, pods, networks, cidrs, events, counters, locks };
    Ok(Node::recover(services, contents).await)
}

/// Creates those of these directories that are missing, for root only.
fn create_directories(directories: &[&Path]) -> Result<(), FileError> {
    directories.iter().try_for_each(|directory| {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(at("create", directory))
    })
}

/// Replaces the state store of a node without a running daemon by an exported file ([`import_store`]). Blocks.
pub fn import_state_store(config: &Config, from: &Path, replace: bool) -> Result<StoreCounts, ServeError> {
    create_directories(&[&config.paths.root, &config.paths.run])?;
    // A daemon holds these locks also when its database was removed.
    let _locks = lock_directories(config, IMPORT_LOCK_LIMIT)?;
    Ok(import_store(from, &config.paths.store(), replace)?)
}

/// Returns an observer that counts commits and then calls `next`. It runs on the store's thread.
fn count_commits(counters: EventCounters, mut next: Option<CommitObserver>) -> CommitObserver {
    let mut began = Instant::now();
    Box::new(move |number, phase| {
        match phase {
            CommitPhase::Before => began = Instant::now(),
            CommitPhase::After => counters.count_commit(RequestResult::Success, began.elapsed()),
            CommitPhase::Failed => counters.count_commit(RequestResult::Failure, began.elapsed()),
        }
        next.as_mut().map_or(ControlFlow::Continue(()), |next| next(number, phase))
    })
}

/// Locks the directories in which this daemon removes unknown files. The directory of the state store needs no lock here: the
/// store has its own.
fn lock_directories(config: &Config, timeout: Duration) -> Result<Vec<PathLock>, ServeError> {
    let (run, netns) = (&config.paths.run, &config.network.netns_dir);
    let in_use = |setting, path: &Path| {
        let path = path.to_owned();
        move |source| ServeError::DirectoryInUse { setting, path, source }
    };
    let run_lock = PathLock::acquire(&run.join("lock"), timeout).map_err(in_use("paths.run", run))?;
    // Other programs have namespaces in this directory too, and would list the lock file as one.
    std::fs::create_dir_all(netns).map_err(at("create", netns))?;
    let lock_path = PathLock::path_beside(&netns.canonicalize().map_err(at("find", netns))?);
    let netns_lock = PathLock::acquire(&lock_path, timeout).map_err(in_use("network.netns_dir", netns))?;
    Ok(vec![run_lock, netns_lock])
}

/// The right to serve.
#[derive(Debug)]
pub enum ServeClaim {
    /// On the listening socket of the service manager.
    Passed(std::os::unix::net::UnixListener),
    /// On the path in the configuration.
    Own(SocketClaim),
}

/// Acquires the right to serve, before anything on the node is touched, so that a daemon that cannot serve changes nothing.
pub async fn claim(config: &Config, supervisor: &mut Supervisor) -> Result<ServeClaim, ServeError> {
    let path = config.paths.socket.clone();
    if let Some(listener) = supervisor.take_listener(&path)? {
        return Ok(ServeClaim::Passed(listener));
    }
    let claimed =
        run_blocking("claim the CRI socket", move || SocketClaim::acquire("paths.socket", &path, LOCK_LIMIT)).await;
    Ok(ServeClaim::Own(claimed??))
}

/// Repeats owed CNI DELs for as long as the daemon serves.
async fn retry_owed_deletes(node: Node) {
    loop {
        tokio::time::sleep(OWED_DELETES_PAUSE).await;
        let services = node.services();
        services.networks.retry_owed_deletes(services.teardown_timeout()).await;
    }
}

/// Releases networks without a pod at the configured interval, for as long as the daemon serves.
async fn collect_networks(node: Node) {
    let interval = node.services().config.network.gc_interval;
    while !interval.is_zero() {
        tokio::time::sleep(interval).await;
        node.collect_networks().await;
    }
}

/// Verifies the images at the configured interval, for as long as the daemon serves.
async fn verify_images(node: Node) {
    let interval = node.services().config.images.verify_interval;
    if !interval.is_zero() {
        node.services().images.verify_periodically(interval).await;
    }
}

/// Opens the image store. A killed daemon or a command may hold its lock for a moment longer.
fn open_images(config: &Config, unpack: &Path) -> Result<nacelle_image::ImageStore, ImageError> {
    let deadline = Instant::now() + LOCK_LIMIT;
    loop {
        match nacelle_image::ImageStore::open(&config.paths.images(), config.image_options(unpack)) {
            Err(ImageError::Locked { .. }) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
            other => return other,
        }
    }
}

/// Serves the node until `end`, and reports the state to the service manager. Clients may change the filter of `log`.
pub async fn serve(
    node: Node,
    supervisor: Supervisor,
    claim: ServeClaim,
    log: LogControl,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let socket = node.services().config.paths.socket.clone();
    let (streams, streaming) =
        nacelle_stream::StreamingServer::bind(&node.services().config.streaming_options()).await?;
    let (metrics_end, ended) = tokio::sync::oneshot::channel();
    let metrics = match node.services().config.metrics.address.clone() {
        Some(address) => Some(serve_metrics(address, Exporter::new(node.clone(), streams.clone()).into(), ended).await),
        None => None,
    };
    let (listener, own) = match claim {
        // The service manager's socket stays after the daemon's end: clients wait on it for the next daemon.
        ServeClaim::Passed(listener) => (UnixListener::from_std(listener).map_err(at("listen on", &socket))?, None),
        ServeClaim::Own(claim) => claim.listen().map(|(listener, own)| (listener, Some(own)))?,
    };
    tracing::info!(socket = %socket.display(), passed = own.is_none(), "serving CRI v1");
    let (shutdown_started, shutdown) = tokio::sync::oneshot::channel();
    let backend = Arc::new(NodeStreams::new(node.clone()));
    // Streams end with the daemon; the pods are not affected.
    let _streaming = AbortOnDropHandle::new(tokio::spawn(streaming.serve(backend)));
    let machine_pods: Arc<dyn PodRuntime> = Arc::new(node.clone());
    let _controllers = AbortOnDropHandle::new(tokio::spawn(controllers::run(Arc::clone(&machine_pods))));
    let _owed_deletes = AbortOnDropHandle::new(tokio::spawn(retry_owed_deletes(node.clone())));
    let _networks = AbortOnDropHandle::new(tokio::spawn(collect_networks(node.clone())));
    let _verification = AbortOnDropHandle::new(tokio::spawn(verify_images(node.clone())));
    let building = node.clone();
    let _templates = AbortOnDropHandle::new(tokio::spawn(async move { building.build_templates().await }));
    let counters = node.services().counters.clone();
    let (trace_layer, exporter) = TraceExporter::start(&node.services().config.tracing, &counters).unzip();
    let cri = Cri::new(node.clone(), streams);
    let event_node = node.clone();
    let supervisor = Arc::new(supervisor);
    let (watching, watched, watched_socket) = (Arc::clone(&supervisor), node.clone(), socket.clone());
    let watch = AbortOnDropHandle::new(tokio::spawn(async move { watching.watch(&watched_socket, &watched).await }));
    let connections = UnixListenerStream::new(listener).map(|accepted| accepted.map(GrpcConnection::new));
    let server = nacelle_proto::server::builder()
        .layer(option_layer(trace_layer))
        .layer(CountLayer(counters))
        .layer(DeadlineLayer)
        .add_service(
            RuntimeServiceServer::new(cri.clone())
                .max_encoding_message_size(MESSAGE_LIMIT)
                .max_decoding_message_size(MESSAGE_LIMIT),
        )
        .add_service(ImageServiceServer::new(cri).max_encoding_message_size(MESSAGE_LIMIT))
        .add_service(NodeServer::new(NodeService::new(node, log)))
        .add_service(MachinesServer::new(VmService::new(machine_pods)).max_encoding_message_size(MESSAGE_LIMIT))
        .serve_with_incoming_shutdown(connections, async move {
            end.await;
            drop(watch);
            supervisor.stopping();
            // Otherwise subscribers would keep their connections open, and with them this server, forever.
            event_node.services().events.close();
            event_node.stop_checkpoints();
            let _ = shutdown_started.send(());
        });
    let limit = async {
        match shutdown.await {
            Ok(()) => tokio::time::sleep(SHUTDOWN_LIMIT).await,
            Err(_dropped) => std::future::pending().await,
        }
    };
    let served = tokio::select! {
        served = server => served,
        () = limit => Ok(()),
    };
    drop(metrics_end);
    if let Some(metrics) = metrics {
        // It ends at once, and has logged what it could not do.
        let _ = metrics.await;
    }
    if let Some(exporter) = exporter {
        exporter.finish().await;
    }
    if let Some(own) = own {
        own.remove()?;
    }
    served.map_err(|source| ServeError::Serve { socket: socket.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_are_counted_by_their_result_and_passed_on() {
        let counters = EventCounters::new([]);
        let (sender, passed) = std::sync::mpsc::channel();
        let next: CommitObserver = Box::new(move |number, phase| {
            sender.send((number, phase)).unwrap();
            if phase == CommitPhase::Failed { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let mut observer = count_commits(counters.clone(), Some(next));
        let calls =
            [(1, CommitPhase::Before), (1, CommitPhase::After), (2, CommitPhase::Before), (2, CommitPhase::Failed)];
        let breaks = calls.map(|(number, phase)| observer(number, phase).is_break());
        assert_eq!(breaks, [false, false, false, true]);
        assert_eq!(passed.try_iter().collect::<Vec<_>>(), calls);
        let mut text = String::new();
        counters.encode(&mut text).unwrap();
        for line in [
            "nacelle_state_store_commits_total{result=\"success\"} 1",
            "nacelle_state_store_commits_total{result=\"failure\"} 1",
            "nacelle_state_store_commit_duration_seconds_count 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
