//! Implements a client for JSON lines over a socket: QEMU's monitor (QMP) and the guest agent (QGA) use this format. The peer is
//! not trusted: lines are bounded, in bytes and in the memory that parsing takes, and unexpected messages are ignored. One task
//! reads each connection; requests are sequential.

use crate::error::KeeperError;
use nacelle_base::descriptors::send_with_descriptor;
use serde_json::{Map, Value, json};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc;

/// The maximum length of an error text that is passed on, in characters.
const MAX_ERROR_TEXT: usize = 300;
/// The maximum number of answers that wait for the requester; more are dropped.
pub(crate) const MAX_QUEUED_REPLIES: usize = 4;
/// The maximum number of events that wait for the reader; more are dropped.
pub(crate) const MAX_QUEUED_EVENTS: usize = 64;

/// One connection.
pub struct JsonLines {
    peer: &'static str,
    writer: OwnedWriteHalf,
    replies: mpsc::Receiver<Map<String, Value>>,
    last_id: u64,
}

/// An event.
#[derive(Debug)]
pub struct QemuEvent {
    /// The event's name.
    pub name: String,
    /// The event's data.
    pub data: Value,
}

impl JsonLines {
    /// Returns a connection with `peer`, whose lines have at most `max_line` bytes, and the receiver of its events, which ends
    /// with the connection.
    pub fn new(stream: UnixStream, peer: &'static str, max_line: u64) -> (JsonLines, mpsc::Receiver<QemuEvent>) {
        let (reader, writer) = stream.into_split();
        let (reply_sender, replies) = mpsc::channel(MAX_QUEUED_REPLIES);
        let (event_sender, events) = mpsc::channel(MAX_QUEUED_EVENTS);
        tokio::spawn(read_lines(reader, max_line, peer, reply_sender, event_sender));
        (JsonLines { peer, writer, replies, last_id: 0 }, events)
    }

    /// Sends a command and waits for the answer.
    pub async fn execute(&mut self, command: &str, arguments: Value, limit: Duration) -> Result<Value, KeeperError> {
        self.execute_with_descriptor(command, arguments, None, limit).await
    }

    /// Like `execute`, and passes a descriptor with the command.
    pub async fn execute_with_descriptor(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Value, KeeperError> {
        let (peer, command) = (self.peer, command.to_owned());
        // Answers of abandoned requests.
        while self.replies.try_recv().is_ok() {}
        self.last_id += 1;
        let id = json!(self.last_id);
        let mut line = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            line["arguments"] = arguments;
        }
        let last_id = async {
            let sent = send(&mut self.writer, format!("{line}\n").as_bytes(), descriptor.as_ref()).await;
            drop(descriptor);
            sent.map_err(|_broken| KeeperError::Disconnected { peer })?;
            loop {
                let reply = self.replies.recv().await.ok_or(KeeperError::Disconnected { peer })?;
                // An answer with another number belongs to an abandoned request. Some agents do not return the number.
                if reply.get("id").is_none_or(|of| *of == id) {
                    return Ok::<_, KeeperError>(reply);
                }
            }
        };
        let reply = tokio::time::timeout(limit, last_id).await;
        let mut reply = reply.map_err(|_elapsed| KeeperError::Timeout { peer, command: command.clone(), limit })??;
        if let Some(error) = reply.get("error") {
            let text = error.get("desc").and_then(Value::as_str).unwrap_or_default();
            return Err(KeeperError::Rejected { peer, command, message: printable(text) });
        }
        Ok(reply.remove("return").unwrap_or_default())
    }
}

/// Sends a line, with a descriptor attached to its first bytes if there is one.
async fn send(to: &mut OwnedWriteHalf, line: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<()> {
    let sent = match descriptor {
        None => 0,
        Some(descriptor) => {
            let socket: &UnixStream = to.as_ref();
            socket.async_io(Interest::WRITABLE, || send_with_descriptor(socket, line, descriptor)).await?
        }
    };
    to.write_all(line.get(sent..).unwrap_or_default()).await
}

/// Reads until the connection ends, or the peer violates the protocol.
pub(crate) async fn read_lines(
    reader: impl AsyncRead + Unpin,
    max_line: u64,
    peer: &'static str,
    replies: mpsc::Sender<Map<String, Value>>,
    events: mpsc::Sender<QemuEvent>,
) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(max_line).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) if line.last() != Some(&b'\n') => {
                tracing::warn!(peer, "closing the connection: a line is too long or truncated");
                return;
            }
            Ok(_) => {}
        }
        match parse_line(&line) {
            // An unexpected answer has no receiver.
            Some(PeerMessage::Reply(message)) => drop(replies.try_send(message)),
            Some(PeerMessage::QemuEvent(event)) => drop(events.try_send(event)),
            None => {}
        }
    }
}

/// The kind of a line.
enum PeerMessage {
    /// An answer for the requester.
    Reply(Map<String, Value>),
    /// An event for the reader.
    QemuEvent(QemuEvent),
}

/// Parses a line. Returns `None` if it is not understood.
fn parse_line(line: &[u8]) -> Option<PeerMessage> {
    // A guest agent that restarts may first send bytes of its former life.
    let start = line.iter().rposition(|byte| *byte == 0xff).map_or(0, |at| at + 1);
    let line = line.get(start..)?;
    let Ok(Value::Object(mut message)) = nacelle_base::json::read(line) else { return None };
    if message.contains_key("return") || message.contains_key("error") {
        return Some(PeerMessage::Reply(message));
    }
    match message.remove("event") {
        Some(Value::String(name)) => {
            let data = message.remove("data").unwrap_or_default();
            Some(PeerMessage::QemuEvent(QemuEvent { name: printable(&name), data }))
        }
        _ => None,
    }
}

