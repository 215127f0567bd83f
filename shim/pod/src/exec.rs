//! Runs commands in containers: to their end with their output in memory, or with streams that the client connects. When its caller no
//! longer waits, a command of the first kind is killed, and one of the second kind runs on in the guest by itself, unless it runs in the
//! guest itself, for an operator.

use crate::agent::{Agent, tokio_stream_of};
use crate::error::PodError;
use crate::guest_values::{Bounded, CommandOutput, GuestExit};
use nacelle_base::{Classify, FailureKind};
use nacelle_proto::{agent as proto, common, pod};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;
use tonic::Status;

/// The limit from the end of the command to the end of its streams, which a leaked child process may hold open.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
const SIGKILL: u32 = 9;
/// How often a command in the guest is killed that its agent does not confirm, and the pause between two attempts. A command in a container
/// ends with the container.
const GUEST_KILL_ATTEMPTS: u32 = 30;
const GUEST_KILL_PAUSE: Duration = Duration::from_secs(2);

/// Where a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExecTarget {
    /// In a container. It outlives its client.
    Container,
    /// In the guest, outside of all containers. It is killed with its client.
    Guest,
}

/// A running command. Dropping this value kills the command, unless it has ended or was abandoned.
pub struct ExecProcess {
    agent: Agent,
    id: String,
    exec_id: String,
    target: ExecTarget,
    /// The command has ended, or runs on by itself.
    is_released: bool,
}

impl ExecProcess {
    /// Starts a command in a container. It outlives its client.
    pub async fn start_in_container(agent: Agent, request: pod::ExecRequest) -> Result<ExecProcess, PodError> {
        ExecProcess::start(agent, ExecTarget::Container, request).await
    }

    /// Starts a command in the guest, outside of all containers. It is killed with its client.
    pub async fn start_in_guest(agent: Agent, request: pod::ExecRequest) -> Result<ExecProcess, PodError> {
        ExecProcess::start(agent, ExecTarget::Guest, request).await
    }

    async fn start(agent: Agent, target: ExecTarget, request: pod::ExecRequest) -> Result<ExecProcess, PodError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let exec_id = format!("exec-{}", NEXT_ID.fetch_add(1, Ordering::Relaxed));
        let pod::ExecRequest { id, args, tty, stdin } = request;
        let request =
            proto::ExecRequest { id: id.clone(), exec_id: exec_id.clone(), args, tty, stdin, columns: 0, rows: 0 };
        let running = ExecProcess { agent, id, exec_id, target, is_released: false };
        match target {
            ExecTarget::Container => running.agent.exec(request).await?,
            ExecTarget::Guest => running.agent.start_guest_shell(request).await?,
        }
        Ok(running)
    }

    /// Returns the id of the exec in its container.
    pub fn exec_id(&self) -> &str {
        &self.exec_id
    }

    /// Waits for the end of the command.
    async fn wait_for_exit(&mut self) -> Result<GuestExit, PodError> {
        loop {
            if let Some(exit) = self.agent.wait(&self.id, &self.exec_id).await? {
                self.is_released = true;
                return Ok(exit);
            }
        }
    }

    /// Waits for the end of the command and reports it. If the receiver is gone, a command in a container runs on without a client, and
    /// this process keeps nothing of it; one in the guest is killed.
    pub async fn forward_exit(mut self, events: mpsc::Sender<Result<pod::ExecEvent, Status>>) {
        let ended = tokio::select! {
            ended = self.wait_for_exit() => ended,
            () = events.closed() => match self.target {
                ExecTarget::Container => return self.abandon().await,
                ExecTarget::Guest => return,
            },
        };
        let event = ended.map(|exit| pod::ExecEvent { event: Some(pod::exec_event::Event::Exited(exit.code)) });
        // The client may have disconnected.
        let _ = events.send(event.map_err(|error| crate::codes::status(&error))).await;
    }

    /// Leaves the command to the agent. If the agent rejects the request, the command is killed.
    async fn abandon(mut self) {
        match self.agent.abandon_exec(&self.id, &self.exec_id).await {
            Ok(()) => self.is_released = true,
            Err(error) => {
                tracing::warn!(error = %nacelle_base::Chain(&error), "killing a command whose client disconnected");
            }
        }
    }
}

impl Drop for ExecProcess {
    fn drop(&mut self) {
        if !self.is_released {
            let (agent, id, exec_id) = (self.agent.clone(), self.id.clone(), self.exec_id.clone());
            let attempts = if self.target == ExecTarget::Guest { GUEST_KILL_ATTEMPTS } else { 1 };
            // The exec request may still be in flight: an agent that receives the signal first does not start the command.
            tokio::spawn(async move {
                let (agent, id, exec_id) = (&agent, &id, &exec_id);
                let kill = || agent.signal(id, exec_id, SIGKILL, false);
                kill_repeatedly(attempts, GUEST_KILL_PAUSE, kill).await;
            });
        }
    }
}

