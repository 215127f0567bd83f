//! Connects to TCP ports of guests at the addresses of their pods: those of machine pods, whose processes have no network of the node.
//!
//! A guest may accept connections and neither read, write nor close them. So a connection ends soon after its caller has gone, and with
//! its pod, and their number is bounded.

use crate::sys;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, Interest, copy_buf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// The time limit of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The time for what is under way to the guest after the caller has closed its stream.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of connections to guests.
const MAX_CONNECTIONS: usize = 4096;
/// The size of a copy buffer in bytes.
const COPY_BUFFER: usize = 32 << 10;

/// The connections to ports of guests.
pub(crate) struct GuestPorts {
    permits: Arc<Semaphore>,
}

impl Default for GuestPorts {
    fn default() -> Self {
        GuestPorts { permits: Arc::new(Semaphore::new(MAX_CONNECTIONS)) }
    }
}

impl GuestPorts {
    /// Connects to a port at the first of these addresses that accepts. The connection ends when the guest or the caller closes it, and
    /// when `pod_ended` completes: the addresses may belong to another pod afterwards.
    pub(crate) async fn connect(
        &self,
        addresses: &[IpAddr],
        port: u16,
        pod_ended: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<UnixStream> {
        let all_used = |_| io::Error::new(io::ErrorKind::QuotaExceeded, "there are 4096 connections to guests");
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(all_used)?;
        let mut pod_ended = Box::pin(pod_ended);
        let guest = tokio::select! {
            biased;
            () = &mut pod_ended => return Err(io::Error::new(io::ErrorKind::NotConnected, "the pod has ended")),
            connected = timeout(CONNECT_TIMEOUT, connect_to_any(addresses, port)) => {
                connected.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))?
            }
        };
        let (caller, relayed) = UnixStream::pair()?;
        let closed = ClosedStream::new(&relayed)?;
        tokio::spawn(async move {
            tokio::select! {
                () = relay(relayed, guest, closed, permit) => {}
                () = pod_ended => {}
            }
        });
        Ok(caller)
    }
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

/// Copies in both directions until both have ended, or the caller has closed its stream. Errors end a direction as its end does: the
/// other side sees a closed stream.
async fn relay(caller: UnixStream, guest: TcpStream, closed: ClosedStream, _permit: OwnedSemaphorePermit) {
    let ((from_caller, to_caller), (from_guest, to_guest)) = (caller.into_split(), guest.into_split());
    let copying = async { tokio::join!(copy_to_end(from_caller, to_guest), copy_to_end(from_guest, to_caller)) };
    tokio::pin!(copying);
    tokio::select! {
        _ = &mut copying => {}
        () = closed.wait() => {
            let _ = timeout(DRAIN_TIMEOUT, copying).await;
        }
    }
}

async fn copy_to_end(from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let _ = copy_buf(&mut BufReader::with_capacity(COPY_BUFFER, from), &mut to).await;
    let _ = to.shutdown().await;
}

/// Waits until the other end of a stream is closed in both directions, which epoll reports as EPOLLHUP without being asked
/// (epoll_ctl(2)). The end of one direction is not reported.
struct ClosedStream(AsyncFd<OwnedFd>);

impl ClosedStream {
    fn new(stream: &UnixStream) -> io::Result<ClosedStream> {
        let duplicate = std::os::fd::AsFd::as_fd(stream).try_clone_to_owned()?;
        Ok(ClosedStream(sys::watch_priority(duplicate)?))
    }

    async fn wait(&self) {
        // There is no urgent data on Unix sockets. If the runtime ends, so does everything else.
        let _ = self.0.ready(Interest::PRIORITY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::net::Ipv4Addr;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;
    use tokio::sync::oneshot;

    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const LIMIT: Duration = Duration::from_secs(60);

    async fn listen() -> (TcpListener, u16) {
        let listener = TcpListener::bind((LOCAL, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    /// Waits until all connections have ended.
    async fn all_ended(ports: &GuestPorts) {
        let all = ports.permits.acquire_many(MAX_CONNECTIONS.try_into().unwrap());
        drop(timeout(LIMIT, all).await.expect("a connection has not ended").unwrap());
    }

    #[tokio::test]
    async fn each_direction_is_closed_for_itself() {
        let (listener, port) = listen().await;
        let guest = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = String::new();
            stream.read_to_string(&mut request).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
            stream.write_all(request.to_uppercase().as_bytes()).await.unwrap();
        });
        let ports = GuestPorts::default();
        let mut stream = ports.connect(&[LOCAL], port, pending()).await.unwrap();
        stream.write_all(b"request").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "REQUEST");
        guest.await.unwrap();
        all_ended(&ports).await;
    }

    #[tokio::test]
    async fn a_closed_port_is_an_error() {
        let port = listen().await.1;
        let ports = GuestPorts::default();
        let refused = |addresses: &'static [IpAddr]| ports.connect(addresses, port, pending());
        assert_eq!(refused(&[LOCAL]).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(refused(&[]).await.unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
        all_ended(&ports).await;
    }

    #[tokio::test]
    async fn a_guest_that_neither_reads_nor_closes_holds_nothing() {
        let (listener, port) = listen().await;
        let ports = GuestPorts::default();
        let (stream, accepted) = tokio::join!(ports.connect(&[LOCAL], port, pending()), listener.accept());
        let (mut stream, _guest) = (stream.unwrap(), accepted.unwrap().0);
        // More than all buffers on the way hold.
        let sent = timeout(Duration::from_millis(500), stream.write_all(&vec![0; 64 << 20])).await;
        assert!(sent.is_err(), "the guest does not read");
        drop(stream);
        all_ended(&ports).await;
    }

    #[tokio::test]
    async fn the_guest_sees_that_the_caller_has_gone() {
        let (listener, port) = listen().await;
        let ports = GuestPorts::default();
        let (stream, accepted) = tokio::join!(ports.connect(&[LOCAL], port, pending()), listener.accept());
        drop(stream.unwrap());
        assert_eq!(accepted.unwrap().0.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_connection_ends_with_its_pod() {
        let (listener, port) = listen().await;
        let ports = GuestPorts::default();
        let (end, ended) = oneshot::channel::<()>();
        let pod_ended = async move { drop(ended.await) };
        let (stream, accepted) = tokio::join!(ports.connect(&[LOCAL], port, pod_ended), listener.accept());
        let (mut stream, _guest) = (stream.unwrap(), accepted.unwrap().0);
        drop(end);
        assert_eq!(timeout(LIMIT, stream.read(&mut [0])).await.unwrap().unwrap(), 0);
        all_ended(&ports).await;
        let error = ports.connect(&[LOCAL], port, std::future::ready(())).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    }
}
