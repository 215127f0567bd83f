//! Calls the agent's gRPC service and opens its streams, each with a deadline. The agent is not trusted: this module limits
//! the length of its messages and wraps them in [`FromGuest`], and [`crate::guest_values`] bounds the values. An [`Agent`]
//! is cheap to clone.

use crate::codes;
use crate::error::PodError;
use crate::guest_values::{Bounded, FromGuest, GuestExit, describe_exit};
use hyper_util::rt::TokioIo;
use nacelle_base::FailureKind;
use nacelle_base::descriptors::send_with_descriptor;
use nacelle_base::task::run_blocking;
use nacelle_engine::{GuestLink, LinkError, MachineExit};
use nacelle_proto::wire::{self, Shaped};
use nacelle_proto::{agent as proto, common};
use prost::Message;
use proto::agent_client::AgentClient;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Response, Status};

/// The vsock port on the host to which the agent connects for the boot handshake.
pub const BOOT_PORT: u32 = 1024;
/// The vsock port of the agent's gRPC service.
const RPC_PORT: u32 = 1025;
/// The vsock port of the agent's streams.
const STREAM_PORT: u32 = 1026;

/// The length of the token of a Hold in bytes.
pub const TOKEN_BYTES: usize = 16;
/// The time limit of Hold: longer than the agent's own limits for its parts.
const HOLD_LIMIT: Duration = Duration::from_secs(20);
/// The time limit of Sync and of Release.
const BRIEF_LIMIT: Duration = Duration::from_secs(5);

/// The maximum length of a framed message in bytes.
const MAX_FRAME: usize = 1 << 20;
/// The maximum length of a Stats reply in bytes; the decoded message takes many times as much memory.
const MAX_STATS: usize = 256 << 10;
/// The duration of one long poll of Wait.
const LONG_POLL: Duration = Duration::from_secs(30);
/// The pause after a Wait that returned too early.
const EARLY_WAIT_PAUSE: Duration = Duration::from_millis(200);

/// The agent of one guest.
#[derive(Clone)]
pub struct Agent {
    rpc: AgentClient<Channel>,
    link: Arc<dyn GuestLink>,
    exit_watch: ExitWatch,
    limit: Duration,
}

/// Holds `None` until the VM has ended, then how it ended.
pub type ExitWatch = watch::Receiver<Option<MachineExit>>;

/// The time to wait, after a connection broke, for the report that the VM has ended.
const EXIT_REPORT_LIMIT: Duration = Duration::from_secs(3);

impl Agent {
    /// Creates the client of the agent at the other end of this link; each request may take `limit`. Connects with the first request.
    pub fn new(link: Arc<dyn GuestLink>, exit_watch: ExitWatch, limit: Duration) -> Self {
        let connector = {
            let link = Arc::clone(&link);
            tower::service_fn(move |_: Uri| {
                let link = Arc::clone(&link);
                async move {
                    let stream = connect(link, RPC_PORT, limit).await?;
                    Ok::<_, PodError>(TokioIo::new(tokio_stream_of(stream)?))
                }
            })
        };
        // The address is unused: the connector determines the destination.
        let channel = Endpoint::from_static("http://agent").connect_with_connector_lazy(connector);
        let rpc = AgentClient::new(channel).max_decoding_message_size(wire::MAX_MESSAGE);
        Self { rpc, link, exit_watch, limit }
    }

