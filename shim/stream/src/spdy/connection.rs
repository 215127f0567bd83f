//! Runs one connection: a task reads frames and passes bytes to the streams, another one writes. Frames, headers, streams, and
//! the queue of each stream are bounded: a stream that is not read blocks the connection, and thereby the peer.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::frame::{self, Control, FrameError, HEAD, Head};
use super::headers::{Decoder, Encoder, HeaderError, Headers};
use crate::mux::{
    CHUNK, ConnectionLifetime, MAX_QUEUED_MESSAGES, OutgoingMessage, Reader, WINDOW_UPDATE_THRESHOLD, Window, Writer,
};
use bytes::Bytes;
use nacelle_base::Chain;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// The maximum number of streams at a time.
const MAX_STREAMS: usize = 512;
/// The initial window in bytes if no side has set another one (section 2.6.8).
const WINDOW: u32 = 64 << 10;
/// The time that the peer has to read the last bytes and to close the connection.
const LINGER: Duration = Duration::from_secs(10);

/// A stream that the peer has opened.
pub(crate) struct Stream {
    id: u32,
    /// The stream's headers.
    pub headers: Headers,
    /// The bytes from the peer.
    pub reader: Reader,
    /// The bytes to the peer.
    pub writer: Writer,
}

/// A connection whose peer opens streams.
pub(crate) struct Connection {
    /// The new streams. The channel ends with the connection; when the receiver is closed, further streams are refused.
    pub streams: mpsc::Receiver<Stream>,
    /// The lifetime of the connection.
    pub life: ConnectionLifetime,
    out: mpsc::Sender<OutgoingMessage>,
}

