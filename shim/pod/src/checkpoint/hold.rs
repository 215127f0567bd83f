//! Takes the steps of a checkpoint around the pause of the VM: freezes the containers before it, begins the copy of the scratch disk in it, and
//! releases the containers after it.

use super::{PodToSave, SavablePod, is_stop, wait_for};
use crate::actor::{ActorMessage, ActorRequest};
use crate::agent::{Agent, TOKEN_BYTES};
use crate::error::PodError;
use crate::guest_values::{Bounded, HeldContainers};
use crate::machine::random;
use crate::memory::ReserveInUse;
use nacelle_base::Chain;
use nacelle_base::task::TaskError;
use nacelle_engine::{
    BlockError, CopiedDisk, DiskCopy, EngineError, PauseSteps, PreparedCopy, RunningSaveReport, StepFailed,
};
use nacelle_proto::pod;
use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// The time after which the agent releases the containers by itself.
const LEASE: Duration = Duration::from_secs(30);
/// The part of the lease that must remain when the VM is paused: from then on no time passes in the guest.
const LEASE_MARGIN: Duration = Duration::from_secs(5);
/// The time between two attempts to release the containers.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

/// The steps around the pause.
pub(super) struct HoldSteps<'a> {
    pod: &'a PodToSave,
    runtime: &'a Handle,
    token: [u8; TOKEN_BYTES],
    /// The file for the scratch disk, until its copy is prepared.
    target: Option<File>,
    prepared: Option<PreparedCopy>,
    begun: Option<DiskCopy>,
    copying: Option<JoinHandle<Result<CopiedDisk, BlockError>>>,
    /// When Hold was sent.
    held_at: Option<Instant>,
    held: Bounded<HeldContainers>,
    /// Keeps resizes of the memory waiting until the VM runs again.
    reserve: Option<ReserveInUse>,
    reserve_bytes: u64,
    images: Vec<pod::PlacedImage>,
    volumes: Vec<pod::VolumeInGuest>,
    /// Returns for how long the containers were frozen.
    releasing: Option<JoinHandle<Duration>>,
    /// Why a step failed.
    failure: Option<PodError>,
}

impl<'a> HoldSteps<'a> {
    /// Returns the steps of a pod whose scratch disk is copied to `target`.
    pub fn new(pod: &'a PodToSave, runtime: &'a Handle, target: File) -> Result<HoldSteps<'a>, PodError> {
        let mut token = [0; TOKEN_BYTES];
        random(&mut token)?;
        Ok(HoldSteps {
            pod,
            runtime,
            token,
            target: Some(target),
            prepared: None,
            begun: None,
            copying: None,
            held_at: None,
            held: Bounded::default(),
            reserve: None,
            reserve_bytes: 0,
            images: Vec::new(),
            volumes: Vec::new(),
            releasing: None,
            failure: None,
        })
    }

    /// Waits until the containers are released and the scratch disk is copied, and returns the response: `figures` and what the steps know. The
    /// first error of all ends the rest.
    pub fn finish(
        mut self,
        saved: Result<RunningSaveReport, EngineError>,
        figures: pod::CheckpointResponse,
    ) -> Result<Bounded<pod::CheckpointResponse>, PodError> {
        let saved = saved.map_err(|error| match (error, self.failure.take()) {
            (EngineError::Step { .. }, Some(failure)) => failure,
            (error, failure) => {
                // The VM could not be resumed after that.
                failure.inspect(|failure| tracing::error!("a checkpoint failed: {}", Chain(failure)));
                PodError::Engine(error)
            }
        });
        if saved.is_err() {
            self.pod.stop.store(true, Ordering::Relaxed);
        }
        let copied = self.copying.take().map(|copying| self.runtime.block_on(copying));
        let frozen = self.releasing.take().map(|releasing| self.runtime.block_on(releasing));
        let copied = copied.map_or(Ok(CopiedDisk::default()), |ended| {
            let copied = ended.map_err(|error| TaskError::new("copy the scratch disk", error))?;
            copied.map_err(|source| PodError::CopyScratch { source })
        });
        let (saved, copied) = match (saved, copied) {
            (Ok(saved), Ok(copied)) => (saved, copied),
            // The copy of the disk was the first to fail, and has stopped the rest.
            (Err(error), Err(cause)) if is_stop(&error) => return Err(cause),
            (Err(error), _) | (Ok(_), Err(error)) => return Err(error),
        };
        let frozen = frozen.transpose().map_err(|error| TaskError::new("release the containers", error))?;
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Ok(self.held.into_response(pod::CheckpointResponse {
            frozen_micros: micros(frozen.unwrap_or_default()),
            paused_micros: micros(saved.pause),
            private_pages: saved.pages.private,
            paused_pages: saved.pages.paused,
            scratch_bytes: copied.copied,
            reserve_bytes: self.reserve_bytes,
            images: self.images,
            volumes: self.volumes,
            ..figures
        }))
    }

    fn hold(&mut self) -> Result<(), PodError> {
        let pod = self.pod;
        // Dirty pages of the scratch disk are in the saved memory, too: this only makes the pause shorter.
        match self.block_on(pod.agent.sync()) {
            Ok(()) => {}
            Err(PodError::CheckpointStopped) => return Err(PodError::CheckpointStopped),
            Err(error) => {
                tracing::info!("the guest did not write its dirty pages before it is saved: {}", Chain(&error))
            }
        }
        // Where files can share blocks, this flushes the disk.
        if let Some(target) = self.target.take() {
            let prepared = pod.scratch.prepare_copy(target);
            self.prepared = Some(prepared.map_err(|source| PodError::CopyScratch { source })?);
        }
        self.reserve = Some(self.block_on(async { Ok(pod.resizer.hold().await) })?);
        let held_at = *self.held_at.insert(Instant::now());
        let held = self.block_on(pod.agent.hold(&self.token, LEASE))?;
        // The agent begins no change as long as it holds the containers, so no container appears from now on.
        let now = self.block_on(describe(&pod.actor))?;
        self.held = held.bound(&now.containers);
        if self.held.running != pod.expected {
            return Err(other_containers(&pod.expected, &self.held.running));
        }
        self.images = now.images;
        self.volumes = now.volumes.into_iter().filter(|volume| pod.expected.contains(&volume.container_id)).collect();
        if held_at.elapsed() + LEASE_MARGIN > LEASE {
            let limit = LEASE.saturating_sub(LEASE_MARGIN);
            return Err(PodError::TooSlow { what: "pause the VM while its containers are frozen", limit });
        }
        Ok(())
    }

    /// Waits for a future on the async runtime, or until the checkpoint is stopped.
    fn block_on<T>(&self, work: impl Future<Output = Result<T, PodError>>) -> Result<T, PodError> {
        self.runtime.block_on(async {
            tokio::select! {
                done = work => done,
                () = wait_for(&self.pod.stop) => Err(PodError::CheckpointStopped),
            }
        })
    }

    fn keep_failure(&mut self, outcome: Result<(), PodError>) -> Result<(), StepFailed> {
        outcome.map_err(|error| {
            self.failure.get_or_insert(error);
            StepFailed
        })
    }
}

