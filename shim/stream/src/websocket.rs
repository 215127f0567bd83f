//! Owns: WebSockets (RFC 6455): exec and attach as numbered channels in one, port-forward as SPDY inside one.

use crate::mux::{CHUNK, Life, OUT, Out, Reader, Writer};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_util::sync::CancellationToken;

/// The most bytes of one message.
const MESSAGE: usize = 1 << 20;
/// What is held of SPDY inside a WebSocket, each way.
const TUNNEL: usize = 64 << 10;
/// For the peer to hang up when all is said.
const LINGER: Duration = Duration::from_secs(10);

/// The numbers of the channels.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// Since v5: the channel whose number follows has ended.
const ENDED: u8 = 255;

async fn socket<T: AsyncRead + AsyncWrite + Unpin>(io: T) -> WebSocketStream<T> {
    let config = WebSocketConfig::default().max_message_size(Some(MESSAGE)).max_frame_size(Some(MESSAGE));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// The last message: all is well.
fn goodbye() -> Message {
    Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() }))
}

/// The bytes of a message; none: it has none for us.
fn payload(message: Message) -> Option<Bytes> {
    match message {
        Message::Binary(bytes) => Some(bytes),
        Message::Text(text) => Some(text.into()),
        _ => None,
    }
}

/// A WebSocket whose messages begin with the number of their channel.
pub(crate) struct Socket {
    /// What ends with it.
    pub life: Life,
    out: mpsc::Sender<Out>,
}

/// All channels of a WebSocket.
pub(crate) struct Ends {
    pub stdin: Reader,
    pub stdout: Writer,
    pub stderr: Writer,
    pub error: Writer,
    pub resize: Reader,
}

impl Socket {
    /// Serves the channels. With `ends`, the client can end its input by a message.
    pub async fn serve(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, ends: bool) -> (Socket, Ends) {
        let (output, input) = socket(io).await.split();
        let (life, (out, written)) = (Life::default(), mpsc::channel(OUT));
        let (stdin, to_stdin) = Reader::new(STDIN.into(), out.clone());
        let (resize, to_resize) = Reader::new(RESIZE.into(), out.clone());
        let writer = |id: u8| Writer::new(id.into(), out.clone(), Vec::new(), CancellationToken::new());
        let (stdout, stderr, error) = (writer(STDOUT), writer(STDERR), writer(ERROR));
        tokio::spawn(read(input, [Some(to_stdin), Some(to_resize)], ends, life.clone()));
        tokio::spawn(write(output, written, life.clone()));
        (Socket { life, out }, Ends { stdin, stdout, stderr, error, resize })
    }

    /// Says goodbye and waits until the peer has done so; leaves one that does not.
    pub async fn end(self) {
        // A writer that has ended has said all it could.
        let _ = self.out.send(Out::End).await;
        let _ = tokio::time::timeout(LINGER, self.life.gone.cancelled()).await;
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.life.gone.cancel();
    }
}

async fn read<T: AsyncRead + AsyncWrite + Unpin>(
    mut input: SplitStream<WebSocketStream<T>>,
    [mut stdin, mut resize]: [Option<mpsc::Sender<Bytes>>; 2],
    ends: bool,
    life: Life,
) {
    let all = async {
        while let Some(message) = input.next().await {
            life.moved();
            let Some(mut bytes) = payload(message?).filter(|bytes| !bytes.is_empty()) else { continue };
            let channel = bytes.split_to(1);
            let known = match *channel {
                [STDIN] => &mut stdin,
                [RESIZE] => &mut resize,
                [ENDED] if ends => {
                    match *bytes {
                        [STDIN] => stdin = None,
                        [RESIZE] => resize = None,
                        _ => {}
                    }
                    continue;
                }
                _ => continue,
            };
            if let Some(known) = known {
                // Nobody reads it any more: it is thrown away.
                let _ = known.send(bytes).await;
            }
        }
        Ok::<_, Error>(())
    };
    let ended = tokio::select! {
        () = life.gone.cancelled() => Ok(()),
        ended = all => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a streaming client is gone");
    }
    life.gone.cancel();
}

async fn write<T: AsyncRead + AsyncWrite + Unpin>(
    mut output: SplitSink<WebSocketStream<T>, Message>,
    mut written: mpsc::Receiver<Out>,
    life: Life,
) {
    let all = async {
        // Clients wait for a first message.
        output.send(Message::Binary(Bytes::from_static(&[STDOUT]))).await?;
        while let Some(next) = written.recv().await {
            match next {
                // The end of a channel is that of all.
                Out::Data { bytes, .. } if bytes.is_empty() => {}
                Out::Data { id, bytes, .. } => {
                    let mut message = BytesMut::with_capacity(bytes.len() + 1);
                    message.put_u8(u8::try_from(id).unwrap_or(ERROR));
                    message.put(bytes);
                    output.feed(Message::Binary(message.freeze())).await?;
                    life.moved();
                }
                Out::End => {
                    output.send(goodbye()).await?;
                    break;
                }
                // WebSockets have no windows, and channels are not opened.
                Out::Frame(_) | Out::Opened(_) | Out::Taken(..) => {}
            }
            if written.is_empty() {
                output.flush().await?;
            }
        }
        // The reader sees the peer's goodbye, and ends all.
        life.gone.cancelled().await;
        Ok::<_, Error>(())
    };
    let ended = tokio::select! {
        () = life.gone.cancelled() => Ok(()),
        ended = all => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a streaming client does not read any more");
    }
    life.gone.cancel();
}

/// The bytes inside a WebSocket's messages, both ways, as a connection.
pub(crate) async fn tunnel(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> DuplexStream {
    let (near, far) = duplex(TUNNEL);
    let ((output, input), (from, to)) = (socket(io).await.split(), split(far));
    tokio::spawn(async move {
        // Either end ends both.
        let ended = tokio::select! {
            ended = unwrap(input, to) => ended,
            ended = wrap(from, output) => ended,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a streaming client is gone");
        }
    });
    near
}

async fn unwrap<T: AsyncRead + AsyncWrite + Unpin>(
    mut input: SplitStream<WebSocketStream<T>>,
    mut to: WriteHalf<DuplexStream>,
) -> Result<(), Error> {
    while let Some(message) = input.next().await {
        if let Some(bytes) = payload(message?) {
            to.write_all(&bytes).await?;
        }
    }
    to.shutdown().await?;
    Ok(())
}

async fn wrap<T: AsyncRead + AsyncWrite + Unpin>(
    mut from: ReadHalf<DuplexStream>,
    mut output: SplitSink<WebSocketStream<T>, Message>,
) -> Result<(), Error> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK);
        if from.read_buf(&mut buffer).await? == 0 {
            return output.send(goodbye()).await;
        }
        output.send(Message::Binary(buffer.split().freeze())).await?;
    }
}