    async fn call<T>(
        &self,
        what: &'static str,
        limit: Duration,
        response: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<FromGuest<T>, PodError> {
        let response = tokio::select! {
            biased;
            response = tokio::time::timeout(limit, response) => response,
            exited = wait_for_vm_exit(self.exit_watch.clone()) => return Err(exited),
        };
        let status = match response {
            Err(_elapsed) => return Err(PodError::TooSlow { what, limit }),
            Ok(Ok(response)) => return Ok(FromGuest::new(response.into_inner())),
            Ok(Err(status)) => status,
        };
        let message = FromGuest::new(&status).bound_message();
        let error = PodError::Agent { what, kind: codes::kind(&status), message };
        match status.code() {
            Code::Unknown | Code::Unavailable | Code::Internal | Code::Cancelled => {
                Err(exit_or(self.exit_watch.clone(), error).await)
            }
            _ => Err(error),
        }
    }

    /// Mounts an image.
    pub async fn attach_image(&self, request: proto::AttachImageRequest) -> Result<(), PodError> {
        let response = self.call("attach an image", self.limit, self.rpc.clone().attach_image(request)).await;
        response.map(drop)
    }

    /// Unmounts an image.
    pub async fn detach_image(&self, partition: u32) -> Result<(), PodError> {
        let request = proto::DetachImageRequest { partition };
        self.call("detach an image", self.limit, self.rpc.clone().detach_image(request)).await.map(drop)
    }

    /// Adds a device of the node, or updates one that changed.
    pub async fn attach_device(&self, request: proto::AttachDeviceRequest) -> Result<(), PodError> {
        self.call("attach a device", self.limit, self.rpc.clone().attach_device(request)).await.map(drop)
    }

    /// Removes a device of the node.
    pub async fn detach_device(&self, partition: u32) -> Result<(), PodError> {
        let request = proto::DetachDeviceRequest { partition };
        self.call("detach a device", self.limit, self.rpc.clone().detach_device(request)).await.map(drop)
    }

    /// Creates a container.
    pub async fn create_container(
        &self,
        request: proto::CreateContainerRequest,
    ) -> Result<Bounded<common::CreateContainerResponse>, PodError> {
        let response = self.call("create the container", self.limit, self.rpc.clone().create_container(request)).await;
        response.map(FromGuest::<common::CreateContainerResponse>::bound)
    }

    /// Starts a container.
    pub async fn start_container(&self, id: &str) -> Result<(), PodError> {
        let request = common::ContainerRef { id: id.to_owned() };
        self.call("start the container", self.limit, self.rpc.clone().start_container(request)).await.map(drop)
    }

    /// Sends a signal to a container's first process, or to an exec.
    pub async fn signal(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Result<(), PodError> {
        let request = proto::SignalRequest { id: id.to_owned(), exec_id: exec_id.to_owned(), signal, all };
        self.call("send a signal", self.limit, self.rpc.clone().signal(request)).await.map(drop)
    }

    /// Waits for the exit of a container or an exec; returns `None` if it still runs after a long poll.
    pub async fn wait(&self, id: &str, exec_id: &str) -> Result<Option<GuestExit>, PodError> {
        let timeout_ms = u32::try_from(LONG_POLL.as_millis()).unwrap_or(u32::MAX);
        let request = proto::WaitRequest { id: id.to_owned(), exec_id: exec_id.to_owned(), timeout_ms };
        let (limit, begun) = (LONG_POLL + self.limit, Instant::now());
        let exit = self.call("wait for a process", limit, self.rpc.clone().wait(request)).await?.bound();
        if exit.is_none() && begun.elapsed() < LONG_POLL / 2 {
            // An agent that returns at once must not keep this process busy.
            tokio::time::sleep(EARLY_WAIT_PAUSE).await;
        }
        Ok(exit)
    }

    /// Sends a copied-in volume, part by part. If the parts end before the volume is complete, containers see nothing of it.
    pub async fn copy_in_volume(&self, parts: mpsc::Receiver<proto::WriteVolumeRequest>) -> Result<(), PodError> {
        let parts = ReceiverStream::new(parts);
        self.call("copy a volume into the guest", self.limit, self.rpc.clone().write_volume(parts)).await.map(drop)
    }

    /// Returns the end of a copied-in volume that is a file.
    pub async fn read_volume(&self, name: &str) -> Result<Bounded<Vec<u8>>, PodError> {
        let request = proto::ReadVolumeRequest { name: name.to_owned() };
        let read = self.call("read a copied-in file", self.limit, self.rpc.clone().read_volume(request)).await;
        read.map(FromGuest::<proto::ReadVolumeResponse>::bound)
    }

    /// Removes a copied-in volume.
    pub async fn remove_copied_volume(&self, name: &str) -> Result<(), PodError> {
        let request = proto::DropVolumeRequest { name: name.to_owned() };
        self.call("remove a copied-in volume", self.limit, self.rpc.clone().drop_volume(request)).await.map(drop)
    }

    /// Creates a socket volume, changes its sockets, or removes it.
    pub async fn set_sockets(&self, request: proto::SetSocketsRequest) -> Result<(), PodError> {
        self.call("change the sockets of a volume", self.limit, self.rpc.clone().set_sockets(request)).await.map(drop)
    }

    /// Writes the dirty pages of the scratch disk.
    pub async fn sync(&self) -> Result<(), PodError> {
        self.call("write dirty pages", BRIEF_LIMIT, self.rpc.clone().sync(common::Empty {})).await.map(drop)
    }

    /// Freezes all containers, and holds back requests that change something, until Release, at most for `lease`.
    pub async fn hold(
        &self,
        token: &[u8; TOKEN_BYTES],
        lease: Duration,
    ) -> Result<FromGuest<proto::HoldResponse>, PodError> {
        let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let request = proto::HoldRequest { token: token.to_vec(), lease_ms };
        self.call("freeze the containers", HOLD_LIMIT, self.rpc.clone().hold(request)).await
    }

    /// Ends the Hold with this token.
    pub async fn release(&self, token: &[u8; TOKEN_BYTES]) -> Result<(), PodError> {
        let request = proto::ReleaseRequest { token: token.to_vec() };
        self.call("release the containers", BRIEF_LIMIT, self.rpc.clone().release(request)).await.map(drop)
    }

    /// Informs the agent that its VM was restored.
    pub async fn renew(&self, request: proto::RenewRequest) -> Result<(), PodError> {
        self.call("renew the guest", self.limit, self.rpc.clone().renew(request)).await.map(drop)
    }

    /// Makes the guest of a restored VM that of another pod.
    pub async fn restore(
        &self,
        request: proto::RestoreRequest,
        limit: Duration,
    ) -> Result<FromGuest<proto::RestoreResponse>, PodError> {
        self.call("become another pod", limit, self.rpc.clone().restore(request)).await
    }

    /// Kills the remaining processes of a container and removes it.
    pub async fn remove_container(&self, id: &str) -> Result<(), PodError> {
        let request = common::ContainerRef { id: id.to_owned() };
        self.call("remove the container", self.limit, self.rpc.clone().remove_container(request)).await.map(drop)
    }

    /// Starts a process in a container.
    pub async fn exec(&self, request: proto::ExecRequest) -> Result<(), PodError> {
        self.call("start the command", self.limit, self.rpc.clone().exec(request)).await.map(drop)
    }

    /// Starts a process in the guest, with the programs of a container's image.
    pub async fn start_guest_shell(&self, request: proto::ExecRequest) -> Result<(), PodError> {
        self.call("start the command in the guest", self.limit, self.rpc.clone().start_guest_shell(request))
            .await
            .map(drop)
    }

    /// Lets an exec run on without a client.
    pub async fn abandon_exec(&self, id: &str, exec_id: &str) -> Result<(), PodError> {
        let request = proto::AbandonExecRequest { id: id.to_owned(), exec_id: exec_id.to_owned() };
        self.call("abandon the command", self.limit, self.rpc.clone().abandon_exec(request)).await.map(drop)
    }

    /// Changes the limits of a container.
    pub async fn update_container(&self, request: common::UpdateContainerRequest) -> Result<(), PodError> {
        self.call("change the limits of the container", self.limit, self.rpc.clone().update_container(request))
            .await
            .map(drop)
    }

    /// Sets the number of vCPUs that are online.
    pub async fn set_processors(&self, count: u32) -> Result<(), PodError> {
        let request = common::SetProcessorsRequest { count };
        self.call("change the number of online vCPUs", self.limit, self.rpc.clone().set_processors(request))
            .await
            .map(drop)
    }

    /// Brings `bytes` of the VM's hot-plug memory, which has these address ranges, into use; returns how many bytes are in use then.
    pub async fn set_memory(
        &self,
        reserve: &[Range<u64>],
        bytes: u64,
    ) -> Result<FromGuest<common::SetMemoryResponse>, PodError> {
        let request = proto::SetMemoryRequest { reserve: memory_ranges(reserve), bytes };
        self.call("change the memory", self.limit, self.rpc.clone().set_memory(request)).await
    }

    /// Changes the size of a terminal.
    pub async fn resize(&self, request: common::ResizeRequest) -> Result<(), PodError> {
        self.call("resize the terminal", self.limit, self.rpc.clone().resize(request)).await.map(drop)
    }

    /// Returns the resource usage of the containers.
    pub async fn stats(&self) -> Result<FromGuest<proto::StatsResponse>, PodError> {
        let mut rpc = self.rpc.clone().max_decoding_message_size(MAX_STATS);
        self.call("report the resource usage of the containers", self.limit, rpc.stats(common::Empty {})).await
    }

    /// Corrects the guest's clock if there is a reference: the node's time at a moment of the guest's monotonic clock. Returns the
    /// guest's clock.
    pub async fn follow_clock(
        &self,
        reference: Option<proto::ClockReading>,
    ) -> Result<Bounded<proto::ClockReading>, PodError> {
        let request = proto::FollowClockRequest { reference };
        let read = self.call("compare the clocks", self.limit, self.rpc.clone().follow_clock(request)).await;
        read.map(FromGuest::<proto::ClockReading>::bound)
    }

    /// Requests the guest to power off.
    pub async fn shutdown(&self, limit: Duration) -> Result<(), PodError> {
        self.call("shut down", limit, self.rpc.clone().shutdown(common::Empty {})).await.map(drop)
    }

    /// Connects one stream of a process. Returns a blocking stream.
    pub async fn open_stream(&self, id: &str, exec_id: &str, stream: common::Stream) -> Result<UnixStream, PodError> {
        let (id, exec_id, stream) = (id.to_owned(), exec_id.to_owned(), stream.into());
        let opened = self.open_async_stream(proto::StreamOpen { id, exec_id, stream, ..Default::default() }).await?;
        let failed = |source| PodError::Stream { what: "open a stream", source };
        let opened = opened.into_std().map_err(failed)?;
        opened.set_nonblocking(false).map_err(failed)?;
        Ok(opened)
    }

    /// Connects one stream.
    pub async fn open_async_stream(&self, open: proto::StreamOpen) -> Result<tokio::net::UnixStream, PodError> {
        match self.try_open(&open).await {
            Err(error @ (PodError::Link { .. } | PodError::Stream { .. })) => {
                Err(exit_or(self.exit_watch.clone(), error).await)
            }
            other => other,
        }
    }

    /// Hands the agent the open file of a disk for the VM of a machine pod, which will be created as container `id`. The disk is withdrawn when the result is
    /// dropped before that.
    pub async fn hand_over(&self, id: &str, disk: &str, file: File) -> Result<DeviceHandover, PodError> {
        let (id, stream, device) = (id.to_owned(), common::Stream::Device.into(), disk.to_owned());
        let open = proto::StreamOpen { id, stream, device, ..Default::default() };
        let mut stream = tokio_stream_of(connect(Arc::clone(&self.link), STREAM_PORT, self.limit).await?)?;
        write_frame(&mut stream, &open, self.limit).await?;
        let what = "hand a disk over";
        let sent = stream.async_io(Interest::WRITABLE, || send_with_descriptor(&stream, &[0], &file));
        let sent = tokio::time::timeout(self.limit, sent).await;
        sent.map_err(|_elapsed| PodError::TooSlow { what, limit: self.limit })?
            .map_err(|source| PodError::Stream { what, source })?;
        self.read_stream_reply(&mut stream, what).await?;
        Ok(DeviceHandover { _stream: stream })
    }

    async fn read_stream_reply(&self, stream: &mut tokio::net::UnixStream, what: &'static str) -> Result<(), PodError> {
        let opened: FromGuest<proto::StreamOpened> = read_guest_frame(stream, "reply for a stream", self.limit).await?;
        opened.bound().map_err(|message| PodError::Agent { what, kind: FailureKind::Unavailable, message })
    }

    async fn try_open(&self, open: &proto::StreamOpen) -> Result<tokio::net::UnixStream, PodError> {
        let mut stream = tokio_stream_of(connect(Arc::clone(&self.link), STREAM_PORT, self.limit).await?)?;
        write_frame(&mut stream, open, self.limit).await?;
        if open.stream() == common::Stream::Port {
            self.read_stream_reply(&mut stream, "connect to the port").await?;
        }
        Ok(stream)
    }
}

/// A disk that was handed over. Dropping it withdraws the disk, unless a VM uses it.
#[derive(Debug)]
pub struct DeviceHandover {
    _stream: tokio::net::UnixStream,
}

/// Completes when the VM has ended.
async fn wait_for_vm_exit(mut exit_watch: ExitWatch) -> PodError {
    match exit_watch.wait_for(Option::is_some).await.map(|exit| exit.as_ref().map(describe_exit)) {
        Ok(Some(why)) => PodError::Died { why },
        // BUG: the VM's thread ended without a report.
        _ => PodError::Ending,
    }
}

/// Returns the end of the VM as the error if it is reported within a moment, otherwise `error`.
pub async fn exit_or(exit_watch: ExitWatch, error: PodError) -> PodError {
    tokio::time::timeout(EXIT_REPORT_LIMIT, wait_for_vm_exit(exit_watch)).await.unwrap_or(error)
}

/// Connects to a port of the guest; retries while the agent does not listen yet.
async fn connect(link: Arc<dyn GuestLink>, port: u32, limit: Duration) -> Result<UnixStream, PodError> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let endpoint = Arc::clone(&link);
        match run_blocking("connect to the agent", move || endpoint.connect(port, left)).await? {
            Err(LinkError::Refused { .. }) if !left.is_zero() => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            other => return other.map_err(|source| PodError::Link { what: "connect to the agent", source }),
        }
    }
}