/// Makes untrusted text printable on one line.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_ERROR_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::descriptors::receive_descriptor;
    use nacelle_base::{Classify, FailureKind};

    use proptest::prelude::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn with<T>(reply: &'static [u8], then: impl AsyncFnOnce(JsonLines, mpsc::Receiver<QemuEvent>) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let other = tokio::spawn(async move {
                let mut buffer = [0; 256];
                let _ = theirs.read(&mut buffer).await;
                let _ = theirs.write_all(reply).await;
                // Keeps the connection open until the test is over.
                let _ = theirs.read(&mut buffer).await;
            });
            let (connection, events) = JsonLines::new(ours, "QEMU", 200);
            let outcome = then(connection, events).await;
            other.abort();
            outcome
        })
    }

    #[test]
    fn a_reply_is_distinguished_from_an_event() {
        let reply =
            b"{\"QMP\": {}}\r\n{\"event\": \"RESET\", \"data\": {\"guest\": true}}\r\nrubbish\n{\"return\": 5}\r\n";
        with(reply, async |mut connection, mut events| {
            assert_eq!(connection.execute("a", Value::Null, LIMIT).await.unwrap(), 5);
            let event = events.recv().await.unwrap();
            assert_eq!((event.name.as_str(), event.data["guest"].as_bool()), ("RESET", Some(true)));
        });
    }

    #[test]
    fn errors_timeouts_and_long_lines_are_reported() {
        with(
            b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\u0007 such\"}}\n",
            async |mut connection, _events| {
                let error = connection.execute("a", Value::Null, LIMIT).await.unwrap_err();
                assert_eq!(error.to_string(), "QEMU rejected a: \"no such\"");
            },
        );
        with(b"", async |mut connection, _events| {
            let error = connection.execute("a", json!({}), Duration::from_millis(10)).await.unwrap_err();
            assert_eq!(error.kind(), FailureKind::Timeout);
        });
        with(&[b'x'; 400], async |mut connection, mut events| {
            assert!(matches!(connection.execute("a", Value::Null, LIMIT).await, Err(KeeperError::Disconnected { .. })));
            assert!(events.recv().await.is_none());
        });
    }

    #[test]
    fn a_descriptor_is_sent_with_a_command() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let (mut connection, _events) = JsonLines::new(ours, "QEMU", 200);
            let file = tempfile::tempfile().unwrap();
            file.set_len(7).unwrap();
            let other = tokio::spawn(async move {
                let received = theirs.async_io(Interest::READABLE, || receive_descriptor(&theirs)).await.unwrap();
                // The rest of the line; its first byte came with the descriptor.
                let mut line = vec![0; 200];
                let count = theirs.read(&mut line).await.unwrap();
                theirs.write_all(b"{\"return\": {}}\n").await.unwrap();
                (
                    std::fs::File::from(received).metadata().unwrap().len(),
                    String::from_utf8_lossy(&line[..count]).into_owned(),
                )
            });
            connection
                .execute_with_descriptor("getfd", json!({ "fdname": "a" }), Some(file.into()), LIMIT)
                .await
                .unwrap();
            let (length, line) = other.await.unwrap();
            assert!(length == 7 && line.contains("getfd") && line.ends_with("}\n"), "{line}");
        });
    }

    #[test]
    fn a_late_reply_is_discarded() {
        let reply = b"{\"return\": 4, \"id\": 9}\n{\"return\": 5, \"id\": 1}\n";
        with(reply, async |mut connection, _events| {
            assert_eq!(connection.execute("a", Value::Null, LIMIT).await.unwrap(), 5);
        });
    }

    #[test]
    fn a_restarted_agents_output_begins_after_the_marker() {
        with(b"{\"return\": \xff{\"return\": 7}\n", async |mut connection, _events| {
            assert_eq!(connection.execute("a", Value::Null, LIMIT).await.unwrap(), 7);
        });
    }

    #[test]
    fn a_line_with_too_many_values_is_rejected() {
        let list = |count: usize| format!("{{\"return\": [{}0]}}\n", "0,".repeat(count));
        assert!(parse_line(list(nacelle_base::json::MAX_VALUES - 4).as_bytes()).is_some());
        assert!(parse_line(list(nacelle_base::json::MAX_VALUES - 3).as_bytes()).is_none());
        let text = format!("{{\"return\": \"{}\"}}\n", "x".repeat(16 << 20));
        assert!(parse_line(text.as_bytes()).is_some());
    }

    proptest! {
        #[test]
        fn a_reply_is_found_among_random_lines(
            before in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..8),
            old in proptest::collection::vec(any::<u8>(), 0..40),
            number in any::<u32>(),
        ) {
            let mut bytes = before.join(&b'\n');
            bytes.push(b'\n');
            bytes.extend(old.iter().filter(|byte| **byte != b'\n'));
            bytes.push(0xff);
            bytes.extend(format!("{{\"return\": {number}}}\n").bytes());
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let (reply_sender, mut replies) = mpsc::channel(MAX_QUEUED_REPLIES + 8);
            let (event_sender, _events) = mpsc::channel(MAX_QUEUED_EVENTS);
            runtime.block_on(read_lines(bytes.as_slice(), 4096, "the peer", reply_sender, event_sender));
            let mut last = None;
            while let Ok(reply) = replies.try_recv() {
                last = Some(reply);
            }
            prop_assert_eq!(&last.unwrap()["return"], &json!(number));
        }
    }
}
