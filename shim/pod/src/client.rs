//! Implements the daemon's side of a pod process: starts it, finds it again after a restart of the daemon, sends requests,
//! and cleans up after a dead one. A [`PodClient`] is cheap to clone, holds no lock and may be used from any thread.

use crate::error::{PodError, printable};
use crate::identity::{self, IdentityError};
use crate::record::{self, PodRecord, RecordError};
use crate::spec::{PodSpec, SpecError};
use crate::{agent, codes, share, sys};
use hyper_util::rt::TokioIo;
use nacelle_base::descriptors::send_with_descriptor;
use nacelle_base::files::{FileError, at, remove_tree_if_there};
use nacelle_base::jailed::{JailedDir, JailedFile};
use nacelle_base::pidfd::pidfd_signal;
use nacelle_base::task::run_blocking_or_panic;
use nacelle_base::{Chain, Classify, Kind};
use nacelle_model::process::{PodProcess, ProcessIdentity};
use nacelle_proto::wire;
use nacelle_proto::{common, pod as proto};
use proto::pod_client::PodClient as Rpc;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::transport::{Channel, Endpoint, Uri};

/// The log of the process itself: its standard output and error. The daemon opens it, in its own part of the run directory.
pub const LOG_FILE: &str = "pod.log";

/// The limit from the start of the process to its first reply. The process listens before it starts the VM.
const START_LIMIT: Duration = Duration::from_secs(60);
/// The limit for a connection to a process that runs.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The pause between two attempts to connect to a listener whose queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);
/// The limit from SIGKILL to the end of a process.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// The limit from the end of a process until it is reaped.
const REAP_LIMIT: Duration = Duration::from_secs(5);
/// The maximum length of a Stats reply in bytes; the decoded message takes many times as much memory.
const MAX_STATS: usize = 512 << 10;
/// The maximum number of characters of an error of the process that are passed on. The process is the nearest to the guest
/// and the least trusted.
const MAX_TEXT: usize = 4096;

