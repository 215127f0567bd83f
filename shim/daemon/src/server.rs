//! Owns: the daemon as a whole: opening its stores, bringing the node in order, serving on the socket until it is
//! told to end. Pods do not notice its end.

use crate::config::Config;
use crate::cri::Cri;
use crate::deadline::Deadlines;
use crate::lifecycle::seams::{Networks, Pods};
use crate::lifecycle::{EngineChoice, Events, Node, Parts};
use crate::node_service::NodeService;
use crate::store::{Observer, Store, StoreError};
use crate::streaming::Guests;
use crate::supervision::{SupervisionError, Supervisor};
use crate::vm_service::VmService;
use crate::vms::Vms;
use crate::{credentials, follow, power};
use nacelle_base::files::{FileError, at, remove_if_there};
use nacelle_base::{Classify, Kind};
use nacelle_image::ImageError;
use nacelle_proto::cri::image_service_server::ImageServiceServer;
use nacelle_proto::cri::runtime_service_server::RuntimeServiceServer;
use nacelle_proto::node::node_server::NodeServer;
use nacelle_proto::vm::machines_server::MachinesServer;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Server;

/// The largest answer is an ExecSync with both streams full.
const MESSAGE_LIMIT: usize = 40 << 20;
/// For requests that are under way when the daemon is told to end; what they asked for goes on without it.
const END_LIMIT: Duration = Duration::from_secs(3);

/// For the lock of the image store.
const LOCK_LIMIT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// What a daemon is made of.
pub struct Setup {
    /// The configuration.
    pub config: Config,
    /// What runs machines.
    pub engine: EngineChoice,
    /// Pod processes.
    pub pods: Arc<dyn Pods>,
    /// Networks.
    pub networks: Arc<dyn Networks>,
    /// Sees each commit of the state store.
    pub observer: Option<Observer>,
    /// What happens, for those who want to be told.
    pub events: Events,
}

