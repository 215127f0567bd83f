//! Connects to TCP ports of guests at the addresses of their pods: those of machine pods, whose processes have no network of the node.

use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, copy_buf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// The time limit of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The time that a guest has for its answer after the client has closed its direction: a guest that never closes its own would hold the
/// connection forever.
const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// The size of a copy buffer in bytes.
const COPY_BUFFER: usize = 32 << 10;

/// Connects to a port at the first of these addresses that accepts. The returned stream ends when the guest or the caller closes it.
pub(crate) async fn connect_to_guest(addresses: &[IpAddr], port: u16) -> io::Result<UnixStream> {
    let connected = timeout(CONNECT_TIMEOUT, connect_to_any(addresses, port)).await;
    let guest = connected.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))?;
    let (caller, relayed) = UnixStream::pair()?;
    tokio::spawn(relay(relayed, guest));
    Ok(caller)
}

async fn connect_to_any(addresses: &[IpAddr], port: u16) -> io::Result<TcpStream> {
    let mut last_error = io::Error::new(io::ErrorKind::AddrNotAvailable, "the pod has no address");
    for address in addresses {
        match TcpStream::connect((*address, port)).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

/// Copies in both directions. Errors end a direction as its end does: the other side sees a closed stream.
async fn relay(caller: UnixStream, guest: TcpStream) {
    let ((from_caller, to_caller), (from_guest, to_guest)) = (caller.into_split(), guest.into_split());
    let mut upward = pin!(copy_to_end(from_caller, to_guest));
    let mut downward = pin!(copy_to_end(from_guest, to_caller));
    tokio::select! {
        () = &mut downward => upward.await,
        () = &mut upward => {
            let _ = timeout(HALF_CLOSED_TIMEOUT, downward).await;
        }
    }
}

async fn copy_to_end(from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let _ = copy_buf(&mut BufReader::with_capacity(COPY_BUFFER, from), &mut to).await;
    let _ = to.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[tokio::test]
    async fn each_direction_is_closed_for_itself() {
        let listener = TcpListener::bind((LOCAL, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let guest = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = String::new();
            stream.read_to_string(&mut request).await.unwrap();
            stream.write_all(request.to_uppercase().as_bytes()).await.unwrap();
        });
        let mut stream = connect_to_guest(&[LOCAL], port).await.unwrap();
        stream.write_all(b"request").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "REQUEST");
        guest.await.unwrap();
    }

    #[tokio::test]
    async fn a_closed_port_is_an_error() {
        let port = TcpListener::bind((LOCAL, 0)).await.unwrap().local_addr().unwrap().port();
        assert_eq!(connect_to_guest(&[LOCAL], port).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(connect_to_guest(&[], port).await.unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
    }

    #[tokio::test]
    async fn the_guest_sees_that_the_caller_has_gone() {
        let listener = TcpListener::bind((LOCAL, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stream, accepted) = tokio::join!(connect_to_guest(&[LOCAL], port), listener.accept());
        drop(stream.unwrap());
        assert_eq!(accepted.unwrap().0.read(&mut [0]).await.unwrap(), 0);
    }
}
