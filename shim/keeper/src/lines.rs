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
const MAX_WORDS: usize = 300;
/// The maximum number of answers that wait for the requester; more are dropped.
pub(crate) const ANSWERS: usize = 4;
/// The maximum number of events that wait for the reader; more are dropped.
pub(crate) const EVENTS: usize = 64;

/// One connection.
pub struct Lines {
    whom: &'static str,
    writer: OwnedWriteHalf,
    answers: mpsc::Receiver<Map<String, Value>>,
    asked: u64,
}

/// An event.
#[derive(Debug)]
pub struct Event {
    /// The event's name.
    pub name: String,
    /// The event's data.
    pub data: Value,
}

impl Lines {
    /// Returns a connection with `whom`, whose lines have at most `longest` bytes, and the receiver of its events, which ends
    /// with the connection.
    pub fn new(stream: UnixStream, whom: &'static str, longest: u64) -> (Lines, mpsc::Receiver<Event>) {
        let (reader, writer) = stream.into_split();
        let (tell_answer, answers) = mpsc::channel(ANSWERS);
        let (tell_event, events) = mpsc::channel(EVENTS);
        tokio::spawn(read(reader, longest, whom, tell_answer, tell_event));
        (Lines { whom, writer, answers, asked: 0 }, events)
    }

    /// Sends a command and waits for the answer.
    pub async fn ask(&mut self, command: &str, arguments: Value, limit: Duration) -> Result<Value, KeeperError> {
        self.ask_with(command, arguments, None, limit).await
    }

    /// Like `ask`, and passes a descriptor with the command.
    pub async fn ask_with(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Value, KeeperError> {
        let (whom, command) = (self.whom, command.to_owned());
        // Answers of abandoned requests.
        while self.answers.try_recv().is_ok() {}
        self.asked += 1;
        let id = json!(self.asked);
        let mut line = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            line["arguments"] = arguments;
        }
        let asked = async {
            let sent = send(&mut self.writer, format!("{line}\n").as_bytes(), descriptor.as_ref()).await;
            drop(descriptor);
            sent.map_err(|_broken| KeeperError::Gone { whom })?;
            loop {
                let answer = self.answers.recv().await.ok_or(KeeperError::Gone { whom })?;
                // An answer with another number belongs to an abandoned request. Some agents do not return the number.
                if answer.get("id").is_none_or(|of| *of == id) {
                    return Ok::<_, KeeperError>(answer);
                }
            }
        };
        let answer = tokio::time::timeout(limit, asked).await;
        let mut answer =
            answer.map_err(|_elapsed| KeeperError::TooSlow { whom, command: command.clone(), limit })??;
        if let Some(error) = answer.get("error") {
            let words = error.get("desc").and_then(Value::as_str).unwrap_or_default();
            return Err(KeeperError::Refused { whom, command, words: printable(words) });
        }
        Ok(answer.remove("return").unwrap_or_default())
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
pub(crate) async fn read(
    reader: impl AsyncRead + Unpin,
    longest: u64,
    whom: &'static str,
    answers: mpsc::Sender<Map<String, Value>>,
    events: mpsc::Sender<Event>,
) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(longest).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) if line.last() != Some(&b'\n') => {
                tracing::warn!(whom, "a line that is too long, or cut: not listened to any more");
                return;
            }
            Ok(_) => {}
        }
        match told(&line) {
            // An unexpected answer has no receiver.
            Some(Told::Answer(message)) => drop(answers.try_send(message)),
            Some(Told::Event(event)) => drop(events.try_send(event)),
            None => {}
        }
    }
}

/// The kind of a line.
enum Told {
    /// An answer for the requester.
    Answer(Map<String, Value>),
    /// An event for the reader.
    Event(Event),
}

/// Parses a line. Returns `None` if it is not understood.
fn told(line: &[u8]) -> Option<Told> {
    // A guest agent that restarts may first send bytes of its former life.
    let start = line.iter().rposition(|byte| *byte == 0xff).map_or(0, |at| at + 1);
    let line = line.get(start..)?;
    let Ok(Value::Object(mut message)) = nacelle_base::json::read(line) else { return None };
    if message.contains_key("return") || message.contains_key("error") {
        return Some(Told::Answer(message));
    }
    match message.remove("event") {
        Some(Value::String(name)) => {
            let data = message.remove("data").unwrap_or_default();
            Some(Told::Event(Event { name: printable(&name), data }))
        }
        _ => None,
    }
}

