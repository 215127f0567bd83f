//! Handles the streams of exec and attach: it accepts the streams of a client, connects them to the process and reports the exit
//! status. One task per session copies all streams, so that a stream that waits does not block the others.

use crate::backend::{Attach, Exec, ProcessStreams, StreamBackend, TerminalSize};
use crate::mux::{CHUNK, ConnectionLifetime, Reader, Writer};
use crate::spdy::Connection;
use crate::websocket::{Coding, CommandChannels};
use bytes::{Bytes, BytesMut};
use nacelle_base::Chain;
use serde_json::json;
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The time that a client has to open its streams.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// The time without a byte after the process ended until its output counts as ended, although a child of it still holds the
/// stream open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum bytes of a resize message that are buffered.
const MAX_RESIZE: usize = 1024;

/// A version of the remote command protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProtocolVersion {
    /// The name of the subprotocol.
    pub name: &'static str,
    features: Features,
}

/// The features of a dialect in addition to stdin, stdout and stderr. Each one includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Features {
    /// An error stream with text.
    Basic,
    /// A stream for the size of the terminal.
    Resize,
    /// The exit status as JSON (a Status of Kubernetes).
    Status,
}

/// The supported dialects, the best first. Clients that offer none use the last.
const SPDY_VERSIONS: [ProtocolVersion; 4] = [
    ProtocolVersion { name: "v4.channel.k8s.io", features: Features::Status },
    ProtocolVersion { name: "v3.channel.k8s.io", features: Features::Resize },
    ProtocolVersion { name: "v2.channel.k8s.io", features: Features::Basic },
    ProtocolVersion { name: "channel.k8s.io", features: Features::Basic },
];

/// The dialects over WebSockets, and the coding of their messages. Clients that offer none use [`DEFAULT_WEBSOCKET_VERSION`].
const WEBSOCKET_VERSIONS: [(ProtocolVersion, Coding); 5] = [
    websocket("v5.channel.k8s.io", Features::Status, Coding::BinaryWithEnd),
    websocket("v4.channel.k8s.io", Features::Status, Coding::Binary),
    websocket("v4.base64.channel.k8s.io", Features::Status, Coding::Base64),
    websocket("channel.k8s.io", Features::Resize, Coding::Binary),
    websocket("base64.channel.k8s.io", Features::Resize, Coding::Base64),
];

/// The dialect of WebSocket clients that offer no subprotocol.
const DEFAULT_WEBSOCKET_VERSION: (ProtocolVersion, Coding) = websocket("", Features::Resize, Coding::Binary);

const fn websocket(name: &'static str, features: Features, coding: Coding) -> (ProtocolVersion, Coding) {
    (ProtocolVersion { name, features }, coding)
}

impl ProtocolVersion {
    /// Returns the first offered WebSocket dialect that is supported.
    pub fn choose_websocket(offered: &[&str]) -> Option<(ProtocolVersion, Coding)> {
        match offered {
            [] => Some(DEFAULT_WEBSOCKET_VERSION),
            offered => {
                offered.iter().find_map(|name| WEBSOCKET_VERSIONS.into_iter().find(|(known, _)| known.name == *name))
            }
        }
    }

    /// Returns the first offered dialect that is supported.
    pub fn choose<'a>(mut offered: impl Iterator<Item = &'a str>) -> Option<ProtocolVersion> {
        offered.find_map(|name| SPDY_VERSIONS.into_iter().find(|known| known.name == name))
    }

    /// Returns the names of all dialects over SPDY.
    pub fn spdy_names() -> impl Iterator<Item = &'static str> {
        SPDY_VERSIONS.into_iter().map(|version| version.name)
    }

    /// Returns the names of all dialects over WebSockets.
    pub fn websocket_names() -> impl Iterator<Item = &'static str> {
        WEBSOCKET_VERSIONS.into_iter().map(|(version, _)| version.name)
    }

    /// Returns the dialect of clients that offer none.
    pub fn oldest() -> ProtocolVersion {
        SPDY_VERSIONS[SPDY_VERSIONS.len() - 1]
    }
}

