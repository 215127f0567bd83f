//! Implements the daemon's client for a pod process: connects to it and sends requests. A [`PodClient`] is cheap to clone,
//! holds no lock and may be used from any thread.
//!
//! [`spawn`](mod@spawn) starts the process, [`cleanup`] removes what a dead one has left.

mod changes;
mod checkpoint;
mod cleanup;
mod connection;
mod error;
mod image_files;
mod log_file;
mod spawn;
mod streams;
mod template;
mod unrecorded;

pub use changes::PodStateChanges;
pub use checkpoint::CheckpointWriters;
pub use cleanup::{clean_up, was_oom_killed};
pub use error::ClientError;
pub use log_file::{LogFileError, open_log};
pub use spawn::{LOG_FILE, spawn};
pub use streams::{Offer, RunningExec};
pub use template::build_template;
pub use unrecorded::end_unrecorded;

use self::connection::{PodConnection, Rpc};
use self::spawn::{ExitStatusWatch, exit_statuses};
use crate::identity::{self, IdentityError};
use crate::protocol::{GatedRequest, PodFeature, PodFeatureSet, PodPeer, PodProtocolError, PodRpc};
use crate::spec::PodSpec;
use crate::sys;
use hyper_util::rt::TokioIo;
use nacelle_base::jailed::{JailedDir, JailedFile};
use nacelle_base::pidfd::pidfd_signal;
use nacelle_base::task::run_blocking_or_panic;
use nacelle_model::process::ProcessIdentity;
use nacelle_proto::wire;
use nacelle_proto::{common, pod as proto};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::transport::{Endpoint, Uri};
use tonic::{Response, Status};

/// The limit for a connection to a process that runs.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The pause between two attempts to connect to a listener whose queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);
/// The limit from the end of a connection to the end of its process.
const END_LIMIT: Duration = Duration::from_secs(2);
/// The limit from SIGKILL to the end of a process.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// The maximum length of a Stats reply in bytes; the decoded message takes many times as much memory.
const MAX_STATS: usize = 512 << 10;

/// A connection to one pod process, whose identity and version are known.
///
/// A process of another major version of the protocol receives no request: it is followed by its record and stopped by a
/// signal, and every other request fails with [`PodProtocolError::OtherMajor`].
#[derive(Clone, Debug)]
pub struct PodClient {
    connection: PodConnection,
    dir: PathBuf,
    streams: JailedDir,
    identity: ProcessIdentity,
    /// Its end, if this daemon started the process.
    exit_status: Option<ExitStatusWatch>,
}

/// Connects to the process that serves this directory: exactly the one that was started, not another that has its pid.
pub async fn connect(dir: &Path) -> Result<PodClient, ClientError> {
    let not_running = || ClientError::NotRunning { dir: dir.to_owned() };
    let identity = identity::read(dir)?.ok_or_else(not_running)?;
    if !identity::is_alive(&identity)? {
        return Err(not_running());
    }
    let socket = crate::SOCKET_FILE.in_jail(&crate::jail_dir(dir));
    let jailed = crate::jailed(dir);
    let streams = jailed.clone();
    // The address is unused: the connector determines the destination.
    let endpoint = Endpoint::from_static("http://pod");
    let channel = endpoint.connect_with_connector(tower::service_fn(move |_: Uri| {
        let jailed = jailed.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(connect_to_socket(&jailed, crate::SOCKET_FILE).await?)) }
    }));
    let channel = timeout(CONNECT_LIMIT, channel)
        .await
        .map_err(|_elapsed| ClientError::Timeout { what: "reply", limit: CONNECT_LIMIT })?
        .map_err(|source| ClientError::Connect { socket, source })?;
    let exit_status = exit_statuses().get(dir).cloned();
    let opened = timeout(CONNECT_LIMIT, PodConnection::open(channel)).await;
    let opened = opened.map_err(|_elapsed| ClientError::Timeout { what: "reply", limit: CONNECT_LIMIT })?;
    let connection = match opened {
        Ok(connection) => connection,
        Err(status) => return Err(explain(dir, &identity, exit_status, status).await),
    };
    let mut client = PodClient { connection, dir: dir.to_owned(), streams, identity, exit_status };
    if client.peer().is_from_before_hello() {
        let dir = dir.to_owned();
        client.add_recorded_features(run_blocking_or_panic(move || features_of_specification(&dir)).await);
    }
    Ok(client)
}