/// Why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A file or folder.
    #[error(transparent)]
    File(#[from] FileError),
    /// The state store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The image store.
    #[error(transparent)]
    Images(#[from] ImageError),
    /// The streaming server.
    #[error(transparent)]
    Streaming(#[from] nacelle_stream::ServerError),
    /// What the service manager hands over.
    #[error(transparent)]
    Supervision(#[from] SupervisionError),
    /// The server.
    #[error("cannot serve on {socket}")]
    Serve {
        /// The socket.
        socket: String,
        /// Why.
        source: tonic::transport::Error,
    },
    /// A part of the start ended early, which is a defect.
    #[error("the start was given up")]
    GivenUp {
        /// Why.
        source: tokio::task::JoinError,
    },
}

impl Classify for ServeError {
    fn kind(&self) -> Kind {
        match self {
            ServeError::File(error) => error.kind(),
            ServeError::Store(error) => error.kind(),
            ServeError::Images(error) => error.kind(),
            ServeError::Streaming(error) => error.kind(),
            ServeError::Supervision(error) => error.kind(),
            ServeError::Serve { .. } | ServeError::GivenUp { .. } => Kind::Internal,
        }
    }
}

/// Opens the stores and takes over what is on the node.
pub async fn open(setup: Setup) -> Result<Node, ServeError> {
    let Setup { config, engine, pods, networks, observer, events } = setup;
    let with = config.clone();
    let opened = tokio::task::spawn_blocking(move || -> Result<_, ServeError> {
        let paths = &with.paths;
        for folder in [&paths.root, &paths.run, &paths.pods(), &paths.scratch(), &paths.images()] {
            let mut make = std::fs::DirBuilder::new();
            make.recursive(true).mode(0o700).create(folder).map_err(at("create", folder))?;
        }
        // The state store first: it keeps a second daemon out.
        let (store, contents) = Store::open(&paths.store(), observer)?;
        let images = open_images(&with)?;
        let vms = Vms::open(paths.machines(), store.clone(), contents.vms.clone())?;
        Ok((store, contents, images, vms))
    });
    let (store, contents, images, vms) = opened.await.map_err(|source| ServeError::GivenUp { source })??;
    let parts = Parts { config, engine, store, images, vms, pods, networks, cidrs: RwLock::new(Vec::new()), events };
    Ok(Node::recover(parts, contents).await)
}

/// Opens the image store; a daemon that was killed, or a command, may hold it for a moment longer.
fn open_images(config: &Config) -> Result<nacelle_image::Store, ImageError> {
    let deadline = Instant::now() + LOCK_LIMIT;
    loop {
        match nacelle_image::Store::open(&config.paths.images(), config.image_options()) {
            Err(ImageError::Locked { .. }) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
            other => return other,
        }
    }
}

/// Serves the node until `end`, and tells whoever started the daemon.
pub async fn serve(
    node: Node,
    mut supervisor: Supervisor,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let socket = node.parts().config.paths.socket.clone();
    let handed = supervisor.take_listener(&socket)?;
    // A socket of the manager's stays when the daemon ends: clients wait there for the next one.
    let own = handed.is_none();
    let listener = match handed {
        Some(listener) => UnixListener::from_std(listener).map_err(at("listen on", &socket))?,
        None => listen(&socket)?,
    };
    tracing::info!(socket = %socket.display(), handed_over = !own, "serving CRI v1");
    let (ending, ended) = tokio::sync::oneshot::channel();
    let (streams, streaming) = nacelle_stream::Server::bind(&node.parts().config.streaming_options()).await?;
    let guests = Arc::new(Guests::new(node.clone()));
    // Streams end with the daemon; the pods do not notice.
    let _streaming = AbortOnDropHandle::new(tokio::spawn(streaming.serve(guests)));
    let _power = AbortOnDropHandle::new(tokio::spawn(follow::all::<power::Annotation>(node.clone())));
    let _credentials = AbortOnDropHandle::new(tokio::spawn(follow::all::<credentials::Secrets>(node.clone())));
    let cri = Cri::new(node.clone(), streams);
    let events_of = node.clone();
    let supervisor = Arc::new(supervisor);
    let (watching, watched, watched_socket) = (Arc::clone(&supervisor), node.clone(), socket.clone());
    let watch = AbortOnDropHandle::new(tokio::spawn(async move { watching.watch(&watched_socket, &watched).await }));
    let server = Server::builder()
        .layer(Deadlines)
        .add_service(
            RuntimeServiceServer::new(cri.clone())
                .max_encoding_message_size(MESSAGE_LIMIT)
                .max_decoding_message_size(MESSAGE_LIMIT),
        )
        .add_service(ImageServiceServer::new(cri).max_encoding_message_size(MESSAGE_LIMIT))
        .add_service(NodeServer::new(NodeService::new(node.clone())))
        .add_service(MachinesServer::new(VmService::new(node)).max_encoding_message_size(MESSAGE_LIMIT))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), async move {
            end.await;
            drop(watch);
            supervisor.stopping();
            // Subscribers would keep their connections, and with them this server, for ever.
            events_of.parts().events.close();
            let _ = ending.send(());
        });
    let limit = async {
        match ended.await {
            Ok(()) => tokio::time::sleep(END_LIMIT).await,
            Err(_dropped) => std::future::pending().await,
        }
    };
    let served = tokio::select! {
        served = server => served,
        () = limit => Ok(()),
    };
    if own {
        remove_if_there(&socket)?;
    }
    served.map_err(|source| ServeError::Serve { socket: socket.display().to_string(), source })
}

/// Listens on the socket, which only root may open from its first moment on. The store has kept a second daemon
/// out, so what stands there is a leftover.
fn listen(socket: &Path) -> Result<UnixListener, FileError> {
    let folder = socket.parent().unwrap_or(Path::new("/"));
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(at("create", folder))?;
    let new = folder.join(format!(".n{}", std::process::id()));
    remove_if_there(&new)?;
    let listener = UnixListener::bind(&new).map_err(at("listen on", &new))?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).map_err(at("set the mode of", &new))?;
    std::fs::rename(&new, socket).map_err(at("name", socket))?;
    Ok(listener)
}
