//! Wraps connections to the daemon's socket so that clients of gRPC's C core are accepted ([`AuthorityFilter`]).

use nacelle_stream::AuthorityFilter;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// The number of bytes in one read.
const CHUNK: usize = 16 << 10;

/// A connection whose client may use gRPC's C core.
#[derive(Debug)]
pub struct GrpcConnection<T> {
    io: T,
    filter: AuthorityFilter,
    /// Filtered data; the part from `read` on has not been read yet.
    passed: Vec<u8>,
    read: usize,
    ended: bool,
}

impl<T> GrpcConnection<T> {
    /// Filters the data of this connection's client.
    pub fn new(io: T) -> GrpcConnection<T> {
        GrpcConnection { io, filter: AuthorityFilter::new(), passed: Vec::new(), read: 0, ended: false }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for GrpcConnection<T> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let waiting = this.passed.get(this.read..).unwrap_or_default();
            if !waiting.is_empty() || this.ended {
                let now = waiting.len().min(buffer.remaining());
                buffer.put_slice(waiting.get(..now).unwrap_or_default());
                this.read += now;
                return Poll::Ready(Ok(()));
            }
            this.passed.clear();
            this.read = 0;
            let mut bytes = [0; CHUNK];
            let mut bytes = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.io).poll_read(context, &mut bytes))?;
            match bytes.filled() {
                [] => {
                    this.ended = true;
                    this.filter.finish(&mut this.passed);
                }
                bytes => this.filter.filter(bytes, &mut this.passed),
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for GrpcConnection<T> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

impl<T: Connected> Connected for GrpcConnection<T> {
    type ConnectInfo = T::ConnectInfo;

    fn connect_info(&self) -> T::ConnectInfo {
        self.io.connect_info()
    }
}
