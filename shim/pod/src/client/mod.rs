//! Implements the daemon's client for a pod process: connects to it and sends requests. A [`PodClient`] is cheap to clone,
//! holds no lock and may be used from any thread.
//!
//! [`spawn`](mod@spawn) starts the process, [`cleanup`] removes what a dead one has left.

mod cleanup;
mod error;
mod image_files;
mod log_file;
mod spawn;
mod streams;
mod template;
mod unrecorded;

pub use cleanup::{clean_up, was_oom_killed};
pub use error::ClientError;
pub use log_file::open_log;
pub use spawn::{LOG_FILE, spawn};
pub use streams::{Offer, RunningExec};
pub use template::build_template;
pub use unrecorded::end_unrecorded;

use self::spawn::{ExitStatusWatch, exit_statuses};
use crate::identity::{self, IdentityError};
use crate::sys;
use hyper_util::rt::TokioIo;
use nacelle_base::jailed::{JailedDir, JailedFile};
use nacelle_model::process::ProcessIdentity;
use nacelle_proto::wire;
use nacelle_proto::{common, pod as proto};
use proto::pod_client::PodClient as Rpc;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::transport::{Channel, Endpoint, Uri};
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

/// A connection to one pod process, whose identity has been checked.
#[derive(Clone, Debug)]
pub struct PodClient {
    rpc: Rpc<Channel>,
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
    let rpc = Rpc::new(channel)
        .max_decoding_message_size(wire::MAX_MESSAGE)
        .max_encoding_message_size(wire::MAX_LARGE_MESSAGE);
    let exit_status = exit_statuses().get(dir).cloned();
    Ok(PodClient { rpc, dir: dir.to_owned(), streams, identity, exit_status })
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

    /// Returns the cause of a failed request.
    async fn explain(&self, status: Status) -> ClientError {
        // The servers of Nacelle send no source with a status; tonic adds one when the connection fails.
        let is_connection = std::error::Error::source(&status).is_some();
        if is_connection && matches!(timeout(END_LIMIT, self.wait_for_exit()).await, Ok(Ok(()))) {
            return ended(&self.dir, cleanup::describe_death(self.exit_status.clone()).await).await;
        }
        status.into()
    }

    /// Returns the identity of the process.
    pub fn identity(&self) -> &ProcessIdentity {
        &self.identity
    }

    /// Sends the pod its network and waits until the guest is configured.
    pub async fn configure(&self, request: proto::ConfigureRequest) -> Result<proto::ConfigureResponse, ClientError> {
        self.send(self.rpc.clone().configure(request)).await
    }

    /// Returns the state of the pod; answers while other requests wait.
    pub async fn state(&self) -> Result<proto::PodState, ClientError> {
        self.send(self.rpc.clone().state(common::Empty {})).await
    }

    /// Streams the state of the pod, now and after every change; the stream ends with the process.
    pub async fn watch(&self) -> Result<tonic::Streaming<proto::PodState>, ClientError> {
        self.send(self.rpc.clone().watch(common::Empty {})).await
    }

    /// Creates a container, up to its first instruction. Opens the files of its images and sends them first, unless the request
    /// says that the pod reads them by their paths.
    pub async fn create_container(
        &self,
        request: proto::CreateContainerRequest,
    ) -> Result<common::CreateContainerResponse, ClientError> {
        let offers = if request.images_by_path { Vec::new() } else { self.offer_images(&request).await? };
        let created = self.send(self.rpc.clone().create_container(request)).await?;
        drop(offers);
        Ok(created)
    }

    /// Starts a created container.
    pub async fn start_container(&self, id: &str) -> Result<(), ClientError> {
        self.send(self.rpc.clone().start_container(container_ref(id))).await.map(drop)
    }

    /// Sends the stop signal, waits `grace`, then sends SIGKILL; returns when the container has exited.
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), ClientError> {
        let request = proto::StopContainerRequest { id: id.to_owned(), timeout_ms: millis(grace) };
        self.send(self.rpc.clone().stop_container(request)).await.map(drop)
    }

    /// Kills and removes a container.
    pub async fn remove_container(&self, id: &str) -> Result<(), ClientError> {
        self.send(self.rpc.clone().remove_container(container_ref(id))).await.map(drop)
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
        let mut rpc = self.rpc.clone().max_decoding_message_size(wire::MAX_LARGE_MESSAGE);
        self.send(rpc.exec_sync(request)).await
    }

    /// Changes the limits of a container.
    pub async fn update_container(&self, request: common::UpdateContainerRequest) -> Result<(), ClientError> {
        self.send(self.rpc.clone().update_container(request)).await.map(drop)
    }

    /// Sets the number of vCPUs that are online.
    pub async fn set_processors(&self, count: u32) -> Result<(), ClientError> {
        self.send(self.rpc.clone().set_processors(common::SetProcessorsRequest { count })).await.map(drop)
    }

    /// Sets how many bytes of the VM's hot-plug memory are in use; returns how many are in use then.
    pub async fn set_memory(&self, bytes: u64) -> Result<u64, ClientError> {
        Ok(self.send(self.rpc.clone().set_memory(proto::SetMemoryRequest { bytes })).await?.bytes)
    }

    /// Changes the size of a terminal.
    pub async fn resize(&self, request: common::ResizeRequest) -> Result<(), ClientError> {
        self.send(self.rpc.clone().resize(request)).await.map(drop)
    }

    /// Returns the resource usage of the containers.
    pub async fn stats(&self) -> Result<proto::StatsResponse, ClientError> {
        let mut rpc = self.rpc.clone().max_decoding_message_size(MAX_STATS);
        self.send(rpc.stats(common::Empty {})).await
    }

    /// Stops the containers and the VM; returns when the VM is gone and the state is recorded. The process ends right
    /// afterwards; [`PodClient::wait_for_exit`] waits for that.
    pub async fn stop(&self, grace: Duration) -> Result<(), ClientError> {
        self.send(self.rpc.clone().stop(proto::StopRequest { timeout_ms: millis(grace) })).await.map(drop)
    }

    /// Waits, up to a minute, until the process has ended.
    pub async fn wait_for_exit(&self) -> Result<(), ClientError> {
        let Some(pidfd) = identity::open(&self.identity)? else { return Ok(()) };
        let pid = self.identity.pid;
        let failed = |source| IdentityError::Process { what: "wait for", pid, source };
        Ok(wait_for_exit(pidfd).await?.map_err(failed)?)
    }
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
