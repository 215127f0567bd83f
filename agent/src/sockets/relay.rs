//! Accepts the connections of containers to the sockets of a volume, and relays each to the pod process over vsock.

use nacelle_base::sockets::{BUFFER, PORT, SocketClient, SocketHeader, SocketToken};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio_vsock::{VsockAddr, VsockStream};

/// The time in which the host must accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause after a failure to accept, for example because the agent has too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Starts to accept connections. Each takes one of the permits; one without a permit is closed at once.
pub(super) fn start(
    listener: std::os::unix::net::UnixListener,
    token: SocketToken,
    name: Vec<u8>,
    permits: Arc<Semaphore>,
) -> io::Result<AbortHandle> {
    let listener = UnixListener::from_std(listener)?;
    Ok(tokio::spawn(accept(listener, (token, name), permits)).abort_handle())
}

/// Returns the header for a connection to the socket `name` of a volume. The server on the node sees the process that has connected here.
fn header_for(stream: &UnixStream, token: SocketToken, name: &[u8]) -> io::Result<Vec<u8>> {
    let peer = stream.peer_cred()?;
    let client = SocketClient::new(peer.uid(), peer.gid()).ok_or(io::ErrorKind::InvalidInput)?;
    SocketHeader { token, client, name: name.to_vec() }.encode().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

async fn accept(listener: UnixListener, (token, name): (SocketToken, Vec<u8>), permits: Arc<Semaphore>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to a socket of the node");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            tracing::debug!("a connection to a socket of the node was closed: the pod has the maximum");
            continue;
        };
        let header = header_for(&stream, token, &name);
        tokio::spawn(async move {
            let relayed = async {
                let header = header?;
                let connected = tokio::time::timeout(CONNECT_TIMEOUT, VsockStream::connect(host())).await;
                relay(stream, connected.map_err(|_late| io::ErrorKind::TimedOut)??, &header).await
            };
            if let Err(error) = relayed.await {
                tracing::debug!(%error, "a connection to a socket of the node has failed");
            }
            drop(permit);
        });
    }
}

fn host() -> VsockAddr {
    VsockAddr::new(libc::VMADDR_CID_HOST, PORT)
}

/// Sends the header, and copies bytes in both directions until both have ended or one fails.
async fn relay(mut stream: UnixStream, mut host: impl AsyncRead + AsyncWrite + Unpin, header: &[u8]) -> io::Result<()> {
    host.write_all(header).await?;
    tokio::io::copy_bidirectional_with_sizes(&mut stream, &mut host, BUFFER, BUFFER).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    #[test]
    fn the_header_names_the_process_that_connects() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let (_container, agent) = UnixStream::pair().unwrap();
        let header = header_for(&agent, SocketToken::new([3; 16]), b"a.sock").unwrap();
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        let ids = [uid.to_le_bytes(), gid.to_le_bytes()].concat();
        assert_eq!(header, [[3; 16].as_slice(), &ids, &[6], b"a.sock"].concat());
    }

    #[test]
    fn each_direction_ends_by_itself() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut container, agent) = UnixStream::pair().unwrap();
            let (host_side, mut host) = tokio::io::duplex(1024);
            let relayed = tokio::spawn(async move { relay(agent, host_side, b"header").await });
            container.write_all(b"question").await.unwrap();
            container.shutdown().await.unwrap();
            let mut sent = Vec::new();
            host.read_to_end(&mut sent).await.unwrap();
            assert_eq!(sent, b"headerquestion");
            host.write_all(b"answer").await.unwrap();
            drop(host);
            let mut received = Vec::new();
            container.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, b"answer");
            relayed.await.unwrap().unwrap();
        });
    }
}
