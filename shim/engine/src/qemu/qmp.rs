//! Speaks QMP with QEMU, to pause and resume it: one JSON object a line, over an inherited socket. A guest may have
//! compromised QEMU, so replies are bounded and trusted about nothing but QEMU itself.

use nacelle_base::{json, retry};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nacelle_base::{Classify, FailureKind};
use serde_json::Value;

/// The maximum length of a line that is read, in bytes.
pub(crate) const MAX_LINE: usize = 64 << 10;
/// The maximum length of QEMU's own text in an error, in characters.
const MAX_DESCRIPTION: usize = 200;

/// QEMU did not execute a command.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The connection failed.
    #[error("the QMP connection to QEMU failed")]
    Io {
        /// The cause.
        source: io::Error,
    },
    /// QEMU did not reply in time.
    #[error("QEMU did not reply to {command} within {limit:?}")]
    Timeout {
        /// The command.
        command: &'static str,
        /// The limit of the wait.
        limit: Duration,
    },
    /// QEMU has closed the connection.
    #[error("QEMU closed the QMP connection")]
    Closed,
    /// A line is too long.
    #[error("QEMU sent a line of more than {limit} bytes")]
    LineTooLong {
        /// The maximum length in bytes.
        limit: usize,
    },
    /// A line is not a JSON object.
    #[error("QEMU sent an invalid QMP message")]
    Garbled {
        /// The cause.
        source: serde_json::Error,
    },
    /// QEMU rejected the command.
    #[error("QEMU rejected {command}: {description:?} ({class})")]
    Rejected {
        /// The command.
        command: &'static str,
        /// QEMU's class of error.
        class: String,
        /// QEMU's description, cut to 200 characters.
        description: String,
    },
}

impl Classify for QmpError {
    fn kind(&self) -> FailureKind {
        match self {
            QmpError::Timeout { .. } => FailureKind::Timeout,
            QmpError::Io { .. } | QmpError::Closed => FailureKind::Unavailable,
            QmpError::LineTooLong { .. } | QmpError::Garbled { .. } | QmpError::Rejected { .. } => {
                FailureKind::Internal
            }
        }
    }
}

/// A connection to QEMU's monitor. The greeting is read with the first command, so that the start of the VM does not wait for it.
pub(crate) struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    negotiated: bool,
}

/// The meaning of a line for a caller that waits for a reply.
#[derive(Debug, PartialEq)]
enum QmpReply {
    Success,
    Error {
        class: String,
        description: String,
    },
    /// An event or the greeting.
    Other,
}

impl Qmp {
    pub fn new(stream: UnixStream) -> Qmp {
        Qmp { stream, buffer: Vec::new(), negotiated: false }
    }

    /// Executes a command without arguments and waits for the reply. After an error other than `Rejected` the connection
    /// must not be used any more.
    pub fn execute(&mut self, command: &'static str, limit: Duration) -> Result<(), QmpError> {
        let until = Instant::now() + limit;
        if !self.negotiated {
            self.run_command("qmp_capabilities", until, limit)?;
            self.negotiated = true;
        }
        self.run_command(command, until, limit)
    }

    fn run_command(&mut self, command: &'static str, until: Instant, limit: Duration) -> Result<(), QmpError> {
        let line = format!("{{\"execute\":\"{command}\"}}\r\n");
        self.stream.set_write_timeout(Some(limit.max(Duration::from_millis(1)))).map_err(io_error)?;
        self.stream.write_all(line.as_bytes()).map_err(|source| match retry::timed_out(source) {
            late if late.kind() == io::ErrorKind::TimedOut => QmpError::Timeout { command, limit },
            source => io_error(source),
        })?;
        loop {
            let line = self.read_line(command, until, limit)?;
            match parse_reply(&line)? {
                QmpReply::Success => return Ok(()),
                QmpReply::Error { class, description } => {
                    return Err(QmpError::Rejected { command, class, description });
                }
                QmpReply::Other => {}
            }
        }
    }

