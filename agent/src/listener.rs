//! Owns: where the host's connections arrive: a vsock port of the guest, or a socket of the node where there is no guest.
//! Who else can reach it is turned away: what listens obeys everybody.

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

/// A socket that listens, before there is a runtime.
#[derive(Debug)]
pub enum Socket {
    /// A port of the guest.
    Vsock(OwnedFd),
    /// A socket in the pod's folder, which only the node's root can enter.
    Unix(OwnedFd),
}

impl AsRef<OwnedFd> for Socket {
    fn as_ref(&self) -> &OwnedFd {
        let (Socket::Vsock(fd) | Socket::Unix(fd)) = self;
        fd
    }
}

/// The same in a runtime.
pub enum Listener {
    /// See [`Socket::Vsock`].
    Vsock(VsockListener),
    /// See [`Socket::Unix`].
    Unix(UnixListener),
}

impl Listener {
    /// Must be called inside a runtime.
    pub fn new(socket: Socket) -> io::Result<Listener> {
        match socket {
            Socket::Vsock(fd) => Ok(Listener::Vsock(sys::vsock_listener(fd))),
            Socket::Unix(fd) => {
                let listener = std::os::unix::net::UnixListener::from(fd);
                listener.set_nonblocking(true)?;
                UnixListener::from_std(listener).map(Listener::Unix)
            }
        }
    }

    /// The next connection of the host.
    pub async fn accept(&self) -> io::Result<Connection> {
        loop {
            match self {
                Listener::Unix(listener) => return listener.accept().await.map(|(stream, _)| Connection::Unix(stream)),
                Listener::Vsock(listener) => match listener.accept().await? {
                    (stream, peer) if peer.cid() == libc::VMADDR_CID_HOST => return Ok(Connection::Vsock(stream)),
                    (_, peer) => tracing::warn!(cid = peer.cid(), "a connection that does not come from the host"),
                },
            }
        }
    }

    /// All connections of the host.
    pub fn incoming(self) -> impl Stream<Item = io::Result<Connection>> {
        let (tell, told) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move { while tell.send(self.accept().await).await.is_ok() {} });
        tokio_stream::wrappers::ReceiverStream::new(told)
    }
}

/// A connection of the host.
pub enum Connection {
    /// Over vsock.
    Vsock(VsockStream),
    /// On the node.
    Unix(UnixStream),
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

macro_rules! delegate {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Connection::Vsock($stream) => $call,
            Connection::Unix($stream) => $call,
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl AsyncWrite for Connection {
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