/// The session that the streams belong to.
#[derive(Clone, Debug)]
pub(crate) enum CommandSession {
    /// A new process.
    Exec(Exec),
    /// A running container.
    Attach(Attach),
}

impl CommandSession {
    fn container(&self) -> &str {
        match self {
            CommandSession::Exec(exec) => &exec.container,
            CommandSession::Attach(attach) => &attach.container,
        }
    }

    fn tty(&self) -> bool {
        match self {
            CommandSession::Exec(exec) => exec.tty,
            CommandSession::Attach(attach) => attach.tty,
        }
    }

    /// Returns whether stdin, stdout and stderr are requested.
    fn streams(&self) -> [bool; 3] {
        match self {
            CommandSession::Exec(Exec { stdin, stdout, stderr, .. })
            | CommandSession::Attach(Attach { stdin, stdout, stderr, .. }) => [*stdin, *stdout, *stderr],
        }
    }
}

/// A client's streams of a session.
pub(crate) struct Channels {
    stdin: Option<Reader>,
    stdout: Option<Writer>,
    stderr: Option<Writer>,
    error: Writer,
    resize: Option<Reader>,
}

/// Returns the WebSocket channels that this session uses.
pub(crate) fn select_channels(ends: CommandChannels, session: &CommandSession) -> Channels {
    let CommandChannels { stdin, stdout, stderr, error, resize } = ends;
    let [has_stdin, has_stdout, has_stderr] = session.streams();
    Channels {
        stdin: Some(stdin).filter(|_| has_stdin),
        stdout: Some(stdout).filter(|_| has_stdout),
        stderr: Some(stderr).filter(|_| has_stderr),
        error,
        resize: Some(resize).filter(|_| session.tty()),
    }
}

/// Waits for the streams of this session. Returns `None` if the client did not open them in time.
pub(crate) async fn accept_streams(
    connection: &mut Connection,
    session: &CommandSession,
    dialect: ProtocolVersion,
) -> Option<Channels> {
    let (mut stdin, mut stdout, mut stderr, mut error, mut resize) = (None, None, None, None, None);
    let ([has_stdin, has_stdout, has_stderr], resizes) =
        (session.streams(), session.tty() && dialect.features >= Features::Resize);
    let all = async {
        loop {
            let missing = error.is_none()
                || (has_stdin && stdin.is_none())
                || (has_stdout && stdout.is_none())
                || (has_stderr && stderr.is_none())
                || (resizes && resize.is_none());
            if !missing {
                connection.refuse_streams().await;
                return Some(());
            }
            let stream = connection.streams.recv().await?;
            match stream.headers.get("streamtype") {
                Some("stdin") => stdin = Some(stream.reader),
                Some("stdout") => stdout = Some(stream.writer),
                Some("stderr") => stderr = Some(stream.writer),
                Some("error") => error = Some(stream.writer),
                Some("resize") => resize = Some(stream.reader),
                other => tracing::debug!(?other, "ignoring a stream of an unknown type"),
            }
        }
    };
    tokio::time::timeout(OPEN_TIMEOUT, all).await.ok().flatten()?;
    Some(Channels {
        stdin: stdin.filter(|_| has_stdin),
        stdout: stdout.filter(|_| has_stdout),
        stderr: stderr.filter(|_| has_stderr),
        error: error?,
        resize,
    })
}

/// Serves a session until its process ends or the client disconnects. A command continues without its client.
pub(crate) async fn serve_session<G: StreamBackend>(
    backend: &G,
    session: &CommandSession,
    channels: Channels,
    life: &ConnectionLifetime,
    dialect: ProtocolVersion,
) {
    let Channels { stdin, stdout, stderr, error, resize } = channels;
    let attempt = async {
        let process = match session {
            CommandSession::Exec(exec) => backend.exec(exec).await?,
            CommandSession::Attach(attach) => backend.attach(attach).await?,
        };
        copy_streams(backend, session.container(), process, (stdin, resize), (&stdout, &stderr)).await
    };
    let outcome = tokio::select! {
        biased;
        () = life.closed.cancelled() => return,
        outcome = attempt => outcome,
    };
    let status = match &outcome {
        _ if dialect.features >= Features::Status => status_document(&outcome),
        Ok(0) => String::new(),
        Ok(code) => format!("command terminated with non-zero exit code: {code}"),
        Err(error) => Chain(error).to_string(),
    };
    for writer in [stdout, stderr].into_iter().flatten() {
        writer.finish().await;
    }
    // A client that has disconnected needs no status.
    let _ = error.send(Bytes::from(status)).await;
    error.finish().await;
}