/// Converts a stream of the link for the async runtime.
pub fn tokio_stream_of(stream: UnixStream) -> Result<tokio::net::UnixStream, PodError> {
    let failed = |source: io::Error| PodError::Stream { what: "set up a stream", source };
    stream.set_nonblocking(true).map_err(failed)?;
    tokio::net::UnixStream::from_std(stream).map_err(failed)
}

/// Writes one framed message.
pub async fn write_frame(
    stream: &mut tokio::net::UnixStream,
    message: &impl Message,
    limit: Duration,
) -> Result<(), PodError> {
    let what = "write to the agent";
    let length = message.encoded_len();
    if length > MAX_FRAME {
        return Err(PodError::Malformed { what: "configuration, which is too long," });
    }
    let mut frame = Vec::with_capacity(length + 4);
    frame.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    frame.extend_from_slice(&message.encode_to_vec());
    let written = tokio::time::timeout(limit, stream.write_all(&frame)).await;
    written.map_err(|_elapsed| PodError::TooSlow { what, limit })?.map_err(|source| PodError::Stream { what, source })
}

/// Reads one framed message of the agent.
pub async fn read_guest_frame<M: Message + Shaped + Default>(
    stream: &mut (impl tokio::io::AsyncRead + Unpin),
    what: &'static str,
    limit: Duration,
) -> Result<FromGuest<M>, PodError> {
    read_frame(stream, what, limit).await.map(FromGuest::new)
}

