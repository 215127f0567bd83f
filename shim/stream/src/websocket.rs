//! Serves WebSockets (RFC 6455): exec, attach and ports as numbered channels, port-forward as SPDY inside a WebSocket.

use crate::mux::{CHUNK, ConnectionLifetime, MAX_QUEUED_MESSAGES, OutgoingMessage, Reader, Writer};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_util::sync::CancellationToken;

/// The maximum size of one message in bytes.
const MAX_MESSAGE: usize = 1 << 20;
/// The buffer in bytes of SPDY inside a WebSocket, in each direction.
const TUNNEL_BUFFER: usize = 64 << 10;
/// The pause between two pongs while messages of the peer wait, and so its pings. Clients of Kubernetes give up after a minute
/// without a pong (k8s.io/client-go, tools/remotecommand/websocket.go).
const PONG_INTERVAL: Duration = Duration::from_secs(10);
/// The time that the peer has to close the connection at the end.
const LINGER: Duration = Duration::from_secs(10);

/// The numbers of the channels.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// Since v5: the channel whose number follows has ended.
const CLOSE_CHANNEL: u8 = 255;

async fn accept_socket<T: AsyncRead + AsyncWrite + Unpin>(io: T) -> WebSocketStream<T> {
    let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// Returns the close message with the status Normal.
fn close_message() -> Message {
    Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() }))
}

/// The coding of channel messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    /// Binary messages whose first byte is the channel.
    Binary,
    /// Like `Binary`; the client can also end its input with a message on channel 255 (since v5).
    BinaryWithEnd,
    /// Text messages: the channel as a character, then the bytes in base64.
    Base64,
}

/// The last channel that one character of a text message can name: the character with this offset from '0'.
const LAST_IN_TEXT: u8 = 127 - b'0';