/// Returns the features that the specification implies of a process from before Hello, which refuses specifications with fields
/// that it does not know: these two fields are newer than the features that it can have. Blocks.
fn features_of_specification(dir: &Path) -> PodFeatureSet {
    match PodSpec::read_if_present(dir) {
        Ok(Some(spec)) if spec.has_sockets || spec.template.is_some() => PodFeature::before_hello().collect(),
        _ => PodFeatureSet::BASE,
    }
}

/// Connects to a socket of a pod process.
async fn connect_to_socket(dir: &JailedDir, socket: JailedFile) -> io::Result<UnixStream> {
    let path = dir.socket(socket).map_err(io::Error::other)?;
    let missing = "the socket does not exist: the pod's run directory was removed, or the pod process is ending";
    let path = path.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, missing))?;
    connect_unix(&path.path()).await
}

/// Connects to a Unix socket of the node. A non-blocking connect fails with EAGAIN while the listener's queue is full: this
/// function then retries until the caller drops the future.
pub async fn connect_unix(path: &Path) -> io::Result<tokio::net::UnixStream> {
    loop {
        match tokio::net::UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(CONNECT_PAUSE).await,
            result => return result,
        }
    }
}

impl PodClient {
    /// Returns the reply to a request. If the connection broke because the process has ended, that end is the error.
    async fn send<T>(&self, request: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, ClientError> {
        match request.await {
            Ok(response) => Ok(response.into_inner()),
            Err(status) => Err(self.explain(status).await),
        }
    }

    /// Sends a request if the process has the features for it. If the connection broke because the process has ended, that end is
    /// the error.
    async fn call<R: GatedRequest, T, F>(
        &self,
        rpc: PodRpc,
        request: R,
        send: impl FnOnce(Rpc, R) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let sent = self.connection.gate(rpc, request, send)?;
        self.send(sent).await
    }

    /// Returns the cause of a failed request.
    async fn explain(&self, status: Status) -> ClientError {
        explain(&self.dir, &self.identity, self.exit_status.clone(), status).await
    }

    /// Returns the version and the features of the process.
    pub fn peer(&self) -> &PodPeer {
        self.connection.peer()
    }

    /// Adds features of a process from before Hello that the daemon has recorded; changes nothing for others.
    pub fn add_recorded_features(&mut self, recorded: PodFeatureSet) {
        self.connection.add_recorded_features(recorded);
    }

    /// Checks that the process would understand the whole request, before anything is prepared for it.
    ///
    /// # Errors
    /// The process has another major version, or lacks a feature that the request needs.
    pub fn check(&self, request: &impl GatedRequest) -> Result<(), ClientError> {
        Ok(self.peer().require(request.needed())?)
    }

    /// Checks that the process has these features, for what no message of the protocol shows.
    ///
    /// # Errors
    /// The process has another major version, or lacks a feature.
    pub fn require(&self, needed: impl Into<PodFeatureSet>) -> Result<(), ClientError> {
        Ok(self.peer().require(needed.into())?)
    }

    /// Returns the identity of the process.
    pub fn identity(&self) -> &ProcessIdentity {
        &self.identity
    }

    /// Sends the pod its network and waits until the guest is configured.
    pub async fn configure(&self, request: proto::ConfigureRequest) -> Result<proto::ConfigureResponse, ClientError> {
        self.call(PodRpc::Configure, request, |mut rpc, request| async move { rpc.configure(request).await }).await
    }

    /// Returns the state of the pod; answers while other requests wait. The state of an incompatible process is that of its
    /// record; if that is missing or has another format, the error says that the process is incompatible.
    pub async fn state(&self) -> Result<proto::PodState, ClientError> {
        let asked =
            self.call(PodRpc::State, common::Empty {}, |mut rpc, request| async move { rpc.state(request).await });
        match asked.await {
            Err(error @ ClientError::Protocol(PodProtocolError::OtherMajor { .. })) => {
                let record = changes::read_record(self).await.ok().flatten();
                record.map(|record| (&record).into()).ok_or(error)
            }
            answer => answer,
        }
    }

    /// Streams the state of the pod, now and after every change; the stream ends with the process.
    pub async fn watch(&self) -> Result<PodStateChanges, ClientError> {
        if !self.peer().is_compatible() {
            return Ok(PodStateChanges::of_record(self.clone()));
        }
        let watched =
            self.call(PodRpc::Watch, common::Empty {}, |mut rpc, request| async move { rpc.watch(request).await });
        Ok(PodStateChanges::of_process(watched.await?))
    }

    /// Creates a container, up to its first instruction. Opens the files of its images and sends them first, unless the request
    /// says that the pod reads them by their paths.
    pub async fn create_container(
        &self,
        request: proto::CreateContainerRequest,
    ) -> Result<common::CreateContainerResponse, ClientError> {
        self.check(&request)?;
        let offers = if request.images_by_path { Vec::new() } else { self.offer_images(&request).await? };
        let created = self.call(PodRpc::CreateContainer, request, |mut rpc, request| async move {
            rpc.create_container(request).await
        });
        let created = created.await?;
        drop(offers);
        Ok(created)
    }

    /// Starts a created container.
    pub async fn start_container(&self, id: &str) -> Result<(), ClientError> {
        self.call(PodRpc::StartContainer, container_ref(id), |mut rpc, request| async move {
            rpc.start_container(request).await
        })
        .await
        .map(drop)
    }

    /// Sends the stop signal, waits `grace`, then sends SIGKILL; returns when the container has exited.
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), ClientError> {
        let request = proto::StopContainerRequest { id: id.to_owned(), timeout_ms: millis(grace) };
        self.call(PodRpc::StopContainer, request, |mut rpc, request| async move { rpc.stop_container(request).await })
            .await
            .map(drop)
    }