/// A pod process could not be started, found or used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The pod's specification is invalid.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The identity of the pod process is unknown.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The record of the pod process cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A file in the run directory cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The program could not be started.
    #[error("cannot start the pod process {}", exe.display())]
    Start {
        /// The path of the program.
        exe: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process could not be moved into its cgroup.
    #[error("the pod process cannot be put into the control group {}", group.display())]
    Group {
        /// The cgroup's path.
        group: PathBuf,
        /// The kind of the failure.
        kind: Kind,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The daemon could not record the process, so it must not begin.
    #[error("the pod process {pid} cannot be recorded")]
    Unrecorded {
        /// The pid of the process.
        pid: i32,
        /// The kind of the failure.
        kind: Kind,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The process ended before its first reply.
    #[error("the pod process ended with {status} before it answered; its log {} ends with: {tail}", log.display())]
    EndedAtOnce {
        /// The exit status.
        status: ExitStatus,
        /// The log file of the process.
        log: PathBuf,
        /// The last lines of the log.
        tail: String,
    },
    /// No process serves this run directory.
    #[error("no pod process serves {}", dir.display())]
    Gone {
        /// The run directory.
        dir: PathBuf,
    },
    /// The process runs, but its socket does not accept a connection.
    #[error("cannot connect to the pod process through {}", socket.display())]
    Connect {
        /// The path of the socket.
        socket: PathBuf,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// A stream of the process cannot be opened.
    #[error("cannot open a stream of the pod process {pod}")]
    Stream {
        /// The pid of the pod process.
        pod: i32,
        /// The cause.
        source: Box<PodError>,
    },
    /// The process exceeded a time limit.
    #[error("the pod process did not {what} within {limit:?}")]
    TooSlow {
        /// "answer", "end".
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The process replied with an error, whose text is not trusted.
    #[error("{message}")]
    Refused {
        /// The kind of the failure.
        kind: Kind,
        /// The error message of the process.
        message: String,
    },
}

impl Classify for ClientError {
    fn kind(&self) -> Kind {
        match self {
            ClientError::Spec(error) => error.kind(),
            ClientError::Identity(error) => error.kind(),
            ClientError::Record(error) => error.kind(),
            ClientError::File(error) => error.kind(),
            ClientError::Start { .. } | ClientError::EndedAtOnce { .. } => Kind::Internal,
            ClientError::Gone { .. } | ClientError::Connect { .. } => Kind::Unavailable,
            ClientError::Stream { source, .. } => source.kind(),
            ClientError::TooSlow { .. } => Kind::Timeout,
            ClientError::Group { kind, .. }
            | ClientError::Unrecorded { kind, .. }
            | ClientError::Refused { kind, .. } => *kind,
        }
    }
}

impl From<tonic::Status> for ClientError {
    fn from(status: tonic::Status) -> Self {
        ClientError::Refused { kind: codes::kind(&status), message: printable(status.message(), MAX_TEXT) }
    }
}

/// A connection to one pod process, whose identity has been checked.
#[derive(Clone, Debug)]
pub struct PodClient {
    rpc: Rpc<Channel>,
    streams: JailedDir,
    identity: ProcessIdentity,
}

/// Starts `EXE --dir DIR` with this specification and waits for its first reply. The process has its own session, inherits
/// no descriptors, logs to `DIR/pod.log`, and outlives the caller. It does nothing before `admit` has returned, which
/// receives the identity by which the process is found again. After a failure no process runs. If the future is dropped
/// before `admit` has returned, the process ends by itself; a caller that drops it later must call [`clean_up`].
pub async fn spawn<F>(
    exe: &Path,
    dir: &Path,
    spec: &PodSpec,
    admit: impl FnOnce(PodProcess) -> F,
) -> Result<PodClient, ClientError>
where
    F: Future<Output = Result<(), ClientError>>,
{
    let (program, own_dir, own_spec) = (exe.to_owned(), dir.to_owned(), spec.clone());
    // Both steps run to their end on the blocking pool even if this future is dropped, so that the run directory names every process.
    let start_and_record =
        move || start(&program, &own_dir, &own_spec).map(|child| (record_process(&child, &own_dir), child));
    let (recorded, mut child) = run_blocking_or_panic(start_and_record).await?;
    let admitted = match recorded {
        Ok(Some(identity)) => admit(pod_process(identity, spec)).await,
        // The process has ended already; `answer` reports that.
        Ok(None) => Ok(()),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = admitted {
        kill(child).await;
        return Err(error);
    }
    if let Some(mut word) = child.stdin.take() {
        // If the process is gone, `answer` reports that.
        let _ = word.write_all(b"\n").await;
    }
    answer(child, dir).await
}

/// Starts the process, which waits for a byte on its standard input. Blocks for a few file operations.
fn start(exe: &Path, dir: &Path, spec: &PodSpec) -> Result<Child, ClientError> {
    spec.write(dir)?;
    crate::make_jail(dir)?;
    let log_path = dir.join(LOG_FILE);
    let log =
        OpenOptions::new().append(true).create(true).mode(0o600).open(&log_path).map_err(at("open", &log_path))?;
    let errors = log.try_clone().map_err(at("open", &log_path))?;
    let mut command = Command::new(exe);
    command.arg("--dir").arg(dir).current_dir("/");
    command.stdin(Stdio::piped()).stdout(log).stderr(errors);
    sys::detach(&mut command);
    command.spawn().map_err(|source| ClientError::Start { exe: exe.to_owned(), source })
}

/// Records in the run directory which process serves it, so that a later cleanup finds the process. Returns `None` when the
/// child has been reaped. Blocks for a few file operations.
fn record_process(child: &Child, dir: &Path) -> Result<Option<ProcessIdentity>, IdentityError> {
    let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) else { return Ok(None) };
    let identity = identity::of(pid)?;
    identity::write(&identity, dir)?;
    Ok(Some(identity))
}

/// Waits for the first reply of the process.
async fn answer(mut child: Child, dir: &Path) -> Result<PodClient, ClientError> {
    let log_path = dir.join(LOG_FILE);
    let deadline = Instant::now() + START_LIMIT;
    let failure = loop {
        match connect(dir).await {
            Ok(client) if Some(client.identity.pid) == child.id().and_then(|pid| pid.try_into().ok()) => {
                // This task alone reaps the process while this daemon lives; afterwards init does.
                let (tell, told) = watch::channel(None);
                ends().insert(dir.to_owned(), told);
                tokio::spawn(async move { tell.send_replace(child.wait().await.ok()) });
                return Ok(client);
            }
            Ok(_) | Err(ClientError::Gone { .. } | ClientError::Connect { .. }) => {}
            Err(error) => break error,
        }
        if let Ok(Some(status)) = child.try_wait() {
            let tail = tail(dir).unwrap_or_default();
            return Err(ClientError::EndedAtOnce { status, log: log_path, tail });
        }
        if Instant::now() >= deadline {
            break ClientError::TooSlow { what: "answer", limit: START_LIMIT };
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    kill(child).await;
    Err(failure)
}

type End = watch::Receiver<Option<ExitStatus>>;

/// The exit statuses of the processes that this daemon started, by run directory, until they are cleaned up.
fn ends() -> MutexGuard<'static, BTreeMap<PathBuf, End>> {
    static ENDS: Mutex<BTreeMap<PathBuf, End>> = Mutex::new(BTreeMap::new());
    ENDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Describes how a pod process died, as far as that is known.
async fn why(end: Option<End>) -> String {
    let status = match end {
        // The process is gone; the task that reaps it is about to report.
        Some(mut end) => timeout(REAP_LIMIT, end.wait_for(Option::is_some)).await.ok().and_then(|s| *s.ok()?),
        None => None,
    };
    match status.and_then(|status| status.signal()) {
        Some(libc::SIGSYS) => "the pod process died of a system call that its filter forbids".to_owned(),
        Some(signal) => format!("the pod process died of signal {signal}"),
        None => "the pod process died".to_owned(),
    }
}

/// Kills a child. The child is not reaped yet, so its pid is not reused.
async fn kill(mut child: Child) {
    if let Err(error) = child.kill().await {
        tracing::error!(%error, "cannot kill a pod process that did not start");
    }
}

/// Connects to the process that serves this directory: exactly the one that was started, not another that has its pid.
pub async fn connect(dir: &Path) -> Result<PodClient, ClientError> {
    let gone = || ClientError::Gone { dir: dir.to_owned() };
    let identity = identity::read(dir)?.ok_or_else(gone)?;
    if !identity::is_alive(&identity)? {
        return Err(gone());
    }
    let socket = crate::SOCKET_FILE.in_jail(&crate::jail_dir(dir));
    let jailed = crate::jailed(dir);
    let streams = jailed.clone();
    // The address is unused: the connector determines the destination.
    let endpoint = Endpoint::from_static("http://pod");
    let channel = endpoint.connect_with_connector(tower::service_fn(move |_: Uri| {
        let jailed = jailed.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(connect_to(&jailed, crate::SOCKET_FILE).await?)) }
    }));
    let channel = timeout(CONNECT_LIMIT, channel)
        .await
        .map_err(|_elapsed| ClientError::TooSlow { what: "answer", limit: CONNECT_LIMIT })?
        .map_err(|source| ClientError::Connect { socket, source })?;
    let rpc = Rpc::new(channel).max_decoding_message_size(wire::MESSAGE).max_encoding_message_size(wire::LARGE);
    Ok(PodClient { rpc, streams, identity })
}

/// Returns the identity of the pod process and the resources that this specification gives it.
fn pod_process(identity: ProcessIdentity, spec: &PodSpec) -> PodProcess {
    let cgroup = spec.jail.as_ref().and_then(|jail| jail.cgroup.clone());
    PodProcess { identity, cgroup, scratch: spec.scratch_file() }
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

/// Kills what remains of a pod process and returns its last record, with every container that still lived marked as lost.
/// Kills exactly the process that was started, if it still runs, and the processes in its cgroup; both are known from the
/// store (`stored`) and from the daemon's part of the run directory, either of which may be missing. Nothing that the
/// process has written decides what is killed or removed. The call may be repeated. Returns `None` if the process recorded
/// nothing usable.
pub async fn clean_up(dir: &Path, stored: Option<&PodProcess>) -> Result<Option<PodRecord>, ClientError> {
    let end = ends().get(dir).cloned();
    let from = dir.to_owned();
    let (spec, noted) = run_blocking_or_panic(move || (noted_spec(&from), noted_processes(&from))).await;
    let [server, of_share] = noted;
    let mut ended = Ok(());
    for identity in distinct([stored.map(|stored| stored.identity.clone()), server, of_share]) {
        ended = ended.and(kill_exactly(&identity).await);
    }
    ended?;
    let group = spec.as_ref().and_then(|spec| spec.jail.as_ref()?.cgroup.clone());
    let mut killed = false;
    // From here on each step is tried whether or not the earlier ones failed. After a failure the caller repeats the whole cleanup.
    let mut first = Ok(());
    for group in distinct([stored.and_then(|stored| stored.cgroup.clone()), group]) {
        // Other processes in the cgroup may still be exiting, or run on.
        let remove = move || (nacelle_jail::cgroup::oom_kills(&group) > 0, nacelle_jail::cgroup::remove(&group));
        let (memory, removed) = run_blocking_or_panic(remove).await;
        killed |= memory;
        first = first.and(removed);
    }
    // No process writes there any more. A scratch disk has a name only until the VM has opened it.
    let scratch = spec.as_ref().map(PodSpec::scratch_file);
    for scratch in distinct([stored.map(|stored| stored.scratch.clone()), scratch]) {
        first = first.and(run_blocking_or_panic(move || remove_tree_if_there(&scratch)).await);
    }
    let from = dir.to_owned();
    // The sockets are those of the pod process and of its virtio devices.
    let (removed, mut last) =
        run_blocking_or_panic(move || (crate::jailed(&from).remove_sockets(), last_words(&from))).await;
    if let Err(error) = removed {
        // They are removed with the directory. The process may have created more entries than are read.
        tracing::warn!(dir = %dir.display(), "sockets stay until the run directory is removed: {}", Chain(&error));
    }
    if let Some(last) = &mut last {
        let before = last.clone();
        last.lose(&why(end).await, crate::now_nanos());
        if *last != before {
            if killed {
                last.blame_memory();
            }
            let (record, of) = (last.clone(), dir.to_owned());
            if let Err(error) = run_blocking_or_panic(move || record.keep(&of)).await {
                // The caller has the record. A full file system is freed when the directory is removed.
                tracing::warn!(dir = %dir.display(), "how the pod ended is not written down: {}", Chain(&error));
            }
        }
    }
    first?;
    ends().remove(dir);
    Ok(last)
}

/// Returns the specification with which the pod process was started, or `None` if no process was. A specification of
/// another version must not prevent the cleanup of what the store names. Blocks.
fn noted_spec(dir: &Path) -> Option<PodSpec> {
    PodSpec::read_if_there(dir).unwrap_or_else(|error| {
        tracing::error!(dir = %dir.display(), "what the pod process was started with is unknown: {}", Chain(&error));
        None
    })
}

/// Returns the processes that the run directory names: the pod process and its file-server process. If one of the files
/// cannot be read, the process that the other names must still be killed. Blocks.
fn noted_processes(dir: &Path) -> [Option<ProcessIdentity>; 2] {
    [identity::read(dir), share::identity(dir)].map(|read| {
        read.unwrap_or_else(|error| {
            tracing::error!(dir = %dir.display(), "a process of the pod is unknown: {}", Chain(&error));
            None
        })
    })
}

/// Returns the daemon's own record of the pod's end if there is one, otherwise the last record of the pod process. That
/// record is untrusted: an unusable one must not prevent the cleanup.
fn last_words(dir: &Path) -> Option<PodRecord> {
    let usable = |read: Result<Option<PodRecord>, RecordError>| {
        read.unwrap_or_else(|error| {
            tracing::warn!(dir = %dir.display(), "the last record of a pod is unusable: {}", Chain(&error));
            None
        })
    };
    usable(record::kept(dir)).or_else(|| usable(record::read(dir)))
}

/// Kills this process, if it still runs, and waits for its end.
async fn kill_exactly(identity: &ProcessIdentity) -> Result<(), ClientError> {
    let Some(pidfd) = identity::open(identity)? else { return Ok(()) };
    let failed = |what| move |source| IdentityError::Process { what, pid: identity.pid, source };
    match pidfd_signal(&pidfd, libc::SIGKILL) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
        sent => sent.map_err(failed("kill"))?,
    }
    Ok(ended(pidfd).await?.map_err(failed("wait for"))?)
}

/// Returns the values that are present, without duplicates.
fn distinct<T: PartialEq, const N: usize>(all: [Option<T>; N]) -> Vec<T> {
    let mut found = Vec::with_capacity(N);
    for one in all.into_iter().flatten() {
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

/// Returns whether the node's OOM killer has killed a process of the pod of this run directory.
pub async fn out_of_memory(dir: &Path) -> bool {
    let group = PodSpec::read(dir).ok().and_then(|spec| spec.jail?.cgroup);
    let Some(group) = group else { return false };
    run_blocking_or_panic(move || nacelle_jail::cgroup::oom_kills(&group)).await > 0
}

/// Waits until a process has ended, which makes its pidfd readable.
async fn ended(pidfd: OwnedFd) -> Result<io::Result<()>, ClientError> {
    let pidfd = match sys::readable(pidfd) {
        Ok(pidfd) => pidfd,
        Err(error) => return Ok(Err(error)),
    };
    let limit = Instant::now() + KILL_LIMIT;
    let readable = timeout_at(limit, pidfd.readable()).await;
    let readable = readable.map_err(|_elapsed| ClientError::TooSlow { what: "end", limit: KILL_LIMIT })?;
    Ok(readable.map(drop))
}

/// Returns the last lines of the process's log, joined to one line.
fn tail(dir: &Path) -> Option<String> {
    // The daemon owns the file, but its content and length are under the control of the process.
    let bytes = JailedDir::new(dir).tail(LOG_FILE, 2048).ok()??;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Some(lines.get(lines.len().saturating_sub(5)..).unwrap_or_default().join(" | "))
}

/// Connects to a socket of a pod process.
async fn connect_to(dir: &JailedDir, socket: JailedFile) -> io::Result<UnixStream> {
    let found = dir.socket(socket).map_err(io::Error::other)?;
    let gone = "there is no socket: the pod's run directory was removed, or the pod process is about to end";
    let found = found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, gone))?;
    connect_unix(&found.path()).await
}

impl PodClient {
    /// Returns the identity of the process.
    pub fn identity(&self) -> &ProcessIdentity {
        &self.identity
    }

    /// Sends the pod its network and waits until the guest is configured.
    pub async fn configure(&self, request: proto::ConfigureRequest) -> Result<proto::ConfigureResponse, ClientError> {
        Ok(self.rpc.clone().configure(request).await?.into_inner())
    }

    /// Returns the state of the pod; answers while other requests wait.
    pub async fn state(&self) -> Result<proto::PodState, ClientError> {
        Ok(self.rpc.clone().state(common::Empty {}).await?.into_inner())
    }

    /// Streams the state of the pod, now and after every change; the stream ends with the process.
    pub async fn watch(&self) -> Result<tonic::Streaming<proto::PodState>, ClientError> {
        Ok(self.rpc.clone().watch(common::Empty {}).await?.into_inner())
    }

    /// Creates a container, up to its first instruction.
    pub async fn create_container(
        &self,
        request: proto::CreateContainerRequest,
    ) -> Result<common::CreateContainerResponse, ClientError> {
        Ok(self.rpc.clone().create_container(request).await?.into_inner())
    }

    /// Starts a created container.
    pub async fn start_container(&self, id: &str) -> Result<(), ClientError> {
        self.rpc.clone().start_container(reference(id)).await?;
        Ok(())
    }

    /// Sends the stop signal, waits `grace`, then sends SIGKILL; returns when the container has exited.
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), ClientError> {
        let request = proto::StopContainerRequest { id: id.to_owned(), timeout_ms: millis(grace) };
        self.rpc.clone().stop_container(request).await?;
        Ok(())
    }

    /// Kills and removes a container.
    pub async fn remove_container(&self, id: &str) -> Result<(), ClientError> {
        self.rpc.clone().remove_container(reference(id)).await?;
        Ok(())
    }

    /// Closes the container's log file and opens the file that has its name now.
    pub async fn reopen_log(&self, id: &str) -> Result<(), ClientError> {
        self.rpc.clone().reopen_log(reference(id)).await?;
        Ok(())
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
        let mut rpc = self.rpc.clone().max_decoding_message_size(wire::LARGE);
        Ok(rpc.exec_sync(request).await?.into_inner())
    }

    /// Starts a command in a container; [`PodClient::open_stream`] opens its streams.
    pub async fn exec(&self, request: proto::ExecRequest) -> Result<Exec, ClientError> {
        let mut events = self.rpc.clone().exec(request).await?.into_inner();
        match events.message().await?.and_then(|event| event.event) {
            Some(proto::exec_event::Event::Began(exec_id)) => Ok(Exec { exec_id, events }),
            _ => Err(silent()),
        }
    }

    /// Changes the limits of a container.
    pub async fn update_container(&self, request: common::UpdateContainerRequest) -> Result<(), ClientError> {
        self.rpc.clone().update_container(request).await?;
        Ok(())
    }

    /// Sets the number of vCPUs that are online.
    pub async fn set_processors(&self, count: u32) -> Result<(), ClientError> {
        self.rpc.clone().set_processors(common::SetProcessorsRequest { count }).await?;
        Ok(())
    }

    /// Sets how many bytes of the VM's memory reserve are in use; returns how many are in use then.
    pub async fn set_memory(&self, bytes: u64) -> Result<u64, ClientError> {
        Ok(self.rpc.clone().set_memory(proto::SetMemoryRequest { bytes }).await?.into_inner().bytes)
    }

    /// Changes the size of a terminal.
    pub async fn resize(&self, request: common::ResizeRequest) -> Result<(), ClientError> {
        self.rpc.clone().resize(request).await?;
        Ok(())
    }

    /// Returns the resource usage of the containers.
    pub async fn stats(&self) -> Result<proto::StatsResponse, ClientError> {
        let mut rpc = self.rpc.clone().max_decoding_message_size(MAX_STATS);
        Ok(rpc.stats(common::Empty {}).await?.into_inner())
    }

    /// Offers an open block device of the node for a container that will be created and will have it at `path`. The offer
    /// is withdrawn when the result is dropped before that.
    pub async fn offer(&self, id: &str, path: &str, device: OwnedFd) -> Result<Offer, ClientError> {
        let (id, stream) = (id.to_owned(), common::Stream::Device.into());
        let open = proto::StreamOpen { id, stream, device: path.to_owned(), ..Default::default() };
        Ok(Offer { _stream: self.open(open, Some(device)).await? })
    }

    /// Opens a stream of bytes of unlimited length, to or from a process.
    pub async fn open_stream(&self, open: proto::StreamOpen) -> Result<UnixStream, ClientError> {
        self.open(open, None).await
    }

    async fn open(&self, open: proto::StreamOpen, device: Option<OwnedFd>) -> Result<UnixStream, ClientError> {
        let failed = |source| ClientError::Stream { pod: self.identity.pid, source: Box::new(source) };
        let connected = timeout(CONNECT_LIMIT, connect_to(&self.streams, crate::STREAM_SOCKET_FILE)).await;
        let connected = connected.map_err(|_elapsed| ClientError::TooSlow { what: "answer", limit: CONNECT_LIMIT })?;
        let connected = connected.map_err(|source| PodError::Stream { what: "connect", source });
        let mut stream = connected.map_err(failed)?;
        agent::write_frame(&mut stream, &open, CONNECT_LIMIT).await.map_err(failed)?;
        if let Some(device) = device {
            let sent = stream.async_io(Interest::WRITABLE, || send_with_descriptor(&stream, &[0], &device));
            let sent = timeout(CONNECT_LIMIT, sent).await;
            let sent = sent.map_err(|_elapsed| ClientError::TooSlow { what: "take a device", limit: CONNECT_LIMIT })?;
            sent.map_err(|source| failed(PodError::Stream { what: "hand a device over", source }))?;
        }
        // The process forwards the request to the guest, which may be slow.
        let opened = agent::read_frame(&mut stream, "answer to a stream", START_LIMIT).await.map_err(failed)?;
        match opened {
            proto::StreamOpened { code: 0, .. } => Ok(stream),
            proto::StreamOpened { code, message } => {
                Err(ClientError::Refused { kind: Kind::from_grpc_code(code), message: printable(&message, MAX_TEXT) })
            }
        }
    }

    /// Stops the containers and the VM; returns when the VM is gone and the state is recorded. The process ends right
    /// afterwards; [`PodClient::ended`] waits for that.
    pub async fn stop(&self, grace: Duration) -> Result<(), ClientError> {
        self.rpc.clone().stop(proto::StopRequest { timeout_ms: millis(grace) }).await?;
        Ok(())
    }

    /// Waits, up to a minute, until the process has ended.
    pub async fn ended(&self) -> Result<(), ClientError> {
        let Some(pidfd) = identity::open(&self.identity)? else { return Ok(()) };
        let pid = self.identity.pid;
        let failed = |source| IdentityError::Process { what: "wait for", pid, source };
        Ok(ended(pidfd).await?.map_err(failed)?)
    }
}

/// A block device that was offered. Dropping it withdraws the device, unless a container uses it.
#[derive(Debug)]
pub struct Offer {
    _stream: UnixStream,
}

/// A running command. Dropping this value kills the command.
#[derive(Debug)]
pub struct Exec {
    /// The id of the exec in its container.
    pub exec_id: String,
    events: tonic::Streaming<proto::ExecEvent>,
}

impl Exec {
    /// Waits for the end of the command; returns its exit code.
    pub async fn end(mut self) -> Result<u32, ClientError> {
        match self.events.message().await?.and_then(|event| event.event) {
            Some(proto::exec_event::Event::Ended(code)) => Ok(code),
            _ => Err(silent()),
        }
    }
}

/// Returns the error for a pod process that ended a response stream early.
fn silent() -> ClientError {
    ClientError::Refused { kind: Kind::Unavailable, message: "the pod process ended its answer early".to_owned() }
}

fn reference(id: &str) -> common::ContainerRef {
    common::ContainerRef { id: id.to_owned() }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
