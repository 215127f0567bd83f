//! Accepts the host's connections: on a vsock port in a guest, on a Unix socket on the node.
//!
//! Connections that do not come from the host are dropped, because the services obey every client.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::Stream;
use tokio_vsock::{VsockListener, VsockStream};
use tonic::transport::server::Connected;

use crate::sys;

/// A listening socket, before the runtime exists.
#[derive(Debug)]
pub enum HostSocket {
    /// A vsock port of the guest.
    Vsock(OwnedFd),
    /// A socket in the pod's directory, which only the node's root can enter.
    Unix(OwnedFd),
}

impl AsRef<OwnedFd> for HostSocket {
    fn as_ref(&self) -> &OwnedFd {
        let (HostSocket::Vsock(fd) | HostSocket::Unix(fd)) = self;
        fd
    }
}

/// A listening socket in the runtime.
pub enum HostListener {
    /// See [`Socket::Vsock`].
    Vsock(VsockListener),
    /// See [`Socket::Unix`].
    Unix(UnixListener),
}

impl HostListener {
    /// Registers a socket with the runtime. Must be called inside one.
    pub fn new(socket: HostSocket) -> io::Result<HostListener> {
        match socket {
            HostSocket::Vsock(fd) => Ok(HostListener::Vsock(sys::vsock_listener(fd))),
            HostSocket::Unix(fd) => {
                let listener = std::os::unix::net::UnixListener::from(fd);
                listener.set_nonblocking(true)?;
                UnixListener::from_std(listener).map(HostListener::Unix)
            }
        }
    }

    /// Accepts the next connection of the host.
    pub async fn accept(&self) -> io::Result<HostConnection> {
        loop {
            match self {
                HostListener::Unix(listener) => {
                    return listener.accept().await.map(|(stream, _)| HostConnection::Unix(stream));
                }
                HostListener::Vsock(listener) => match listener.accept().await? {
                    (stream, peer) if peer.cid() == libc::VMADDR_CID_HOST => return Ok(HostConnection::Vsock(stream)),
                    (_, peer) => {
                        tracing::warn!(cid = peer.cid(), "dropped a connection that does not come from the host")
                    }
                },
            }
        }
    }

    /// Returns a stream of the host's connections.
    pub fn incoming(self) -> impl Stream<Item = io::Result<HostConnection>> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move { while sender.send(self.accept().await).await.is_ok() {} });
        tokio_stream::wrappers::ReceiverStream::new(receiver)
    }
}

/// A connection of the host.
pub enum HostConnection {
    /// A connection over vsock.
    Vsock(VsockStream),
    /// A connection over a Unix socket of the node.
    Unix(UnixStream),
}

impl Connected for HostConnection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

macro_rules! delegate {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            HostConnection::Vsock($stream) => $call,
            HostConnection::Unix($stream) => $call,
        }
    };
}

impl AsyncRead for HostConnection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl AsyncWrite for HostConnection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        delegate!(self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => Pin::new(stream).poll_shutdown(context))
    }
}
