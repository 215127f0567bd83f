//! Stops a container: sends its stop signal, waits for the grace period, then sends SIGKILL.
//!
//! The stop signal is sent once, however many requests there are; it is sent again only if sending it failed. A further
//! request can only bring SIGKILL forward: the earliest deadline of all requests counts.

use crate::agent::Agent;
use crate::container::wait_for_phase;
use crate::error::{Failure, PodError};
use crate::record::{ContainerPhase, SavedPodState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

const SIGKILL: u32 = 9;

/// The stops of one container.
#[derive(Default)]
pub struct ContainerStops {
    signalled: Arc<AtomicBool>,
    in_progress: Option<StopInProgress>,
}

struct StopInProgress {
    kill_at: watch::Sender<Instant>,
    done: watch::Receiver<Option<Result<(), Failure>>>,
}

/// The outcome of a stop, for each caller that waits for it.
pub struct StopResult(watch::Receiver<Option<Result<(), Failure>>>);

impl StopResult {
    /// Waits until the container has ended, or could not be stopped.
    pub async fn wait(mut self) -> Result<(), Failure> {
        let done = self.0.wait_for(Option::is_some).await.map_err(|_closed| PodError::Ending)?.clone();
        done.unwrap_or_else(|| Err(PodError::Ending.into()))
    }
}

/// The parameters of one stop.
pub struct ContainerStop {
    /// The agent in the guest.
    pub agent: Agent,
    /// The published state of the pod.
    pub published: watch::Receiver<SavedPodState>,
    /// The container's id.
    pub id: String,
    /// The number of the stop signal.
    pub signal: u32,
    /// The limit for a start in progress, and for the end after SIGKILL.
    pub limit: Duration,
}

impl ContainerStops {
    /// Begins a stop with `grace` from the stop signal to SIGKILL; joins the stop that is in progress, if there is one.
    pub fn begin(&mut self, stop: ContainerStop, grace: Duration) -> StopResult {
        let kill_time = Instant::now() + grace;
        if let Some(StopInProgress { kill_at, done }) = &self.in_progress
            && done.borrow().is_none()
            && done.has_changed().is_ok()
        {
            kill_at.send_if_modified(|kill_at| {
                let sooner = kill_time < *kill_at;
                *kill_at = kill_time.min(*kill_at);
                sooner
            });
            return StopResult(done.clone());
        }
        let (kill_at, deadline) = watch::channel(kill_time);
        let (result_sender, done) = watch::channel(None);
        let signalled = Arc::clone(&self.signalled);
        tokio::spawn(async move {
            let stopped = stop.run(deadline, &signalled).await;
            result_sender.send_replace(Some(stopped.map_err(Failure::from)));
        });
        self.in_progress = Some(StopInProgress { kill_at, done: done.clone() });
        StopResult(done)
    }
}

impl ContainerStop {
    async fn run(mut self, mut kill_at: watch::Receiver<Instant>, signalled: &AtomicBool) -> Result<(), PodError> {
        // A start in progress completes first.
        let what = "wait for the start of the container before its stop";
        let started = |phase| phase != ContainerPhase::Created;
        wait_for_phase(&mut self.published, &self.id, self.limit, what, started).await?;
        if *kill_at.borrow() > Instant::now() && !signalled.swap(true, Ordering::SeqCst) {
            let sent = self.signal(self.signal, false).await;
            if sent.is_err() {
                signalled.store(false, Ordering::SeqCst);
            }
            sent?;
        }
        while *kill_at.borrow_and_update() > Instant::now() {
            let (published, deadline) = (&mut self.published, *kill_at.borrow());
            let grace = deadline.saturating_duration_since(Instant::now());
            tokio::select! {
                ended = wait_for_phase(published, &self.id, grace, "stop the container", has_exited) => if ended.is_ok() { return Ok(()) },
                // The sender is dropped when the container is removed, which kills it; its record then shows the end.
                () = wait_for_change(&mut kill_at) => {}
            }
        }
        self.signal(SIGKILL, true).await?;
        wait_for_phase(&mut self.published, &self.id, self.limit, "kill the container", has_exited).await
    }

    /// Sends a signal. Succeeds if the VM has ended, and the container with it.
    async fn signal(&mut self, signal: u32, all: bool) -> Result<(), PodError> {
        match self.agent.signal(&self.id, "", signal, all).await {
            Err(error @ PodError::Died { .. }) => {
                let ended =
                    wait_for_phase(&mut self.published, &self.id, self.limit, "stop the container", has_exited).await;
                ended.map_err(|_late| error)
            }
            other => other,
        }
    }
}

fn has_exited(phase: ContainerPhase) -> bool {
    phase == ContainerPhase::Exited
}

/// Waits until the deadline changes.
async fn wait_for_change(kill_at: &mut watch::Receiver<Instant>) {
    if kill_at.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}