    fn read_line(&mut self, command: &'static str, until: Instant, limit: Duration) -> Result<Vec<u8>, QmpError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.buffer, rest));
            }
            if self.buffer.len() > MAX_LINE {
                return Err(QmpError::LineTooLong { limit: MAX_LINE });
            }
            let timeout = QmpError::Timeout { command, limit };
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return Err(timeout);
            };
            self.stream.set_read_timeout(Some(left)).map_err(io_error)?;
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(QmpError::Closed),
                Ok(count) => self.buffer.extend_from_slice(chunk.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(timeout),
                Err(source) => return Err(QmpError::Io { source }),
            }
        }
    }
}

fn io_error(source: io::Error) -> QmpError {
    QmpError::Io { source }
}

fn parse_reply(line: &[u8]) -> Result<QmpReply, QmpError> {
    let message: serde_json::Map<String, Value> = json::read(line).map_err(|source| QmpError::Garbled { source })?;
    if message.contains_key("return") {
        return Ok(QmpReply::Success);
    }
    let Some(error) = message.get("error") else { return Ok(QmpReply::Other) };
    let text = |key: &str| {
        let whole = error.get(key).and_then(Value::as_str).unwrap_or_default();
        whole.chars().take(MAX_DESCRIPTION).collect::<String>()
    };
    Ok(QmpReply::Error { class: text("class"), description: text("desc") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::BufRead;

    const LONG: Duration = Duration::from_secs(60);

    /// Returns a QEMU that replies to each command with one of these lines, and then closes the connection.
    fn qemu(answers: &'static [&'static str]) -> (Qmp, std::thread::JoinHandle<Vec<String>>) {
        let (near, far) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || {
            let mut commands = Vec::new();
            let mut lines = io::BufReader::new(far.try_clone().unwrap()).lines();
            (&far).write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n").unwrap();
            for answer in answers {
                commands.push(lines.next().unwrap().unwrap());
                (&far).write_all(answer.as_bytes()).unwrap();
            }
            commands
        });
        (Qmp::new(near), thread)
    }

    #[test]
    fn capabilities_are_negotiated_once_and_events_are_skipped() {
        let (mut qmp, thread) = qemu(&[
            "{\"return\": {}}\r\n",
            "{\"event\": \"STOP\", \"timestamp\": {}}\r\n{\"return\": {}}\r\n",
            "{\"return\": {}}\r\n",
        ]);
        qmp.execute("stop", LONG).unwrap();
        qmp.execute("cont", LONG).unwrap();
        let commands = thread.join().unwrap();
        assert_eq!(
            commands,
            ["{\"execute\":\"qmp_capabilities\"}", "{\"execute\":\"stop\"}", "{\"execute\":\"cont\"}"]
        );
    }

    #[test]
    fn a_rejection_carries_qemus_description() {
        let (mut qmp, thread) = qemu(&[
            "{\"return\": {}}\n",
            "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"no such thing\"}}\n",
        ]);
        let error = qmp.execute("stop", LONG).unwrap_err();
        assert_eq!(error.to_string(), "QEMU rejected stop: \"no such thing\" (CommandNotFound)");
        assert!(matches!(qmp.execute("cont", LONG), Err(QmpError::Closed | QmpError::Io { .. })));
        thread.join().unwrap();
    }

    #[test]
    fn silence_times_out_and_a_flood_is_cut_off() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::new(near);
        assert!(matches!(qmp.execute("stop", Duration::from_millis(1)), Err(QmpError::Timeout { .. })));
        let flood = std::thread::spawn(move || {
            let chunk = [b'x'; 4096];
            while (&far).write_all(&chunk).is_ok() {}
        });
        assert!(matches!(qmp.execute("stop", LONG), Err(QmpError::LineTooLong { .. })));
        drop(qmp);
        flood.join().unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn parsing_never_panics(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_reply(&line);
        }

        #[test]
        fn error_descriptions_are_bounded(class in ".{0,300}", desc in ".{0,300}") {
            let line = serde_json::json!({ "error": { "class": class, "desc": desc } }).to_string();
            let QmpReply::Error { class, description } = parse_reply(line.as_bytes()).unwrap() else { panic!("no refusal") };
            prop_assert!(class.chars().count() <= MAX_DESCRIPTION && description.chars().count() <= MAX_DESCRIPTION);
        }
    }
}
