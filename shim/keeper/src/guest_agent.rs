//! Talks to QEMU's guest agent, and runs commands in the guest by it (QEMU's docs/interop/qemu-ga-ref). The agent belongs to the
//! guest: its answers are bounded and validated.

use crate::error::KeeperError;
use crate::json_lines::JsonLines;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::Mutex;

/// The name of the peer in errors.
const PEER: &str = "the guest agent";
/// The maximum length of a line in bytes: the output of a command is one line, in base64.
const MAX_LINE_BYTES: u64 = 24 << 20;
/// The time limit of a request that needs no work.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(3);
/// The interval of the checks whether a command has ended: the first, and the longest.
const POLL_INTERVAL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// The maximum bytes of a command's output that are kept.
pub(crate) const MAX_OUTPUT: usize = 16 << 20;

/// The connection to the guest agent.
pub struct GuestAgent(Mutex<JsonLines>);

/// The result of a command.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CommandResult {
    /// The exit code; 128 + n for signal n.
    pub code: u32,
    /// The standard output.
    pub stdout: Vec<u8>,
    /// The standard error.
    pub stderr: Vec<u8>,
}

impl GuestAgent {
    /// Returns the agent at the other end of this stream. The guest may not run one.
    pub fn new(stream: UnixStream) -> GuestAgent {
        // A guest agent sends no events.
        let (connection, _events) = JsonLines::new(stream, PEER, MAX_LINE_BYTES);
        GuestAgent(Mutex::new(connection))
    }

    async fn execute(&self, command: &str, arguments: Value, limit: Duration) -> Result<Value, KeeperError> {
        self.0.lock().await.execute(command, arguments, limit).await
    }

    /// Succeeds if the agent answers.
    pub async fn ping(&self) -> Result<(), KeeperError> {
        let mut connection = self.0.lock().await;
        // Any answer with this number answers this request, and not one of an earlier process.
        let id = 1 + u64::from(std::process::id());
        let answer = connection.execute("guest-sync", json!({ "id": id }), PING_TIMEOUT).await?;
        let malformed =
            || KeeperError::MalformedReply { peer: PEER, command: "guest-sync".into(), what: "a different number" };
        (answer.as_u64() == Some(id)).then_some(()).ok_or_else(malformed)
    }

    /// Returns whether the agent answers a ping within [`PING_TIMEOUT`], with the time that other requests take before it.
    pub async fn responds(&self) -> bool {
        matches!(tokio::time::timeout(PING_TIMEOUT, self.ping()).await, Ok(Ok(())))
    }

    /// Sends another command.
    pub async fn command(&self, command: &str, arguments: Value) -> Result<Value, KeeperError> {
        self.ping().await?;
        self.execute(command, arguments, REQUEST_TIMEOUT).await
    }

    /// Runs a command to its end. Dropping the future abandons the command.
    pub async fn run(&self, args: &[String]) -> Result<CommandResult, KeeperError> {
        let command = "guest-exec";
        let malformed = |what| KeeperError::MalformedReply { peer: PEER, command: command.to_owned(), what };
        let (program, rest) = args.split_first().ok_or(KeeperError::InvalidField {
            field: "args",
            value: "[]".into(),
            rule: "a program is expected",
        })?;
        self.ping().await?;
        let request = json!({ "path": program, "arg": rest, "capture-output": true });
        let started = self.execute(command, request, REQUEST_TIMEOUT).await?;
        let pid = started.get("pid").and_then(Value::as_i64).ok_or_else(|| malformed("no pid"))?;
        let mut pause = POLL_INTERVAL.0;
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(POLL_INTERVAL.1);
            let status = self.execute("guest-exec-status", json!({ "pid": pid }), REQUEST_TIMEOUT).await?;
            if status.get("exited").and_then(Value::as_bool) == Some(true) {
                return parse_exec_status(&status).map_err(malformed);
            }
        }
    }
}

/// Returns the result of an ended command from its status.
pub(crate) fn parse_exec_status(status: &Value) -> Result<CommandResult, &'static str> {
    let number = |key: &str| status.get(key).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
    let output = |key: &str| {
        let text = status.get(key).and_then(Value::as_str).unwrap_or_default();
        let mut bytes = STANDARD.decode(text).map_err(|_wrong| "output that is not in base64")?;
        bytes.truncate(MAX_OUTPUT);
        Ok::<_, &'static str>(bytes)
    };
    let code = number("exitcode").or_else(|| number("signal").map(|signal| signal.saturating_add(128)));
    Ok(CommandResult { code: code.ok_or("no exit code")?, stdout: output("out-data")?, stderr: output("err-data")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    #[tokio::test]
    async fn concurrent_pings_of_a_silent_agent_take_the_time_of_one() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let agent = GuestAgent::new(ours);
        let started = std::time::Instant::now();
        assert_eq!(tokio::join!(agent.responds(), agent.responds(), agent.responds()), (false, false, false));
        assert!(started.elapsed() < 2 * PING_TIMEOUT, "{:?}", started.elapsed());
    }

    #[test]
    fn an_exec_status_is_validated() {
        let parse = |status: Value| parse_exec_status(&status);
        let status = json!({ "exited": true, "exitcode": 3, "out-data": "aGk=", "out-truncated": false });
        assert_eq!(parse(status).unwrap(), CommandResult { code: 3, stdout: b"hi".into(), stderr: vec![] });
        assert_eq!(parse(json!({ "exited": true, "signal": 9 })).unwrap().code, 137);
        assert_eq!(parse(json!({ "exited": true })), Err("no exit code"));
        assert!(parse(json!({ "exitcode": 0, "err-data": "%%" })).is_err());
        assert!(parse(json!({ "exitcode": -1, "signal": u64::MAX })).is_err());
    }

    #[test]
    fn a_guest_command_is_polled_until_it_exits() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            tokio::spawn(async move {
                let (reader, mut writer) = theirs.into_split();
                let mut lines = BufReader::new(reader).lines();
                let mut polls = 0;
                while let Some(line) = lines.next_line().await.unwrap() {
                    let request: Value = serde_json::from_str(&line).unwrap();
                    let answer = match request["execute"].as_str().unwrap() {
                        "guest-sync" => request["arguments"]["id"].clone(),
                        "guest-exec" => {
                            assert_eq!(request["arguments"]["arg"], json!(["-c", "echo"]));
                            json!({ "pid": 12 })
                        }
                        _ => {
                            polls += 1;
                            json!({ "exited": polls > 2, "exitcode": 0, "out-data": "Cg==" })
                        }
                    };
                    writer.write_all(format!("{}\n", json!({ "return": answer })).as_bytes()).await.unwrap();
                }
            });
            let agent = GuestAgent::new(ours);
            let result = agent.run(&["/bin/sh", "-c", "echo"].map(str::to_owned)).await.unwrap();
            assert_eq!((result.code, result.stdout.as_slice()), (0, &b"\n"[..]));
            assert!(agent.run(&[]).await.is_err());
        });
    }
}
