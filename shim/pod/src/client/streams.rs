//! Opens streams of a pod process: of containers and commands, and those by which the daemon hands descriptors over.

use super::spawn::START_LIMIT;
use super::{CONNECT_LIMIT, ClientError, PodClient, connect_to_socket};
use crate::agent;
use crate::error::PodError;
use crate::protocol::PodRpc;
use crate::text::printable;
use nacelle_base::FailureKind;
use nacelle_base::descriptors::send_with_descriptor;
use nacelle_proto::{common, pod as proto};
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

impl PodClient {
    /// Starts a command in a container; [`PodClient::open_stream`] opens its streams.
    pub async fn exec(&self, request: proto::ExecRequest) -> Result<RunningExec, ClientError> {
        let started = self.call(PodRpc::Exec, request, |mut rpc, request| async move { rpc.exec(request).await });
        self.running_exec(started.await?).await
    }

    /// Starts a command in the guest, with the programs of the container's image. It is killed when the result is dropped.
    pub async fn start_guest_shell(&self, request: proto::ExecRequest) -> Result<RunningExec, ClientError> {
        let started = self.call(PodRpc::StartGuestShell, request, |mut rpc, request| async move {
            rpc.start_guest_shell(request).await
        });
        self.running_exec(started.await?).await
    }

    async fn running_exec(&self, mut events: tonic::Streaming<proto::ExecEvent>) -> Result<RunningExec, ClientError> {
        let first = match events.message().await {
            Ok(first) => first,
            Err(status) => return Err(self.explain(status).await),
        };
        match first.and_then(|event| event.event) {
            Some(proto::exec_event::Event::Started(exec_id)) => Ok(RunningExec { exec_id, events }),
            _ => Err(ended_early()),
        }
    }

    /// Offers an open block device of the node for a container that will be created and will have it at `path`. The offer
    /// is withdrawn when the result is dropped before that.
    pub async fn offer_device(&self, id: &str, path: &str, device: OwnedFd) -> Result<Offer, ClientError> {
        let (id, stream) = (id.to_owned(), common::Stream::Device.into());
        let open = proto::StreamOpen { id, stream, name: path.to_owned(), ..Default::default() };
        Ok(Offer { _stream: self.open_with_descriptors(open, &[device]).await? })
    }

    /// Offers the open files of an image for a container that will be created. The offer is withdrawn when the result is dropped
    /// before that.
    pub(super) async fn offer_image(&self, id: &str, key: &str, files: &[OwnedFd]) -> Result<Offer, ClientError> {
        let open = proto::StreamOpen {
            id: id.to_owned(),
            stream: common::Stream::Image.into(),
            name: key.to_owned(),
            descriptors: u32::try_from(files.len()).unwrap_or(u32::MAX),
            ..Default::default()
        };
        Ok(Offer { _stream: self.open_with_descriptors(open, files).await? })
    }

    /// Opens a stream of bytes of unlimited length, to or from a process.
    pub async fn open_stream(&self, open: proto::StreamOpen) -> Result<UnixStream, ClientError> {
        self.open_with_descriptors(open, &[]).await
    }

    /// Opens a stream, and sends descriptors after the preamble, with one byte each.
    pub(super) async fn open_with_descriptors(
        &self,
        open: proto::StreamOpen,
        descriptors: &[OwnedFd],
    ) -> Result<UnixStream, ClientError> {
        self.check(&open)?;
        let failed = |source| ClientError::Stream { pod: self.identity.pid, source: Box::new(source) };
        let connected = timeout(CONNECT_LIMIT, connect_to_socket(&self.streams, crate::STREAM_SOCKET_FILE)).await;
        let connected = connected.map_err(|_elapsed| ClientError::Timeout { what: "reply", limit: CONNECT_LIMIT })?;
        let connected = connected.map_err(|source| PodError::Stream { what: "connect", source });
        let mut stream = connected.map_err(failed)?;
        agent::write_frame(&mut stream, &open, CONNECT_LIMIT).await.map_err(failed)?;
        for descriptor in descriptors {
            let sent = stream.async_io(Interest::WRITABLE, || send_with_descriptor(&stream, &[0], descriptor));
            let sent = timeout(CONNECT_LIMIT, sent).await;
            let sent =
                sent.map_err(|_elapsed| ClientError::Timeout { what: "accept a descriptor", limit: CONNECT_LIMIT })?;
            sent.map_err(|source| failed(PodError::Stream { what: "send a descriptor", source }))?;
        }
        // The process forwards the request to the guest, which may be slow.
        let opened = agent::read_frame(&mut stream, "reply for a stream", START_LIMIT).await.map_err(failed)?;
        match opened {
            proto::StreamOpened { code: 0, .. } => Ok(stream),
            proto::StreamOpened { code, message } => Err(ClientError::Rejected {
                kind: FailureKind::from_grpc_code(code),
                message: printable(&message, super::error::MAX_TEXT),
            }),
        }
    }
}

/// Files that were offered to the pod process. Dropping it withdraws them, unless a container uses them.
#[derive(Debug)]
pub struct Offer {
    _stream: UnixStream,
}

/// A running command. Dropping this value leaves a command in a container to itself; it is killed if not all of its streams were opened.
#[derive(Debug)]
pub struct RunningExec {
    /// The id of the exec in its container.
    pub exec_id: String,
    events: tonic::Streaming<proto::ExecEvent>,
}

impl RunningExec {
    /// Waits for the end of the command; returns its exit code.
    pub async fn wait_for_exit(mut self) -> Result<u32, ClientError> {
        match self.events.message().await?.and_then(|event| event.event) {
            Some(proto::exec_event::Event::Exited(code)) => Ok(code),
            _ => Err(ended_early()),
        }
    }
}

/// Returns the error for a pod process that ended a response stream early.
fn ended_early() -> ClientError {
    ClientError::Rejected {
        kind: FailureKind::Unavailable,
        message: "the pod process ended its reply too early".to_owned(),
    }
}
