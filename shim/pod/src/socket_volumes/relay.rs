//! Accepts the guest's connections to sockets of the node, and copies bytes between the two. Any process of the guest can connect: the
//! header must name a volume by its token.

use super::SocketVolumes;
use crate::agent::tokio_stream_of;
use nacelle_base::sockets::{BUFFER, FIXED_HEADER, MAX_CONNECTIONS, SocketHeader};
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, guest_warn};
use nacelle_engine::{LinkError, LinkListener};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::Semaphore;

/// The duration of one wait for a connection.
const ACCEPT_LIMIT: Duration = Duration::from_secs(3_600);
/// The pause after a failure to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The time in which the guest must send the header of a connection.
const HEADER_LIMIT: Duration = Duration::from_secs(10);

/// Accepts connections until the VM has ended. A connection beyond the maximum is closed at once.
pub(super) async fn accept(mut listener: Box<dyn LinkListener>, volumes: SocketVolumes) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let waited = run_blocking("accept a connection of the guest", move || {
            let accepted = listener.accept(ACCEPT_LIMIT);
            (listener, accepted)
        });
        let accepted = match waited.await {
            Ok((returned, accepted)) => {
                listener = returned;
                accepted
            }
            Err(error) => return tracing::error!("sockets of the node are no longer relayed: {}", Chain(&error)),
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(LinkError::Timeout { .. }) => continue,
            Err(LinkError::Stopped) => return,
            Err(error) => {
                guest_warn!("cannot accept a connection of the guest to a socket of the node: {}", Chain(&error));
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            guest_warn!("the guest has the maximum of {MAX_CONNECTIONS} connections to sockets of the node");
            continue;
        };
        let volumes = volumes.clone();
        tokio::spawn(async move {
            if let Err(error) = relay(stream, volumes).await {
                tracing::debug!("a connection of the guest to a socket of the node has failed: {error}");
            }
            drop(permit);
        });
    }
}

/// Reads the header, connects to the socket of the node, and copies bytes in both directions until both have ended, one fails, or the
/// volume is detached.
async fn relay(stream: UnixStream, volumes: SocketVolumes) -> io::Result<()> {
    let mut guest = tokio_stream_of(stream).map_err(io::Error::other)?;
    let header = tokio::time::timeout(HEADER_LIMIT, read_header(&mut guest)).await;
    let header = header.map_err(|_elapsed| io::ErrorKind::TimedOut)??;
    let (node, mut detached) = volumes.connect(header).await?;
    let mut node = tokio::net::UnixStream::from_std(UnixStream::from(node))?;
    tokio::select! {
        copied = tokio::io::copy_bidirectional_with_sizes(&mut guest, &mut node, BUFFER, BUFFER) => copied.map(drop),
        // Never sent to: the volume is gone, and a server that waits for its client would keep the connection.
        _ = detached.changed() => Ok(()),
    }
}

/// Reads the header of a connection. Fails with `InvalidData` if it is invalid.
pub async fn read_header(guest: &mut (impl AsyncRead + Unpin)) -> io::Result<SocketHeader> {
    let mut fixed = [0; FIXED_HEADER];
    guest.read_exact(&mut fixed).await?;
    let (token, client, length) = SocketHeader::decode_fixed(&fixed).ok_or(io::ErrorKind::InvalidData)?;
    let mut name = vec![0; length];
    guest.read_exact(&mut name).await?;
    SocketHeader::from_parts(token, client, name).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
