//! Runs one connection: a task reads frames and passes bytes to the streams, another one writes. Frames, headers, streams, and
//! the queue of each stream are bounded: a stream that is not read blocks the connection, and thereby the peer.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::frame::{self, Control, FrameError, HEAD, Head};
use super::headers::{Decoder, Encoder, HeaderError, Headers};
use crate::mux::{CHUNK, Life, OUT, Out, Reader, TELL, Window, Writer};
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
const STREAMS: usize = 512;
/// The initial window in bytes if no side has set another one (section 2.6.8).
const WINDOW: u32 = 64 << 10;
/// The time that the peer has to read the last bytes and to close the connection.
const LINGER: Duration = Duration::from_secs(10);

/// A stream that the peer has opened.
pub(crate) struct Stream {
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
    pub life: Life,
    out: mpsc::Sender<Out>,
}

#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("cannot read from the client")]
    Read(#[from] io::Error),
    #[error("the client sent no frame of SPDY/3")]
    Frame(#[from] FrameError),
    #[error("the client sent headers that cannot be read")]
    Headers(#[from] HeaderError),
    #[error("the client opened stream {id} after stream {last}")]
    Order { id: u32, last: u32 },
}

impl Connection {
    /// Serves SPDY on this connection.
    pub fn serve(io: impl AsyncRead + AsyncWrite + Send + 'static) -> Connection {
        let (input, output) = tokio::io::split(io);
        let (life, (out, written)) = (Life::default(), mpsc::channel(OUT));
        let (announce, streams) = mpsc::channel(STREAMS);
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
        tokio::spawn(write(output, written, life.clone()));
        Connection { streams, life, out }
    }

    /// Waits until the peer closes the connection, which it does when all streams have ended. Closes the connection itself after
    /// a timeout.
    pub async fn end(self) {
        if tokio::time::timeout(LINGER, self.life.gone.cancelled()).await.is_err() {
            // A writer that has ended has sent all it could.
            let _ = self.out.send(Out::End).await;
            // The writer closes the connection after `End`. The timeout covers a writer that is blocked.
            let _ = tokio::time::timeout(LINGER, self.life.gone.cancelled()).await;
        }
        self.life.gone.cancel();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.life.gone.cancel();
    }
}

struct Entry {
    /// `None` after the peer has ended its half.
    data: Option<mpsc::Sender<Bytes>>,
    window: Arc<Window>,
    /// Cancelled when we have ended our half.
    ended: CancellationToken,
}

struct ConnectionReader<R> {
    input: R,
    out: mpsc::Sender<Out>,
    life: Life,
    announce: mpsc::Sender<Stream>,
    decoder: Decoder,
    streams: HashMap<u32, Entry>,
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
            () = life.gone.cancelled() => {}
            ended = self.read() => match ended {
                Ok(()) => {}
                Err(Broken::Read(error)) => tracing::debug!(%error, "a streaming client is gone"),
                Err(error) => tracing::warn!("a streaming connection is ended: {}", Chain(&error)),
            },
        }
        life.gone.cancel();
    }

    /// Reads frames until the peer closes the connection between two frames.
    async fn read(&mut self) -> Result<(), Broken> {
        loop {
            let mut start = [0; HEAD];
            match self.input.read_exact(&mut start).await {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            };
            match frame::head(start)? {
                Head::Data { id, last, length } => self.data(id, last, length).await?,
                Head::Control { kind, flags, length } => {
                    let mut body = vec![0; usize::try_from(length).unwrap_or(0)];
                    self.input.read_exact(&mut body).await?;
                    self.control(frame::control(kind, flags, &body)?).await?;
                }
            }
        }
    }

    async fn data(&mut self, id: u32, last: bool, length: u32) -> Result<(), Broken> {
        let mut left = usize::try_from(length).unwrap_or(usize::MAX);
        while left > 0 {
            let count = left.min(CHUNK);
            let mut chunk = vec![0; count];
            self.input.read_exact(&mut chunk).await?;
            left -= count;
            self.life.moved();
            let entry = self.streams.get(&id);
            if let Some(data) = entry.and_then(|entry| entry.data.as_ref()) {
                // A stream without a reader discards its bytes.
                let _ = data.send(Bytes::from(chunk)).await;
            }
            // The window of each stream, and TCP, limit the peer, so the session's window always reopens.
            self.owed += count;
            if self.owed >= TELL {
                let owed = u32::try_from(std::mem::take(&mut self.owed)).unwrap_or(u32::MAX);
                self.say(Out::Taken(0, owed)).await;
            }
        }
        if last {
            self.half(id);
        }
        Ok(())
    }

    async fn control(&mut self, control: Control) -> Result<(), Broken> {
        match control {
            Control::Open { id, last, deaf: _, headers } => {
                // The headers are decoded in any case: the next blocks depend on them.
                let headers = self.decoder.decode(&headers)?;
                self.open(id, last, headers).await?;
            }
            Control::Headers { id, last, headers } => {
                self.decoder.decode(&headers)?;
                if last {
                    self.half(id);
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
            Control::Ping(id) => self.say(Out::Frame(frame::ping(id))).await,
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

    async fn open(&mut self, id: u32, last: bool, headers: Headers) -> Result<(), Broken> {
        if id <= self.last || id.is_multiple_of(2) {
            return Err(Broken::Order { id, last: self.last });
        }
        self.last = id;
        self.streams.retain(|_, entry| entry.data.is_some() || !entry.ended.is_cancelled());
        let Some(place) = self.announce.try_reserve().ok().filter(|_| self.streams.len() < STREAMS) else {
            self.say(Out::Frame(frame::refused(id))).await;
            return Ok(());
        };
        let (reader, data) = Reader::new(id, self.out.clone());
        let window = Arc::new(Window::new(self.initial.0, self.initial.1.into()));
        let ended = CancellationToken::new();
        let windows = vec![Arc::clone(&window), Arc::clone(&self.session)];
        let writer = Writer::new(id, self.out.clone(), windows, ended.clone());
        self.streams.insert(id, Entry { data: Some(data).filter(|_| !last), window, ended });
        // The reply must precede all other frames of the stream.
        if self.out.send(Out::Opened(id)).await.is_ok() {
            place.send(Stream { headers, reader, writer });
        }
        Ok(())
    }

    /// Handles the end of the peer's half of the stream.
    fn half(&mut self, id: u32) {
        if let Some(entry) = self.streams.get_mut(&id) {
            entry.data = None;
        }
    }

    async fn say(&mut self, what: Out) {
        // A connection without a writer is about to end.
        let _ = self.out.send(what).await;
    }
}

async fn write(mut output: impl AsyncWrite + Unpin, mut written: mpsc::Receiver<Out>, life: Life) {
    let all = async {
        let mut encoder = Encoder::new().map_err(io::Error::other)?;
        let mut last = 0;
        while let Some(next) = written.recv().await {
            match next {
                Out::Frame(frame) => output.write_all(&frame).await?,
                Out::Opened(id) => {
                    last = id;
                    let headers = encoder.encode(&[]).map_err(io::Error::other)?;
                    output.write_all(&frame::opened(id, &headers)).await?;
                }
                Out::Data { id, last, bytes } => {
                    output.write_all(&frame::data(id, last, bytes.len())).await?;
                    output.write_all(&bytes).await?;
                    life.moved();
                }
                Out::Taken(id, bytes) => output.write_all(&frame::window(id, bytes)).await?,
                Out::End => {
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
        // A connection that was broken off is not also closed as if all had been said.
        biased;
        () = life.gone.cancelled() => Ok(()),
        ended = all => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a streaming client does not read any more");
    }
    life.gone.cancel();
}