/// Kills a command until its agent confirms it or no longer knows the command, at most `attempts` times.
async fn kill_repeatedly<F>(attempts: u32, pause: Duration, mut kill: impl FnMut() -> F)
where
    F: Future<Output = Result<(), PodError>>,
{
    for attempt in 1..=attempts {
        match kill().await {
            Ok(()) => return,
            Err(error) if error.kind() == FailureKind::NotFound => return,
            Err(error) => tracing::warn!(%error, attempt, "cannot kill a command whose caller no longer waits"),
        }
        if attempt < attempts {
            tokio::time::sleep(pause).await;
        }
    }
}

/// Runs a command. A timeout of zero is no limit; the command is killed at the timeout, and when the future is dropped.
pub async fn run_to_end(
    agent: Agent,
    request: pod::ExecSyncRequest,
) -> Result<Bounded<pod::ExecSyncResponse>, PodError> {
    let limit = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms.into()));
    match limit {
        None => run_without_limit(agent, request).await,
        Some(limit) => match tokio::time::timeout(limit, run_without_limit(agent, request)).await {
            Ok(response) => response,
            Err(_elapsed) => Err(PodError::TooSlow { what: "run the command to its end", limit }),
        },
    }
}

async fn run_without_limit(
    agent: Agent,
    request: pod::ExecSyncRequest,
) -> Result<Bounded<pod::ExecSyncResponse>, PodError> {
    let id = request.id;
    let exec = pod::ExecRequest { id: id.clone(), args: request.args, tty: false, stdin: false };
    let mut running = ExecProcess::start_in_container(agent.clone(), exec).await?;
    let (stdout, stderr) = tokio::try_join!(
        agent.open_stream(&id, &running.exec_id, common::Stream::Stdout),
        agent.open_stream(&id, &running.exec_id, common::Stream::Stderr),
    )?;
    let (stdout, mut reading_out) = spawn_reader(stdout)?;
    let (stderr, mut reading_err) = spawn_reader(stderr)?;
    let exit = running.wait_for_exit().await?;
    let drained = async {
        // A reader that panicked will not read any more.
        let _ = (&mut reading_out).await;
        let _ = (&mut reading_err).await;
    };
    let complete = tokio::time::timeout(DRAIN_LIMIT, drained).await;
    if complete.is_err() {
        tracing::warn!("the output of a command did not end with the command; the output so far is returned");
        reading_out.abort();
        reading_err.abort();
    }
    Ok(take_output(&stdout).into_response(take_output(&stderr), &exit))
}

type OutputReader = (Arc<Mutex<CommandOutput>>, tokio::task::JoinHandle<()>);

/// Reads a stream to its end in the background.
fn spawn_reader(stream: UnixStream) -> Result<OutputReader, PodError> {
    let stream = tokio_stream_of(stream)?;
    let output = Arc::new(Mutex::new(CommandOutput::default()));
    let task = tokio::spawn(read_to_end(stream, Arc::clone(&output)));
    Ok((output, task))
}

fn take_output(output: &Mutex<CommandOutput>) -> CommandOutput {
    std::mem::take(&mut *output.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Reads a stream to its end, so that the command can end, and keeps as much as fits into the reply.
async fn read_to_end(mut stream: impl AsyncRead + Unpin, output: Arc<Mutex<CommandOutput>>) {
    let mut buffer = vec![0; 32 << 10];
    // A broken stream counts as ended; the exit code shows the failure.
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        output.append(buffer.get(..count).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_values::{FromGuest, MAX_OUTPUT};

    #[tokio::test]
    async fn a_kill_is_repeated_until_the_agent_confirms_it_or_knows_no_such_command() {
        let slow = || Err(PodError::TooSlow { what: "signal the command", limit: Duration::ZERO });
        let unknown = || Err(PodError::NoContainer { id: "c".to_owned() });
        for (attempts, mut answers, calls) in [
            (30, vec![slow(), slow(), Ok(()), slow()], 3),
            (30, vec![slow(), unknown(), slow()], 2),
            (3, vec![slow(), slow(), slow(), slow()], 3),
            (1, vec![slow(), slow()], 1),
        ] {
            let all = answers.len();
            let mut left = answers.drain(..);
            kill_repeatedly(attempts, Duration::ZERO, || std::future::ready(left.next().unwrap())).await;
            assert_eq!(all - left.len(), calls);
        }
    }

    #[test]
    fn output_beyond_the_limit_is_read_and_dropped() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let output = Arc::new(Mutex::new(CommandOutput::default()));
        let endless = tokio::io::repeat(b'x').take(MAX_OUTPUT as u64 + 100_000);
        runtime.block_on(read_to_end(endless, Arc::clone(&output)));
        let exit = proto::WaitResponse { exit: Some(proto::Exit { code: u32::MAX, ..Default::default() }) };
        let exit = FromGuest::new(exit).bound().unwrap();
        let response = take_output(&output).into_response(CommandOutput::default(), &exit);
        assert_eq!((response.stdout.len(), response.stderr.len(), response.exit_code), (MAX_OUTPUT, 0, i32::MAX));
    }
}