/// Converts address ranges of the guest's memory.
pub fn memory_ranges(ranges: &[Range<u64>]) -> Vec<proto::MemoryRange> {
    let range = |range: &Range<u64>| proto::MemoryRange { address: range.start, bytes: range.end - range.start };
    ranges.iter().map(range).collect()
}

/// Reads one framed message of the daemon or of a pod process.
pub async fn read_frame<M: Message + Shaped + Default>(
    stream: &mut (impl tokio::io::AsyncRead + Unpin),
    what: &'static str,
    limit: Duration,
) -> Result<M, PodError> {
    let read = async {
        let length = usize::try_from(stream.read_u32_le().await?).unwrap_or(usize::MAX);
        if length > MAX_FRAME {
            return Ok(None);
        }
        // The buffer grows with the bytes that arrive, not with the announced length.
        let mut bytes = Vec::new();
        let count = u64::try_from(length).unwrap_or(u64::MAX);
        stream.take(count).read_to_end(&mut bytes).await?;
        Ok::<_, io::Error>(Some(bytes).filter(|bytes| bytes.len() == length))
    };
    let bytes = tokio::time::timeout(limit, read).await.map_err(|_elapsed| PodError::TooSlow { what, limit })?;
    let bytes = bytes.map_err(|source| PodError::Stream { what, source })?.ok_or(PodError::Malformed { what })?;
    wire::decode(&bytes).map_err(|_malformed| PodError::Malformed { what })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<proto::AgentHello, PodError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut bytes = bytes;
        runtime.block_on(read_frame(&mut bytes, "hello", Duration::from_secs(60)))
    }

    #[test]
    fn a_frame_is_read() {
        let hello = proto::AgentHello {
            protocol: 1,
            agent_version: "a".into(),
            kernel_release: "k".into(),
            started_nanos: 1,
            sent_nanos: 2,
        };
        let body = hello.encode_to_vec();
        let frame = [&u32::try_from(body.len()).unwrap().to_le_bytes()[..], &body].concat();
        assert_eq!(read(&frame).unwrap(), hello);
        assert!(matches!(read(&frame[..frame.len() - 1]), Err(PodError::Malformed { .. })));
        assert!(matches!(read(&frame[..3]), Err(PodError::Stream { .. })));
        assert!(matches!(read(&[0xff; 64]), Err(PodError::Malformed { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..64), length in 0u8..64) {
            let _ = read(&bytes);
            if let Some(start) = bytes.get_mut(..4) {
                start.copy_from_slice(&[length, 0, 0, 0]);
                let _ = read(&bytes);
            }
        }
    }
}