    /// Kills and removes a container.
    pub async fn remove_container(&self, id: &str) -> Result<(), ClientError> {
        self.call(PodRpc::RemoveContainer, container_ref(id), |mut rpc, request| async move {
            rpc.remove_container(request).await
        })
        .await
        .map(drop)
    }

    /// Runs a command in a container to its end. A `timeout` of `None` means no limit.
    pub async fn exec_sync(
        &self,
        id: &str,
        args: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<proto::ExecSyncResponse, ClientError> {
        let timeout_ms = timeout.map_or(0, |limit| millis(limit).max(1));
        let request = proto::ExecSyncRequest { id: id.to_owned(), args, timeout_ms };
        self.call(PodRpc::ExecSync, request, |rpc, request| async move {
            rpc.max_decoding_message_size(wire::MAX_LARGE_MESSAGE).exec_sync(request).await
        })
        .await
    }

    /// Changes the limits of a container.
    pub async fn update_container(&self, request: common::UpdateContainerRequest) -> Result<(), ClientError> {
        self.call(
            PodRpc::UpdateContainer,
            request,
            |mut rpc, request| async move { rpc.update_container(request).await },
        )
        .await
        .map(drop)
    }

    /// Sets the number of vCPUs that are online.
    pub async fn set_processors(&self, count: u32) -> Result<(), ClientError> {
        self.call(PodRpc::SetProcessors, common::SetProcessorsRequest { count }, |mut rpc, request| async move {
            rpc.set_processors(request).await
        })
        .await
        .map(drop)
    }

    /// Sets how many bytes of the VM's hot-plug memory are in use; returns how many are in use then.
    pub async fn set_memory(&self, bytes: u64) -> Result<u64, ClientError> {
        let request = proto::SetMemoryRequest { bytes };
        let set =
            self.call(PodRpc::SetMemory, request, |mut rpc, request| async move { rpc.set_memory(request).await });
        Ok(set.await?.bytes)
    }

    /// Changes the size of a terminal.
    pub async fn resize(&self, request: common::ResizeRequest) -> Result<(), ClientError> {
        self.call(PodRpc::Resize, request, |mut rpc, request| async move { rpc.resize(request).await }).await.map(drop)
    }

    /// Returns the resource usage of the containers.
    pub async fn stats(&self) -> Result<proto::StatsResponse, ClientError> {
        self.call(PodRpc::Stats, common::Empty {}, |rpc, request| async move {
            rpc.max_decoding_message_size(MAX_STATS).stats(request).await
        })
        .await
    }

    /// Stops the containers and the VM; returns when the VM is gone and the state is recorded. The process ends right
    /// afterwards; [`PodClient::wait_for_exit`] waits for that. An incompatible process receives SIGTERM instead, which every
    /// version takes as this request with a grace period of its own.
    pub async fn stop(&self, grace: Duration) -> Result<(), ClientError> {
        if !self.peer().is_compatible() {
            return self.terminate();
        }
        let request = proto::StopRequest { timeout_ms: millis(grace) };
        self.call(PodRpc::Stop, request, |mut rpc, request| async move { rpc.stop(request).await }).await.map(drop)
    }

    /// Sends SIGTERM to the process, unless it has ended.
    fn terminate(&self) -> Result<(), ClientError> {
        let Some(pidfd) = identity::open(&self.identity)? else { return Ok(()) };
        match pidfd_signal(&pidfd, libc::SIGTERM) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            sent => {
                let pid = self.identity.pid;
                Ok(sent.map_err(|source| IdentityError::Process { what: "stop", pid, source })?)
            }
        }
    }

