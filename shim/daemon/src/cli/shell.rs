//! Implements `nacelle shell`: connects this terminal, or standard input and output, to a command in the guest of a pod.

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::exit::CommandError;
use super::output::output_error;
use super::terminal::{self, RawTerminal};
use crate::config::Config;
use nacelle_base::retry::retry_interrupted;
use nacelle_proto::node::guest_shell_event::Event;
use nacelle_proto::node::guest_shell_request::Request;
use nacelle_proto::node::node_client::NodeClient;
use nacelle_proto::node::{GuestShellEvent, GuestShellRequest, GuestShellSize, GuestShellStart};
use std::io::{IsTerminal, Read};
use tokio::io::AsyncWriteExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// The largest amount of input in a request, in bytes.
const CHUNK: usize = 4096;
/// The largest number of queued requests.
const QUEUE: usize = 4;

#[derive(clap::Args)]
pub(super) struct ShellArguments {
    /// The id of the pod, or a unique prefix of it.
    pod: String,
    /// The container whose image has the programs, by its name [default: the first one that runs].
    #[arg(long, short, value_name = "NAME")]
    container: Option<String>,
    /// The command and its arguments.
    #[arg(last = true, value_name = "COMMAND", default_value = "/bin/sh")]
    command: Vec<String>,
}

/// Runs the command to its end, and returns its exit code. Interrupting this program kills the command.
pub(super) fn run(config: &Config, arguments: ShellArguments) -> anyhow::Result<ExitStatus> {
    super::runtime()?.block_on(async {
        let mut client = NodeClient::new(connect(&config.paths.socket).await?);
        let ShellArguments { pod, container, command } = arguments;
        // With only one of them a terminal, the other is a file or a pipe, in which a terminal's output has no place.
        let tty = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        let start = GuestShellStart { pod, container: container.unwrap_or_default(), args: command, tty, stdin: true };
        let (input, requests) = mpsc::channel(QUEUE);
        input.send(request(Request::Start(start))).await?;
        let opened = client.open_guest_shell(ReceiverStream::new(requests)).await;
        let events = opened.map_err(status_error)?.into_inner();
        let raw_terminal = tty.then(RawTerminal::enter).transpose()?;
        if tty {
            let resizes = signal(SignalKind::window_change())?;
            tokio::spawn(send_sizes(resizes, input.clone()));
        }
        // A thread of its own: a read of standard input cannot be cancelled, and ends with the program.
        std::thread::spawn(move || read_stdin(&input));
        let ended = copy_output(events).await;
        drop(raw_terminal);
        ended
    })
}

fn request(request: Request) -> GuestShellRequest {
    GuestShellRequest { request: Some(request) }
}

/// Sends the size of the terminal, now and whenever it changes.
async fn send_sizes(mut resizes: Signal, input: mpsc::Sender<GuestShellRequest>) {
    loop {
        if let Some((columns, rows)) = terminal::size() {
            let size = GuestShellSize { columns: columns.into(), rows: rows.into() };
            if input.send(request(Request::Size(size))).await.is_err() {
                return;
            }
        }
        if resizes.recv().await.is_none() {
            return;
        }
    }
}

/// Forwards standard input until its end.
fn read_stdin(input: &mpsc::Sender<GuestShellRequest>) {
    let mut buffer = [0; CHUNK];
    while let Ok(count @ 1..) = retry_interrupted(|| std::io::stdin().read(&mut buffer)) {
        let data = buffer.get(..count).unwrap_or_default().to_vec();
        if input.blocking_send(request(Request::Stdin(data))).is_err() {
            return;
        }
    }
}

/// Copies the output of the command, until it has ended.
async fn copy_output(mut events: Streaming<GuestShellEvent>) -> anyhow::Result<ExitStatus> {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some(GuestShellEvent { event }) = events.message().await.map_err(status_error)? {
        match event {
            Some(Event::Stdout(data)) => {
                stdout.write_all(&data).await.map_err(output_error)?;
                stdout.flush().await.map_err(output_error)?;
            }
            Some(Event::Stderr(data)) => {
                // Standard output may still have a reader.
                let _ = stderr.write_all(&data).await;
                let _ = stderr.flush().await;
            }
            Some(Event::Exited(code)) => return Ok(ExitStatus::Command(u8::try_from(code).unwrap_or(u8::MAX))),
            None => {}
        }
    }
    Err(CommandError::ConnectionLost.into())
}
