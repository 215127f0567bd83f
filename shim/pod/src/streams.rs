//! Serves the stream socket of the pod process: reads the preamble of each connection, and connects it to the guest or to a
//! container's output.

use crate::actor::{Ask, Live, Message, Offer, Reply};
use crate::agent::{read_frame, write_frame};
use crate::error::{Failure, PodError};
use crate::fan::Fan;
use nacelle_base::descriptors::receive_descriptor;
use nacelle_base::{Chain, Kind};
use nacelle_proto::{agent, common, pod};
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// The maximum number of simultaneous connections.
const CONNECTIONS: usize = 1024;
/// The limit for a connection to send its preamble and to read the reply.
const PREAMBLE: Duration = Duration::from_secs(30);
/// The buffer size in bytes for each direction of a stream.
const BUFFER: usize = 16 << 10;

/// Accepts connections and serves each in its own task; never returns.
pub async fn serve(listener: UnixListener, inbox: mpsc::UnboundedSender<Message>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((connection, _)) => {
                let inbox = inbox.clone();
                tokio::spawn(async move {
                    if let Err(error) = join(connection, &inbox).await {
                        tracing::debug!("a stream: {}", Chain(&error));
                    }
                    drop(place);
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
enum Far {
    /// A connection to the guest.
    Guest(UnixStream),
    /// An output of a container.
    Output(Arc<Fan>),
}

async fn join(mut near: UnixStream, inbox: &mpsc::UnboundedSender<Message>) -> Result<(), PodError> {
    let open: pod::StreamOpen = read_frame(&mut near, "preamble of a stream", PREAMBLE).await?;
    if open.stream() == common::Stream::Device {
        return offered(near, open, inbox).await;
    }
    let (far, answer) = match connect(inbox, open).await {
        Ok(far) => (Some(far), pod::StreamOpened::default()),
        Err(Failure { kind, message }) => (None, pod::StreamOpened { code: kind.grpc_code(), message }),
    };
    write_frame(&mut near, &answer, PREAMBLE).await?;
    let failed = |source| PodError::Stream { what: "go on with a stream", source };
    match far {
        Some(Far::Guest(mut far)) => {
            let copied = tokio::io::copy_bidirectional_with_sizes(&mut near, &mut far, BUFFER, BUFFER).await;
            copied.map_err(failed)?;
        }
        Some(Far::Output(fan)) => {
            let room = near.into_std().and_then(|near| fan.add(near)).map_err(failed)?;
            if !room {
                tracing::warn!("too many listen to a container: a further one is turned away");
            }
        }
        None => {}
    }
    Ok(())
}

/// Receives a device of the node, and withdraws it when the connection ends, unless a container uses it by then.
async fn offered(
    mut near: UnixStream,
    open: pod::StreamOpen,
    inbox: &mpsc::UnboundedSender<Message>,
) -> Result<(), PodError> {
    let what = "take a device";
    let received = tokio::time::timeout(PREAMBLE, near.async_io(Interest::READABLE, || receive_descriptor(&near)));
    let received = received.await.map_err(|_elapsed| PodError::TooSlow { what, limit: PREAMBLE })?;
    let file = File::from(received.map_err(|source| PodError::Stream { what, source })?);
    let offer = Offer { id: open.id, device: open.device, file };
    let number = asked(inbox, |reply| Ask::Offer(offer, reply)).await.map_err(|_ending| PodError::Ending)?;
    let answered = write_frame(&mut near, &pod::StreamOpened::default(), PREAMBLE).await;
    if answered.is_ok() {
        // The client sends nothing: the read returns when the connection ends.
        let _ = near.read(&mut [0]).await;
    }
    // The actor may have ended, which releases everything.
    let _ = inbox.send(Message::Ask(Ask::Withdraw(number)));
    answered
}

/// Sends a request to the actor and waits for the reply.
async fn asked<T>(inbox: &mpsc::UnboundedSender<Message>, ask: impl FnOnce(Reply<T>) -> Ask) -> Result<T, Failure> {
    let (reply, answer) = oneshot::channel();
    inbox.send(Message::Ask(ask(reply))).map_err(|_closed| PodError::Ending)?;
    answer.await.map_err(|_dropped| PodError::Ending)?
}

/// Connects the other end of a stream.
async fn connect(inbox: &mpsc::UnboundedSender<Message>, open: pod::StreamOpen) -> Result<Far, Failure> {
    let (kind, pod::StreamOpen { id, exec_id, stream, port, .. }) = (open.stream(), open);
    if kind == common::Stream::Port {
        let agent = asked(inbox, Ask::Agent).await?;
        return Ok(Far::Guest(agent.open(agent::StreamOpen { stream, port, ..Default::default() }).await?));
    }
    let Live { agent, request, outputs } = asked(inbox, |reply| Ask::Running(id.clone(), reply)).await?;
    let first = exec_id.is_empty();
    match kind {
        common::Stream::Stdout if first => return Ok(Far::Output(outputs.stdout)),
        common::Stream::Stderr if first => return Ok(Far::Output(outputs.stderr)),
        common::Stream::Stdin | common::Stream::Stdout | common::Stream::Stderr => {}
        common::Stream::Port | common::Stream::Device | common::Stream::Unspecified => {
            return Err(Failure { kind: Kind::Invalid, message: "a stream of no kind".to_owned() });
        }
    }
    // A container's input stays open after a client detaches, unless `stdin_once` is set.
    let keep_open = first && !request.stdin_once;
    Ok(Far::Guest(agent.open(agent::StreamOpen { id, exec_id, stream, keep_open, ..Default::default() }).await?))
}