/// Makes untrusted text printable on one line.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::descriptors::receive_descriptor;
    use nacelle_base::{Classify, Kind};

    use proptest::prelude::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn with<T>(answer: &'static [u8], then: impl AsyncFnOnce(Lines, mpsc::Receiver<Event>) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, mut far) = UnixStream::pair().unwrap();
            let other = tokio::spawn(async move {
                let mut buffer = [0; 256];
                let _ = far.read(&mut buffer).await;
                let _ = far.write_all(answer).await;
                // Keeps the connection open until the test is over.
                let _ = far.read(&mut buffer).await;
            });
            let (lines, events) = Lines::new(near, "QEMU", 200);
            let outcome = then(lines, events).await;
            other.abort();
            outcome
        })
    }

    #[test]
    fn an_answer_is_told_from_an_event() {
        let answer =
            b"{\"QMP\": {}}\r\n{\"event\": \"RESET\", \"data\": {\"guest\": true}}\r\nrubbish\n{\"return\": 5}\r\n";
        with(answer, async |mut lines, mut events| {
            assert_eq!(lines.ask("a", Value::Null, LIMIT).await.unwrap(), 5);
            let event = events.recv().await.unwrap();
            assert_eq!((event.name.as_str(), event.data["guest"].as_bool()), ("RESET", Some(true)));
        });
    }

    #[test]
    fn refusals_silence_and_floods_are_errors() {
        with(
            b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\u0007 such\"}}\n",
            async |mut lines, _events| {
                let error = lines.ask("a", Value::Null, LIMIT).await.unwrap_err();
                assert_eq!(error.to_string(), "QEMU refuses a: \"no such\"");
            },
        );
        with(b"", async |mut lines, _events| {
            let error = lines.ask("a", json!({}), Duration::from_millis(10)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Timeout);
        });
        with(&[b'x'; 400], async |mut lines, mut events| {
            assert!(matches!(lines.ask("a", Value::Null, LIMIT).await, Err(KeeperError::Gone { .. })));
            assert!(events.recv().await.is_none());
        });
    }

    #[test]
    fn a_descriptor_goes_with_a_question() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, mut far) = UnixStream::pair().unwrap();
            let (mut lines, _events) = Lines::new(near, "QEMU", 200);
            let file = tempfile::tempfile().unwrap();
            file.set_len(7).unwrap();
            let other = tokio::spawn(async move {
                let received = far.async_io(Interest::READABLE, || receive_descriptor(&far)).await.unwrap();
                // The rest of the line; its first byte came with the descriptor.
                let mut line = vec![0; 200];
                let count = far.read(&mut line).await.unwrap();
                far.write_all(b"{\"return\": {}}\n").await.unwrap();
                (
                    std::fs::File::from(received).metadata().unwrap().len(),
                    String::from_utf8_lossy(&line[..count]).into_owned(),
                )
            });
            lines.ask_with("getfd", json!({ "fdname": "a" }), Some(file.into()), LIMIT).await.unwrap();
            let (length, line) = other.await.unwrap();
            assert!(length == 7 && line.contains("getfd") && line.ends_with("}\n"), "{line}");
        });
    }

    #[test]
    fn a_late_answer_is_nobodys() {
        let answer = b"{\"return\": 4, \"id\": 9}\n{\"return\": 5, \"id\": 1}\n";
        with(answer, async |mut lines, _events| {
            assert_eq!(lines.ask("a", Value::Null, LIMIT).await.unwrap(), 5);
        });
    }

    #[test]
    fn what_an_agent_says_anew_begins_after_its_marker() {
        with(b"{\"return\": \xff{\"return\": 7}\n", async |mut lines, _events| {
            assert_eq!(lines.ask("a", Value::Null, LIMIT).await.unwrap(), 7);
        });
    }

    #[test]
    fn a_line_of_many_small_things_is_not_read() {
        let list = |count: usize| format!("{{\"return\": [{}0]}}\n", "0,".repeat(count));
        assert!(told(list(nacelle_base::json::VALUES - 4).as_bytes()).is_some());
        assert!(told(list(nacelle_base::json::VALUES - 3).as_bytes()).is_none());
        let text = format!("{{\"return\": \"{}\"}}\n", "x".repeat(16 << 20));
        assert!(told(text.as_bytes()).is_some());
    }

    proptest! {
        #[test]
        fn an_answer_is_heard_whatever_is_said_around_it(
            before in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..8),
            old in proptest::collection::vec(any::<u8>(), 0..40),
            number in any::<u32>(),
        ) {
            let mut said = before.join(&b'\n');
            said.push(b'\n');
            said.extend(old.iter().filter(|byte| **byte != b'\n'));
            said.push(0xff);
            said.extend(format!("{{\"return\": {number}}}\n").bytes());
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let (tell_answer, mut answers) = mpsc::channel(ANSWERS + 8);
            let (tell_event, _events) = mpsc::channel(EVENTS);
            runtime.block_on(read(said.as_slice(), 4096, "somebody", tell_answer, tell_event));
            let mut last = None;
            while let Ok(answer) = answers.try_recv() {
                last = Some(answer);
            }
            prop_assert_eq!(&last.unwrap()["return"], &json!(number));
        }
    }
}