/// A client's bytes that violate the protocol.
#[derive(Debug, thiserror::Error)]
enum SpdyError {
    #[error("cannot read from the client")]
    Read(#[from] io::Error),
    #[error("the client sent an invalid SPDY/3 frame")]
    Frame(#[from] FrameError),
    #[error("the client sent an invalid header block")]
    Headers(#[from] HeaderError),
    #[error("the client opened stream {id} after stream {last}")]
    Order { id: u32, last: u32 },
}

impl Connection {
    /// Serves SPDY on this connection.
    pub fn serve(io: impl AsyncRead + AsyncWrite + Send + 'static) -> Connection {
        let (input, output) = tokio::io::split(io);
        let (life, (out, written)) = (ConnectionLifetime::default(), mpsc::channel(MAX_QUEUED_MESSAGES));
        let (announce, streams) = mpsc::channel(MAX_STREAMS);
        let session = Arc::new(Window::new(false, WINDOW.into()));
        let inbound = ConnectionReader {
            input,
            out: out.clone(),
            life: life.clone(),
            announce,
            decoder: Decoder::default(),
            streams: HashMap::new(),
            session,
            initial: (false, WINDOW),
            last: 0,
            owed: 0,
        };
        tokio::spawn(inbound.run());
        tokio::spawn(write_messages(output, written, life.clone()));
        Connection { streams, life, out }
    }

    /// Refuses all further streams, and those that were opened and not received yet.
    pub async fn refuse_streams(&mut self) {
        self.streams.close();
        while let Some(stream) = self.streams.recv().await {
            // A connection without a writer is about to end.
            let _ = self.out.send(OutgoingMessage::Frame(frame::refused(stream.id))).await;
        }
    }

    /// Waits until the peer closes the connection, which it does when all streams have ended. Closes the connection itself after
    /// a timeout.
    pub async fn end(self) {
        if tokio::time::timeout(LINGER, self.life.closed.cancelled()).await.is_err() {
            // A writer that has ended has sent all it could.
            let _ = self.out.send(OutgoingMessage::End).await;
            // The writer closes the connection after `End`. The timeout covers a writer that is blocked.
            let _ = tokio::time::timeout(LINGER, self.life.closed.cancelled()).await;
        }
        self.life.closed.cancel();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.life.closed.cancel();
    }
}

struct StreamState {
    /// `None` after the peer has ended its half.
    data: Option<mpsc::Sender<Bytes>>,
    window: Arc<Window>,
    /// Cancelled when we have ended our half.
    ended: CancellationToken,
}

struct ConnectionReader<R> {
    input: R,
    out: mpsc::Sender<OutgoingMessage>,
    life: ConnectionLifetime,
    announce: mpsc::Sender<Stream>,
    decoder: Decoder,
    streams: HashMap<u32, StreamState>,
    session: Arc<Window>,
    /// For the windows of new streams: whether the peer enforces them, and their size.
    initial: (bool, u32),
    last: u32,
    /// Bytes that were received and not yet added to the session's window.
    owed: usize,
}

impl<R: AsyncRead + Unpin> ConnectionReader<R> {
    async fn run(mut self) {
        let life = self.life.clone();
        tokio::select! {
            () = life.closed.cancelled() => {}
            ended = self.read_frames() => match ended {
                Ok(()) => {}
                Err(SpdyError::Read(error)) => tracing::debug!(%error, "a streaming client has disconnected"),
                Err(error) => tracing::warn!("closing a streaming connection: {}", Chain(&error)),
            },
        }
        life.closed.cancel();
    }

    /// Reads frames until the peer closes the connection between two frames.
    async fn read_frames(&mut self) -> Result<(), SpdyError> {
        loop {
            let mut start = [0; HEAD];
            match self.input.read_exact(&mut start).await {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            };
            match frame::head(start)? {
                Head::Data { id, last, length } => self.read_data(id, last, length).await?,
                Head::Control { kind, flags, length } => {
                    let mut body = vec![0; usize::try_from(length).unwrap_or(0)];
                    self.input.read_exact(&mut body).await?;
                    self.handle_control(frame::control(kind, flags, &body)?).await?;
                }
            }
        }
    }

    async fn read_data(&mut self, id: u32, last: bool, length: u32) -> Result<(), SpdyError> {
        let mut left = usize::try_from(length).unwrap_or(usize::MAX);
        while left > 0 {
            let count = left.min(CHUNK);
            let mut chunk = vec![0; count];
            self.input.read_exact(&mut chunk).await?;
            left -= count;
            self.life.record_activity();
            let entry = self.streams.get(&id);
            if let Some(data) = entry.and_then(|entry| entry.data.as_ref()) {
                // A stream without a reader discards its bytes.
                let _ = data.send(Bytes::from(chunk)).await;
            }
            // The window of each stream, and TCP, limit the peer, so the session's window always reopens.
            self.owed += count;
            if self.owed >= WINDOW_UPDATE_THRESHOLD {
                let owed = u32::try_from(std::mem::take(&mut self.owed)).unwrap_or(u32::MAX);
                self.send(OutgoingMessage::WindowUpdate(0, owed)).await;
            }
        }
        if last {
            self.end_inbound(id);
        }
        Ok(())
    }

    async fn handle_control(&mut self, control: Control) -> Result<(), SpdyError> {
        match control {
            Control::Open { id, last, unidirectional: _, headers } => {
                // The headers are decoded in any case: the next blocks depend on them.
                let headers = self.decoder.decode(&headers)?;
                self.open_stream(id, last, headers).await?;
            }
            Control::Headers { id, last, headers } => {
                self.decoder.decode(&headers)?;
                if last {
                    self.end_inbound(id);
                }
            }
            Control::Reset(id) => {
                if let Some(entry) = self.streams.remove(&id) {
                    entry.ended.cancel();
                    // A writer that waits for the window wakes up and sees that the stream has ended.
                    entry.window.change(i64::from(u32::MAX));
                }
            }
            Control::InitialWindow(size) => {
                let by = i64::from(size) - i64::from(self.initial.1);
                self.streams.values().for_each(|entry| entry.window.change(by));
                self.initial = (true, size);
            }
            Control::Ping(id) => self.send(OutgoingMessage::Frame(frame::ping(id))).await,
            Control::Window(0, bytes) => self.session.change(bytes.into()),
            Control::Window(id, bytes) => {
                if let Some(entry) = self.streams.get(&id) {
                    entry.window.change(bytes.into());
                    self.initial.0 = true;
                }
            }
            Control::GoAway | Control::Other => {}
        }
        Ok(())
    }

    async fn open_stream(&mut self, id: u32, last: bool, headers: Headers) -> Result<(), SpdyError> {
        if id <= self.last || id.is_multiple_of(2) {
            return Err(SpdyError::Order { id, last: self.last });
        }
        self.last = id;
        self.streams.retain(|_, entry| entry.data.is_some() || !entry.ended.is_cancelled());
        let Some(place) = self.announce.try_reserve().ok().filter(|_| self.streams.len() < MAX_STREAMS) else {
            self.send(OutgoingMessage::Frame(frame::refused(id))).await;
            return Ok(());
        };
        let (reader, data) = Reader::new(id, self.out.clone());
        let window = Arc::new(Window::new(self.initial.0, self.initial.1.into()));
        let ended = CancellationToken::new();
        let windows = vec![Arc::clone(&window), Arc::clone(&self.session)];
        let writer = Writer::new(id, self.out.clone(), windows, ended.clone());
        self.streams.insert(id, StreamState { data: Some(data).filter(|_| !last), window, ended });
        // The reply must precede all other frames of the stream.
        if self.out.send(OutgoingMessage::Opened(id)).await.is_ok() {
            place.send(Stream { id, headers, reader, writer });
        }
        Ok(())
    }

    /// Handles the end of the peer's half of the stream.
    fn end_inbound(&mut self, id: u32) {
        if let Some(entry) = self.streams.get_mut(&id) {
            entry.data = None;
        }
    }

    async fn send(&mut self, message: OutgoingMessage) {
        // A connection without a writer is about to end.
        let _ = self.out.send(message).await;
    }
}

async fn write_messages(
    mut output: impl AsyncWrite + Unpin,
    mut written: mpsc::Receiver<OutgoingMessage>,
    life: ConnectionLifetime,
) {
    let all = async {
        let mut encoder = Encoder::new().map_err(io::Error::other)?;
        let mut last = 0;
        while let Some(next) = written.recv().await {
            match next {
                OutgoingMessage::Frame(frame) => output.write_all(&frame).await?,
                OutgoingMessage::Opened(id) => {
                    last = id;
                    let headers = encoder.encode(&[]).map_err(io::Error::other)?;
                    output.write_all(&frame::opened(id, &headers)).await?;
                }
                OutgoingMessage::Data { id, last, bytes } => {
                    output.write_all(&frame::data(id, last, bytes.len())).await?;
                    output.write_all(&bytes).await?;
                    life.record_activity();
                }
                OutgoingMessage::WindowUpdate(id, bytes) => output.write_all(&frame::window(id, bytes)).await?,
                OutgoingMessage::End => {
                    output.write_all(&frame::go_away(last)).await?;
                    break;
                }
            }
            if written.is_empty() {
                output.flush().await?;
            }
        }
        output.shutdown().await
    };
    let ended: io::Result<()> = tokio::select! {
        // A connection that was broken off is not also closed with GOAWAY.
        biased;
        () = life.closed.cancelled() => Ok(()),
        ended = all => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "cannot write to a streaming client");
    }
    life.closed.cancel();
}