impl PauseSteps for HoldSteps<'_> {
    fn before_pause(&mut self) -> Result<(), StepFailed> {
        let held = self.hold();
        self.keep_failure(held)
    }

    fn while_paused(&mut self) -> Result<(), StepFailed> {
        let begun = match self.prepared.take().map(PreparedCopy::begin) {
            Some(Ok(copy)) => {
                self.begun = Some(copy);
                Ok(())
            }
            Some(Err(source)) => Err(PodError::CopyScratch { source }),
            None => Err(PodError::NoSavableVm),
        };
        self.keep_failure(begun)
    }

    fn after_pause(&mut self) {
        self.reserve_bytes = self.reserve.take().map_or(0, |reserve| reserve.bytes());
        if let Some(held_at) = self.held_at {
            let release = release(self.pod.agent.clone(), self.token, held_at);
            self.releasing = Some(self.runtime.spawn(release));
        }
        if let Some(copy) = self.begun.take() {
            let stop = Arc::clone(&self.pod.stop);
            self.copying = Some(self.runtime.spawn_blocking(move || {
                let copied = copy.finish(&stop);
                if copied.is_err() {
                    // The rest of the memory is of no use then.
                    stop.store(true, Ordering::Relaxed);
                }
                copied
            }));
        }
    }
}

/// Releases the containers, and returns for how long they were frozen at most. Repeats that until the agent answers, or its lease has ended.
async fn release(agent: Agent, token: [u8; TOKEN_BYTES], held_at: Instant) -> Duration {
    // It began before the VM was paused.
    let end = Instant::now() + LEASE;
    loop {
        match agent.release(&token).await {
            // Without a VM no container runs.
            Ok(()) | Err(PodError::Died { .. }) => return held_at.elapsed(),
            Err(error) => tracing::warn!("cannot release the containers after a checkpoint: {}", Chain(&error)),
        }
        if Instant::now() >= end {
            return held_at.elapsed();
        }
        tokio::time::sleep(RELEASE_INTERVAL).await;
    }
}

async fn describe(actor: &mpsc::UnboundedSender<ActorMessage>) -> Result<SavablePod, PodError> {
    let (reply, pod) = oneshot::channel();
    actor.send(ActorMessage::Request(ActorRequest::DescribeSavable(reply))).map_err(|_ended| PodError::Ending)?;
    pod.await.map_err(|_ended| PodError::Ending)?
}

fn other_containers(expected: &BTreeSet<String>, running: &BTreeSet<String>) -> PodError {
    let list = |ids: &BTreeSet<String>| ids.iter().cloned().collect::<Vec<_>>().join(", ");
    PodError::OtherContainers { expected: list(expected), running: list(running) }
}
