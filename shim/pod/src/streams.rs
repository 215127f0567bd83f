//! Serves the stream socket of the pod process: reads the preamble of each connection, and connects it to the guest or to a
//! container's output, or receives descriptors of devices, images and logs.

use crate::actor::{ActorMessage, ActorRequest, ContainerHandle, OfferKind, OfferedFiles, Reply};
use crate::agent::{read_frame, write_frame};
use crate::broadcast::OutputBroadcast;
use crate::checkpoint;
use crate::error::{Failure, PodError};
use crate::images::MAX_EXTENTS;
use nacelle_base::descriptors::receive_descriptor;
use nacelle_base::{Chain, FailureKind};
use nacelle_proto::{agent, common, pod};
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// The maximum number of simultaneous connections that carry bytes. Those with descriptors do not count: users' streams must not keep
/// the daemon from opening a log again.
const MAX_RELAYS: usize = 1024;
/// The limit for a connection to send its preamble and to read the reply.
const PREAMBLE_LIMIT: Duration = Duration::from_secs(30);
/// The buffer size in bytes for each direction of a stream.
const BUFFER_BYTES: usize = 16 << 10;

/// Accepts connections and serves each in its own task; never returns.
pub async fn serve(listener: UnixListener, inbox: mpsc::UnboundedSender<ActorMessage>) {
    let relays = Arc::new(Semaphore::new(MAX_RELAYS));
    loop {
        match listener.accept().await {
            Ok((connection, _)) => {
                let (inbox, relays) = (inbox.clone(), Arc::clone(&relays));
                tokio::spawn(async move {
                    if let Err(error) = serve_stream(connection, &inbox, &relays).await {
                        tracing::debug!("a stream failed: {}", Chain(&error));
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a stream");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// The other end of a stream.
enum StreamTarget {
    /// A connection to the guest.
    Guest(UnixStream),
    /// An output of a container.
    Output(Arc<OutputBroadcast>),
}

async fn serve_stream(
    mut client: UnixStream,
    inbox: &mpsc::UnboundedSender<ActorMessage>,
    relays: &Semaphore,
) -> Result<(), PodError> {
    let open: pod::StreamOpen = read_frame(&mut client, "preamble of a stream", PREAMBLE_LIMIT).await?;
    match open.stream() {
        common::Stream::Device => return receive_offer(client, OfferKind::Device, 1, open, inbox).await,
        common::Stream::Image => {
            let count = open.descriptors;
            return receive_offer(client, OfferKind::Image, count, open, inbox).await;
        }
        common::Stream::Checkpoint => {
            return receive_offer(client, OfferKind::Checkpoint, checkpoint::FILES, open, inbox).await;
        }
        common::Stream::Log => return receive_log(client, open.id, inbox).await,
        _ => {}
    }
    let _permit = relays.acquire().await; // The semaphore is never closed.
    let (target, reply) = match connect_target(inbox, open).await {
        Ok(target) => (Some(target), pod::StreamOpened::default()),
        Err(failure) => (None, refusal(failure)),
    };
    write_frame(&mut client, &reply, PREAMBLE_LIMIT).await?;
    let failed = |source| PodError::Stream { what: "relay a stream", source };
    match target {
        Some(StreamTarget::Guest(mut target)) => {
            let copied =
                tokio::io::copy_bidirectional_with_sizes(&mut client, &mut target, BUFFER_BYTES, BUFFER_BYTES).await;
            copied.map_err(failed)?;
        }
        Some(StreamTarget::Output(broadcast)) => {
            let accepted = client.into_std().and_then(|client| broadcast.add_client(client)).map_err(failed)?;
            if !accepted {
                tracing::warn!("cannot attach to the output of a container: it has too many clients");
            }
        }
        None => {}
    }
    Ok(())
}

/// Receives this number of open files of the node, and withdraws them when the connection ends, unless a container uses them by then.
async fn receive_offer(
    mut client: UnixStream,
    kind: OfferKind,
    count: u32,
    open: pod::StreamOpen,
    inbox: &mpsc::UnboundedSender<ActorMessage>,
) -> Result<(), PodError> {
    if count as usize > MAX_EXTENTS || (kind == OfferKind::Checkpoint && open.descriptors != count) {
        let rule = "an image has at most 512 files, and a checkpoint has three";
        let failure = PodError::Field { field: "descriptors", value: open.descriptors.to_string(), rule }.into();
        return write_frame(&mut client, &refusal(failure), PREAMBLE_LIMIT).await;
    }
    let mut files = Vec::with_capacity(count as usize);
    for _ in 0..count {
        files.push(receive_file(&client, "receive a device or an image").await?);
    }
    let offer = OfferedFiles { kind, id: open.id, name: open.name, files };
    let number =
        call_actor(inbox, |reply| ActorRequest::KeepOffer(offer, reply)).await.map_err(|_ending| PodError::Ending)?;
    let written = write_frame(&mut client, &pod::StreamOpened::default(), PREAMBLE_LIMIT).await;
    if written.is_ok() {
        // The client sends nothing: the read returns when the connection ends.
        let _ = client.read(&mut [0]).await;
    }
    // The actor may have ended, which releases everything.
    let _ = inbox.send(ActorMessage::Request(ActorRequest::WithdrawOffer(number)));
    written
}

/// Receives the file to which the output of a container is written from now on.
async fn receive_log(
    mut client: UnixStream,
    id: String,
    inbox: &mpsc::UnboundedSender<ActorMessage>,
) -> Result<(), PodError> {
    let file = receive_file(&client, "receive the log of a container").await?;
    let set = call_actor(inbox, |reply| ActorRequest::SetLog(id, file, reply)).await;
    write_frame(&mut client, &set.map_or_else(refusal, |()| pod::StreamOpened::default()), PREAMBLE_LIMIT).await
}

/// Receives the descriptor that follows the preamble.
async fn receive_file(client: &UnixStream, what: &'static str) -> Result<File, PodError> {
    let received =
        tokio::time::timeout(PREAMBLE_LIMIT, client.async_io(Interest::READABLE, || receive_descriptor(client)));
    let received = received.await.map_err(|_elapsed| PodError::TooSlow { what, limit: PREAMBLE_LIMIT })?;
    Ok(File::from(received.map_err(|source| PodError::Stream { what, source })?))
}

fn refusal(failure: Failure) -> pod::StreamOpened {
    pod::StreamOpened { code: failure.kind.grpc_code(), message: failure.message }
}

/// Sends a request to the actor and waits for the reply.
async fn call_actor<T>(
    inbox: &mpsc::UnboundedSender<ActorMessage>,
    request: impl FnOnce(Reply<T>) -> ActorRequest,
) -> Result<T, Failure> {
    let (sender, reply) = oneshot::channel();
    inbox.send(ActorMessage::Request(request(sender))).map_err(|_closed| PodError::Ending)?;
    reply.await.map_err(|_dropped| PodError::Ending)?
}

/// Connects the other end of a stream.
async fn connect_target(
    inbox: &mpsc::UnboundedSender<ActorMessage>,
    open: pod::StreamOpen,
) -> Result<StreamTarget, Failure> {
    let (kind, pod::StreamOpen { id, exec_id, stream, port, .. }) = (open.stream(), open);
    if kind == common::Stream::Port {
        let agent = call_actor(inbox, ActorRequest::GetAgent).await?;
        return Ok(StreamTarget::Guest(
            agent.open_async_stream(agent::StreamOpen { stream, port, ..Default::default() }).await?,
        ));
    }
    let is_container = exec_id.is_empty();
    if !is_container && matches!(kind, common::Stream::Stdin | common::Stream::Stdout | common::Stream::Stderr) {
        // A command may run in the guest when its container has exited. The agent knows it.
        let agent = call_actor(inbox, ActorRequest::GetAgent).await?;
        return Ok(StreamTarget::Guest(
            agent.open_async_stream(agent::StreamOpen { id, exec_id, stream, ..Default::default() }).await?,
        ));
    }
    let ContainerHandle { agent, request, outputs } =
        call_actor(inbox, |reply| ActorRequest::GetContainer(id.clone(), reply)).await?;
    match kind {
        common::Stream::Stdout => return Ok(StreamTarget::Output(outputs.stdout)),
        common::Stream::Stderr => return Ok(StreamTarget::Output(outputs.stderr)),
        common::Stream::Stdin => {}
        common::Stream::Port
        | common::Stream::Device
        | common::Stream::Log
        | common::Stream::Image
        | common::Stream::Checkpoint
        | common::Stream::Unspecified => {
            return Err(Failure {
                kind: FailureKind::Invalid,
                message: "cannot open a stream: its kind is missing or unknown".to_owned(),
            });
        }
    }
    // A container's input stays open after a client detaches, unless `stdin_once` is set.
    let keep_open = !request.stdin_once;
    Ok(StreamTarget::Guest(
        agent.open_async_stream(agent::StreamOpen { id, stream, keep_open, ..Default::default() }).await?,
    ))
}