/// A client's message that violates the protocol.
#[derive(Debug, thiserror::Error)]
enum WebSocketError {
    #[error("a message is not base64")]
    Base64(#[from] base64::DecodeError),
    #[error("a message violates the WebSocket protocol")]
    Socket(#[from] Error),
}

impl Coding {
    /// Returns the channel and the bytes of a message; `None` if the message has no channel.
    fn decode(self, message: Message) -> Result<Option<(u8, Bytes)>, WebSocketError> {
        let Some(mut bytes) = payload(message).filter(|bytes| !bytes.is_empty()) else { return Ok(None) };
        let channel = bytes.split_to(1).first().copied().unwrap_or_default();
        if self != Coding::Base64 {
            return Ok(Some((channel, bytes)));
        }
        let Some(channel) = channel.checked_sub(b'0') else { return Ok(None) };
        Ok(Some((channel, STANDARD.decode(&bytes)?.into())))
    }

    fn encode(self, channel: u8, bytes: &[u8]) -> Message {
        if self == Coding::Base64 {
            let mut text = String::with_capacity(1 + bytes.len().div_ceil(3) * 4);
            text.push(char::from(b'0' + channel.min(LAST_IN_TEXT)));
            STANDARD.encode_string(bytes, &mut text);
            return Message::Text(text.into());
        }
        let mut message = BytesMut::with_capacity(bytes.len() + 1);
        message.put_u8(channel);
        message.put_slice(bytes);
        Message::Binary(message.freeze())
    }
}

/// Returns the bytes of a message; `None` for a control message.
fn payload(message: Message) -> Option<Bytes> {
    match message {
        Message::Binary(bytes) => Some(bytes),
        Message::Text(text) => Some(text.into()),
        _ => None,
    }
}

/// A WebSocket whose messages begin with the number of their channel.
pub(crate) struct Socket {
    /// Ends the connection, and records that bytes have moved.
    pub life: ConnectionLifetime,
    out: mpsc::Sender<OutgoingMessage>,
}

/// All channels of a WebSocket.
pub(crate) struct CommandChannels {
    pub stdin: Reader,
    pub stdout: Writer,
    pub stderr: Writer,
    pub error: Writer,
    pub resize: Reader,
}

/// The channels of a port.
pub(crate) struct PortChannels {
    pub port: u16,
    pub reader: Reader,
    pub writer: Writer,
    pub error: Writer,
}

impl Socket {
    /// Serves the channels of a command or of a container.
    pub async fn serve(
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        coding: Coding,
    ) -> (Socket, CommandChannels) {
        let (life, (out, written)) = (ConnectionLifetime::default(), mpsc::channel(MAX_QUEUED_MESSAGES));
        let (stdin, to_stdin) = Reader::new(STDIN.into(), out.clone());
        let (resize, to_resize) = Reader::new(RESIZE.into(), out.clone());
        let writer = |id: u8| Writer::new(id.into(), out.clone(), Vec::new(), CancellationToken::new());
        let (stdout, stderr, error) = (writer(STDOUT), writer(STDERR), writer(ERROR));
        let readers = vec![Some(to_stdin), None, None, None, Some(to_resize)];
        let (output, input) = accept_socket(io).await.split();
        let stalled = StallState::default();
        tokio::spawn(read_messages(input, readers, coding, stalled.clone(), life.clone()));
        tokio::spawn(write_messages(output, written, coding, Some(STDOUT), stalled, life.clone()));
        (Socket { life, out }, CommandChannels { stdin, stdout, stderr, error, resize })
    }

    /// Serves two channels for each port: its bytes and its error. Both begin with the port number in two bytes, little-endian.
    pub async fn serve_ports(
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        coding: Coding,
        ports: &[u16],
    ) -> (Socket, Vec<PortChannels>) {
        let (life, (out, written)) = (ConnectionLifetime::default(), mpsc::channel(MAX_QUEUED_MESSAGES));
        let (mut readers, mut ends) = (Vec::new(), Vec::new());
        for (channel, port) in (0..u8::MAX).step_by(2).zip(ports) {
            let (reader, to_reader) = Reader::new(channel.into(), out.clone());
            let writer = |id: u8| Writer::new(id.into(), out.clone(), Vec::new(), CancellationToken::new());
            ends.push(PortChannels { port: *port, reader, writer: writer(channel), error: writer(channel + 1) });
            readers.extend([Some(to_reader), None]);
        }
        let (output, input) = accept_socket(io).await.split();
        let stalled = StallState::default();
        tokio::spawn(read_messages(input, readers, coding, stalled.clone(), life.clone()));
        tokio::spawn(write_messages(output, written, coding, None, stalled, life.clone()));
        for PortChannels { port, writer, error, .. } in &ends {
            for writer in [writer, error] {
                // A client that has disconnected needs no port number.
                let _ = writer.send(Bytes::copy_from_slice(&port.to_le_bytes())).await;
            }
        }
        (Socket { life, out }, ends)
    }

    /// Sends the close message and waits for the peer's, for a bounded time.
    pub async fn end(self) {
        // A writer that has ended has sent all it could.
        let _ = self.out.send(OutgoingMessage::End).await;
        let _ = tokio::time::timeout(LINGER, self.life.closed.cancelled()).await;
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.life.closed.cancel();
    }
}

/// Whether a message of the peer waits for the reader of its channel. Later messages, among them pings, are not read meanwhile.
#[derive(Clone)]
struct StallState {
    waits: Arc<AtomicBool>,
    /// The pause between two pongs while a message waits.
    pong_interval: Duration,
}

impl Default for StallState {
    fn default() -> StallState {
        StallState { waits: Arc::default(), pong_interval: PONG_INTERVAL }
    }
}

async fn read_messages<T: AsyncRead + AsyncWrite + Unpin>(
    mut input: SplitStream<WebSocketStream<T>>,
    mut readers: Vec<Option<mpsc::Sender<Bytes>>>,
    coding: Coding,
    stalled: StallState,
    life: ConnectionLifetime,
) {
    let all = async {
        while let Some(message) = input.next().await {
            life.record_activity();
            let Some((channel, bytes)) = coding.decode(message?)? else { continue };
            if channel == CLOSE_CHANNEL && coding == Coding::BinaryWithEnd {
                if let [ended] = *bytes
                    && let Some(reader) = readers.get_mut(usize::from(ended))
                {
                    *reader = None;
                }
            } else if let Some(Some(reader)) = readers.get(usize::from(channel)) {
                stalled.waits.store(true, Ordering::Relaxed);
                // Bytes of a channel without a reader are discarded.
                let _ = reader.send(bytes).await;
                stalled.waits.store(false, Ordering::Relaxed);
            }
        }
        Ok::<_, WebSocketError>(())
    };
    let ended = tokio::select! {
        () = life.closed.cancelled() => Ok(()),
        ended = all => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a streaming client has disconnected");
    }
    life.closed.cancel();
}

async fn write_messages<T: AsyncRead + AsyncWrite + Unpin>(
    mut output: SplitSink<WebSocketStream<T>, Message>,
    mut written: mpsc::Receiver<OutgoingMessage>,
    coding: Coding,
    first: Option<u8>,
    stalled: StallState,
    life: ConnectionLifetime,
) {
    let all = async {
        // Clients wait for a first message.
        if let Some(channel) = first {
            output.send(coding.encode(channel, &[])).await?;
        }
        let mut pongs = interval(stalled.pong_interval);
        // Otherwise a client that reads nothing for a while would get them all at once.
        pongs.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let next = tokio::select! {
                next = written.recv() => next,
                _ = pongs.tick() => {
                    // One that answers no ping is allowed (RFC 6455, section 5.5.3).
                    if stalled.waits.load(Ordering::Relaxed) {
                        output.send(Message::Pong(Bytes::new())).await?;
                    }
                    continue;
                }
            };
            let Some(next) = next else { break };
            match next {
                // A single channel cannot be closed; the end of the session ends all.
                OutgoingMessage::Data { bytes, .. } if bytes.is_empty() => {}
                OutgoingMessage::Data { id, bytes, .. } => {
                    output.feed(coding.encode(u8::try_from(id).unwrap_or(ERROR), &bytes)).await?;
                    life.record_activity();
                }
                OutgoingMessage::End => {
                    output.send(close_message()).await?;
                    break;
                }
                // WebSockets have no windows, and channels are not opened.
                OutgoingMessage::Frame(_) | OutgoingMessage::Opened(_) | OutgoingMessage::WindowUpdate(..) => {}
            }
            if written.is_empty() {
                output.flush().await?;
            }
        }
        // The reader receives the peer's close message, and ends the connection.
        life.closed.cancelled().await;
        Ok::<_, Error>(())
    };
    let ended = tokio::select! {
        // A connection that was broken off is not also closed with Normal: the end of the client's input ends its command.
        biased;
        () = life.closed.cancelled() => Ok(()),
        ended = all => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "cannot write to a streaming client");
    }
    life.closed.cancel();
}

