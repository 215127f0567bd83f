//! Runs commands in containers: to their end with their output in memory, or with streams that the client connects. A
//! command is killed when its caller no longer waits for it.

use crate::agent::{Agent, tokio_stream_of};
use crate::error::PodError;
use crate::guest_values::{Bounded, CommandOutput, GuestExit};
use nacelle_proto::{agent as proto, common, pod};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;
use tonic::Status;

/// The limit from the end of the command to the end of its streams, which a leaked child process may hold open.
const DRAIN: Duration = Duration::from_secs(30);
const SIGKILL: u32 = 9;

/// A running command. Dropping this value kills the command if it still runs.
pub struct Running {
    agent: Agent,
    id: String,
    exec_id: String,
    over: bool,
}

impl Running {
    /// Starts a command.
    pub async fn begin(
        agent: Agent,
        id: String,
        args: Vec<String>,
        tty: bool,
        stdin: bool,
    ) -> Result<Running, PodError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let exec_id = format!("exec-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let request =
            proto::ExecRequest { id: id.clone(), exec_id: exec_id.clone(), args, tty, stdin, columns: 0, rows: 0 };
        let running = Running { agent, id, exec_id, over: false };
        running.agent.exec(request).await?;
        Ok(running)
    }

    /// Returns the id of the exec in its container.
    pub fn exec_id(&self) -> &str {
        &self.exec_id
    }

    /// Waits for the end of the command.
    async fn end(&mut self) -> Result<GuestExit, PodError> {
        loop {
            if let Some(exit) = self.agent.wait(&self.id, &self.exec_id).await? {
                self.over = true;
                return Ok(exit);
            }
        }
    }

    /// Waits for the end of the command and reports it; kills the command if the receiver is gone.
    pub async fn tell(mut self, events: mpsc::Sender<Result<pod::ExecEvent, Status>>) {
        let ended = tokio::select! {
            ended = self.end() => ended,
            () = events.closed() => return,
        };
        let event = ended.map(|exit| pod::ExecEvent { event: Some(pod::exec_event::Event::Ended(exit.code)) });
        // The client may have disconnected.
        let _ = events.send(event.map_err(|error| crate::codes::status(&error))).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over {
            let (agent, id, exec_id) = (self.agent.clone(), self.id.clone(), self.exec_id.clone());
            tokio::spawn(async move {
                // The exec request may still be in flight: an agent that receives the signal first does not start the command.
                if let Err(error) = agent.signal(&id, &exec_id, SIGKILL, false).await {
                    tracing::warn!(%error, "cannot kill a command that nobody waits for");
                }
            });
        }
    }
}

/// Runs a command. A timeout of zero is no limit; the command is killed at the timeout, and when the future is dropped.
pub async fn run(agent: Agent, request: pod::ExecSyncRequest) -> Result<Bounded<pod::ExecSyncResponse>, PodError> {
    let limit = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms.into()));
    match limit {
        None => attempt(agent, request).await,
        Some(limit) => match tokio::time::timeout(limit, attempt(agent, request)).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(PodError::TooSlow { what: "run the command to its end", limit }),
        },
    }
}

async fn attempt(agent: Agent, request: pod::ExecSyncRequest) -> Result<Bounded<pod::ExecSyncResponse>, PodError> {
    let id = request.id;
    let mut running = Running::begin(agent.clone(), id.clone(), request.args, false, false).await?;
    let (stdout, stderr) = tokio::try_join!(
        agent.open_stream(&id, &running.exec_id, common::Stream::Stdout),
        agent.open_stream(&id, &running.exec_id, common::Stream::Stderr),
    )?;
    let (stdout, mut reading_out) = collect(stdout)?;
    let (stderr, mut reading_err) = collect(stderr)?;
    let exit = running.end().await?;
    let drained = async {
        // A reader that panicked will not read any more.
        let _ = (&mut reading_out).await;
        let _ = (&mut reading_err).await;
    };
    let whole = tokio::time::timeout(DRAIN, drained).await;
    if whole.is_err() {
        tracing::warn!("a command has ended, its output has not; what came is returned");
        reading_out.abort();
        reading_err.abort();
    }
    Ok(taken(&stdout).into_answer(taken(&stderr), &exit))
}

type Collected = (Arc<Mutex<CommandOutput>>, tokio::task::JoinHandle<()>);

/// Reads a stream to its end in the background.
fn collect(stream: UnixStream) -> Result<Collected, PodError> {
    let stream = tokio_stream_of(stream)?;
    let kept = Arc::new(Mutex::new(CommandOutput::default()));
    let task = tokio::spawn(keep(stream, Arc::clone(&kept)));
    Ok((kept, task))
}

fn taken(kept: &Mutex<CommandOutput>) -> CommandOutput {
    std::mem::take(&mut *kept.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Reads a stream to its end, so that the command can end, and keeps as much as fits into the reply.
async fn keep(mut stream: impl AsyncRead + Unpin, kept: Arc<Mutex<CommandOutput>>) {
    let mut buffer = vec![0; 32 << 10];
    // A broken stream counts as ended; the exit code shows the failure.
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.append(buffer.get(..count).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_values::{FromGuest, MAX_OUTPUT};

    #[test]
    fn output_is_cut_and_read_on() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let kept = Arc::new(Mutex::new(CommandOutput::default()));
        let endless = tokio::io::repeat(b'x').take(MAX_OUTPUT as u64 + 100_000);
        runtime.block_on(keep(endless, Arc::clone(&kept)));
        let exit = proto::WaitResponse { exit: Some(proto::Exit { code: u32::MAX, ..Default::default() }) };
        let exit = FromGuest::new(exit).bound().unwrap();
        let answer = taken(&kept).into_answer(CommandOutput::default(), &exit);
        assert_eq!((answer.stdout.len(), answer.stderr.len(), answer.exit_code), (MAX_OUTPUT, 0, i32::MAX));
    }
}