    /// Waits, up to a minute, until the process has ended.
    pub async fn wait_for_exit(&self) -> Result<(), ClientError> {
        wait_for_process(&self.identity).await
    }

    /// Waits until the process has ended.
    async fn wait_for_end(&self) -> Result<(), ClientError> {
        loop {
            match self.wait_for_exit().await {
                Err(ClientError::Timeout { .. }) => {}
                ended => return ended,
            }
        }
    }
}

/// Returns the cause of a failed request to this process.
async fn explain(
    dir: &Path,
    identity: &ProcessIdentity,
    exit_status: Option<ExitStatusWatch>,
    status: Status,
) -> ClientError {
    // The servers of Nacelle send no source with a status; tonic adds one when the connection fails.
    let is_connection = std::error::Error::source(&status).is_some();
    if is_connection && matches!(timeout(END_LIMIT, wait_for_process(identity)).await, Ok(Ok(()))) {
        return ended(dir, cleanup::describe_death(exit_status).await).await;
    }
    status.into()
}

/// Waits, up to a minute, until this process has ended.
async fn wait_for_process(identity: &ProcessIdentity) -> Result<(), ClientError> {
    let Some(pidfd) = identity::open(identity)? else { return Ok(()) };
    let failed = |source| IdentityError::Process { what: "wait for", pid: identity.pid, source };
    Ok(wait_for_exit(pidfd).await?.map_err(failed)?)
}

/// Returns the error for a request to a process that has ended like this.
async fn ended(dir: &Path, why: String) -> ClientError {
    match was_oom_killed(dir).await {
        true => ClientError::OutOfMemory { why },
        false => ClientError::Ended { why },
    }
}

/// Waits until a process has ended, which makes its pidfd readable.
async fn wait_for_exit(pidfd: OwnedFd) -> Result<io::Result<()>, ClientError> {
    let pidfd = match sys::readable(pidfd) {
        Ok(pidfd) => pidfd,
        Err(error) => return Ok(Err(error)),
    };
    let limit = Instant::now() + KILL_LIMIT;
    let readable = timeout_at(limit, pidfd.readable()).await;
    let readable = readable.map_err(|_elapsed| ClientError::Timeout { what: "end", limit: KILL_LIMIT })?;
    Ok(readable.map(drop))
}

fn container_ref(id: &str) -> common::ContainerRef {
    common::ContainerRef { id: id.to_owned() }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