/// Exposes the bytes in a WebSocket's messages, in both directions, as a connection.
pub(crate) async fn tunnel(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> DuplexStream {
    let (near, far) = duplex(TUNNEL_BUFFER);
    let ((output, input), (from, to)) = (accept_socket(io).await.split(), split(far));
    tokio::spawn(async move {
        // The end of one side ends the other.
        let ended = tokio::select! {
            ended = copy_from_messages(input, to) => ended,
            ended = copy_to_messages(from, output) => ended,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a streaming client has disconnected");
        }
    });
    near
}

async fn copy_from_messages<T: AsyncRead + AsyncWrite + Unpin>(
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

async fn copy_to_messages<T: AsyncRead + AsyncWrite + Unpin>(
    mut from: ReadHalf<DuplexStream>,
    mut output: SplitSink<WebSocketStream<T>, Message>,
) -> Result<(), Error> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK);
        if from.read_buf(&mut buffer).await? == 0 {
            return output.send(close_message()).await;
        }
        output.send(Message::Binary(buffer.split().freeze())).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_in_base64_name_their_channel_by_a_digit() {
        let text = Coding::Base64;
        assert_eq!(text.encode(STDERR, b"hello"), Message::Text("2aGVsbG8=".into()));
        assert_eq!(text.encode(STDOUT, b""), Message::Text("1".into()));
        assert_eq!(text.decode(Message::Text("0aGk=".into())).unwrap(), Some((STDIN, Bytes::from_static(b"hi"))));
        // Browsers send either message type, so the type is ignored.
        assert_eq!(text.decode(Message::Binary("4e30=".into())).unwrap(), Some((RESIZE, Bytes::from_static(b"{}"))));
        for none in ["", "\0aGk="] {
            assert_eq!(text.decode(Message::Text(none.into())).unwrap(), None);
        }
        for broken in ["0a", "0aGk", "0a?==", "0aGk= "] {
            assert!(text.decode(Message::Text(broken.into())).is_err(), "{broken}");
        }
    }

    #[test]
    fn a_client_hears_of_a_connection_that_waits_for_its_process() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, far) = duplex(1 << 20);
            let (life, (out, written)) = (ConnectionLifetime::default(), mpsc::channel(MAX_QUEUED_MESSAGES));
            let (_process, to_stdin) = Reader::new(STDIN.into(), out);
            let (output, input) = accept_socket(near).await.split();
            let stalled = StallState { pong_interval: Duration::from_millis(5), ..StallState::default() };
            tokio::spawn(read_messages(input, vec![Some(to_stdin)], Coding::Binary, stalled.clone(), life.clone()));
            tokio::spawn(write_messages(output, written, Coding::Binary, None, stalled, life));
            let (mut to, mut from) = WebSocketStream::from_raw_socket(far, Role::Client, None).await.split();
            // No pongs without a cause.
            assert!(tokio::time::timeout(Duration::from_millis(30), from.next()).await.is_err());
            // More messages than wait for a process that reads none.
            for _ in 0..100 {
                to.send(Coding::Binary.encode(STDIN, &[7; 1000])).await.unwrap();
            }
            for _ in 0..3 {
                assert_eq!(from.next().await.unwrap().unwrap(), Message::Pong(Bytes::new()));
            }
        });
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(channel in 0..=LAST_IN_TEXT, bytes: Vec<u8>, base64: bool) {
            let coding = if base64 { Coding::Base64 } else { Coding::Binary };
            let message = coding.encode(channel, &bytes);
            prop_assert_eq!(coding.decode(message).unwrap(), Some((channel, bytes.into())));
        }
    }
}