/// Returns the Status of Kubernetes with the result of a command.
fn status_document<E: Error>(outcome: &Result<i32, E>) -> String {
    let status = match outcome {
        Ok(0) => json!({"metadata": {}, "status": "Success"}),
        Ok(code) => json!({
            "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": format!("command terminated with non-zero exit code: exit code {code}"),
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        Err(error) => {
            let message = Chain(error).to_string();
            json!({
                "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500, "message": message,
                "details": {"causes": [{"message": message}]},
            })
        }
    };
    status.to_string()
}

/// Copies all streams until the process and its output have ended. Returns the exit code.
async fn copy_streams<G: StreamBackend>(
    backend: &G,
    container: &str,
    process: ProcessStreams<G::Error>,
    (stdin, resize): (Option<Reader>, Option<Reader>),
    (stdout, stderr): (&Option<Writer>, &Option<Writer>),
) -> Result<i32, G::Error> {
    let ProcessStreams { exec_id, detaches, stdin: input, stdout: output, stderr: errors, mut end } = process;
    let moved = AtomicU64::new(0);
    let outputs = async { tokio::join!(copy_output(output, stdout, &moved), copy_output(errors, stderr, &moved)) };
    let sizes = async {
        apply_resizes(resize, backend, (container, &exec_id)).await;
        std::future::pending::<()>().await;
    };
    let inputs = async {
        if copy_input(stdin, input).await.is_none() || !detaches {
            std::future::pending::<()>().await;
        }
    };
    tokio::pin!(outputs, sizes, inputs);
    let mut drained = false;
    let code = loop {
        tokio::select! {
            code = &mut end => break code?,
            _ = &mut outputs, if !drained => drained = true,
            () = &mut sizes => {}
            () = &mut inputs => return Ok(0),
        }
    };
    while !drained {
        let before = moved.load(Ordering::Relaxed);
        tokio::select! {
            _ = &mut outputs => drained = true,
            () = tokio::time::sleep(DRAIN_TIMEOUT) => {
                if moved.load(Ordering::Relaxed) == before {
                    tracing::info!(container, "a command has exited, but a child process still holds its output open");
                    drained = true;
                }
            }
        }
    }
    Ok(code)
}

/// Copies from the process to the client. Discards output that the client did not request.
async fn copy_output(from: Option<UnixStream>, to: &Option<Writer>, moved: &AtomicU64) {
    let Some(mut from) = from else { return };
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK);
        // A broken stream ends like any other.
        match from.read_buf(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let bytes = buffer.split().freeze();
        if let Some(to) = to
            && to.send(bytes).await.is_err()
        {
            return;
        }
        moved.fetch_add(1, Ordering::Relaxed);
    }
}

/// Copies from the client to the process. The end of the stream ends the process's input. Returns `None` if there is no stream,
/// or if the process does not read any more.
async fn copy_input(from: Option<Reader>, to: Option<UnixStream>) -> Option<()> {
    let (mut from, mut to) = (from?, to?);
    while let Some(bytes) = from.next().await {
        // If the process does not read any more, dropping the reader makes the connection discard the rest.
        to.write_all(&bytes).await.ok()?;
    }
    to.shutdown().await.ok()
}

/// Reads terminal sizes: a sequence of JSON documents, split arbitrarily.
async fn apply_resizes<G: StreamBackend>(from: Option<Reader>, backend: &G, (container, exec_id): (&str, &str)) {
    let Some(mut from) = from else { return };
    let mut text = Vec::new();
    while let Some(bytes) = from.next().await {
        text.extend_from_slice(&bytes);
        let (sizes, read) = parse_sizes(&text);
        for size in sizes {
            if let Err(error) = backend.resize(container, exec_id, size).await {
                tracing::debug!("{}", Chain(&error));
            }
        }
        match read {
            Some(read) if text.len() - read <= MAX_RESIZE => drop(text.drain(..read)),
            _ => return tracing::debug!("ignoring further terminal sizes of a client: they cannot be parsed"),
        }
    }
}

/// Returns the complete documents at the start of a text, and their length in bytes; `None` if the text continues with something
/// else.
fn parse_sizes(text: &[u8]) -> (Vec<TerminalSize>, Option<usize>) {
    let mut documents = serde_json::Deserializer::from_slice(text).into_iter::<TerminalSize>();
    let mut sizes = Vec::new();
    loop {
        let read = documents.byte_offset();
        match documents.next() {
            Some(Ok(size)) => sizes.push(size),
            Some(Err(error)) if error.is_eof() => return (sizes, Some(read)),
            Some(Err(_)) => return (sizes, None),
            None => return (sizes, Some(text.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_both_speak_is_spoken() {
        let name = |offered: &[&str]| ProtocolVersion::choose(offered.iter().copied()).map(|dialect| dialect.name);
        assert_eq!(name(&["v5.channel.k8s.io", "v4.channel.k8s.io", "v3.channel.k8s.io"]), Some("v4.channel.k8s.io"));
        assert_eq!(name(&["channel.k8s.io"]), Some("channel.k8s.io"));
        assert_eq!(name(&["v9.channel.k8s.io"]), None);
        let web = |offered: &[&str]| {
            let (dialect, coding) = ProtocolVersion::choose_websocket(offered)?;
            Some((dialect.name, dialect.features, coding))
        };
        assert_eq!(
            web(&["v5.channel.k8s.io", "v4.channel.k8s.io"]),
            Some(("v5.channel.k8s.io", Features::Status, Coding::BinaryWithEnd))
        );
        assert_eq!(
            web(&["channel.k8s.io", "v4.channel.k8s.io"]),
            Some(("channel.k8s.io", Features::Resize, Coding::Binary))
        );
        assert_eq!(
            web(&["x", "base64.channel.k8s.io"]),
            Some(("base64.channel.k8s.io", Features::Resize, Coding::Base64))
        );
        assert_eq!(
            web(&["v4.base64.channel.k8s.io"]),
            Some(("v4.base64.channel.k8s.io", Features::Status, Coding::Base64))
        );
        assert_eq!((web(&[]), web(&["v9.channel.k8s.io"])), (Some(("", Features::Resize, Coding::Binary)), None));
    }

    #[test]
    fn exec_status_is_encoded_as_kubernetes_does() {
        let status_of = |outcome: Result<i32, std::fmt::Error>| {
            serde_json::from_str::<serde_json::Value>(&status_document(&outcome)).unwrap()
        };
        assert_eq!(status_of(Ok(0))["status"], "Success");
        let failed = status_of(Ok(5));
        assert_eq!(
            (&failed["reason"], &failed["details"]["causes"][0]["message"]),
            (&json!("NonZeroExitCode"), &json!("5"))
        );
        assert_eq!(status_of(Err(std::fmt::Error))["reason"], "InternalError");
    }

    #[test]
    fn sizes_are_read_however_they_are_cut() {
        let text = b"{\"Width\":80,\"Height\":24}\n{\"Width\":81,\"Height\":25}";
        let both = vec![TerminalSize { columns: 80, rows: 24 }, TerminalSize { columns: 81, rows: 25 }];
        assert_eq!(parse_sizes(text), (both, Some(text.len())));
        assert_eq!(parse_sizes(&text[..30]), (vec![TerminalSize { columns: 80, rows: 24 }], Some(24)));
        assert_eq!(parse_sizes(b"{\"Width\":80}").1, None);
        assert_eq!(parse_sizes(b"{\"Width\":70000,\"Height\":1}").1, None);
        assert_eq!(parse_sizes(b""), (vec![], Some(0)));
    }
}
