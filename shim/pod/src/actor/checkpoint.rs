//! Handles the actor's requests about checkpoints: decides whether the pod can be saved, and ends a checkpoint when its caller or the VM has gone.

use super::devices::OfferKind;
use super::{EffectEvent, PodActor, Reply, VmStage, report, send_reply};
use crate::checkpoint::{CheckpointJob, CheckpointTarget, PodToSave, SavablePod, check_container, volumes_in_guest};
use crate::error::{Failure, PodError};
use crate::guest_values::Bounded;
use crate::machine::{self, SCRATCH_DISK};
use crate::memory::MemoryResizer;
use crate::state::ContainerState;
use nacelle_proto::pod;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A checkpoint in progress.
pub(super) struct RunningCheckpoint {
    /// The number of the offer with its files.
    offer: u64,
    stop: Arc<AtomicBool>,
}

impl PodActor {
    /// Saves the pod. The reply comes when that has ended, also if it was stopped.
    pub(super) fn checkpoint(
        &mut self,
        request: &pod::CheckpointRequest,
        resizer: MemoryResizer,
        mut reply: Reply<Bounded<pod::CheckpointResponse>>,
    ) {
        let job = match self.prepare_checkpoint(request, resizer) {
            Ok(job) => job,
            Err(failure) => return send_reply(reply, Err(failure)),
        };
        let (events, stop) = (self.events.clone(), Arc::clone(&job.pod.stop));
        tokio::spawn(async move {
            let mut work = std::pin::pin!(job.run());
            let outcome = tokio::select! {
                outcome = &mut work => outcome,
                // The requester has disconnected.
                () = reply.closed() => {
                    stop.store(true, Ordering::Relaxed);
                    work.await
                }
            };
            // First, so that a requester may begin the next one when it has the reply.
            report(&events, EffectEvent::CheckpointEnded);
            send_reply(reply, outcome.map_err(Failure::from));
        });
    }

    fn prepare_checkpoint(
        &mut self,
        request: &pod::CheckpointRequest,
        resizer: MemoryResizer,
    ) -> Result<CheckpointJob, Failure> {
        let agent = self.agent()?;
        if self.checkpoint.is_some() {
            return Err(PodError::CheckpointInProgress.into());
        }
        let VmStage::Running { machine, memory, .. } = &self.vm else { return Err(self.unavailable()) };
        let scratch = machine::disk(machine, SCRATCH_DISK).filter(|_| machine.as_snapshottable().is_some());
        let (Some(scratch), Some(tracker)) = (scratch, self.tracker.clone()) else {
            return Err(PodError::NoSavableVm.into());
        };
        self.describe_savable()?;
        let no_files = || PodError::NoCheckpointFiles { name: request.name.clone() };
        let offer = self.find_offer(OfferKind::Checkpoint, "", &request.name).ok_or_else(no_files)?;
        let target = self.offers.remove(&offer).and_then(|offer| CheckpointTarget::new(offer.files));
        let stop = Arc::new(AtomicBool::new(false));
        let pod = PodToSave {
            agent,
            machine: Arc::clone(machine),
            scratch,
            expected: request.container_ids.iter().cloned().collect(),
            resizer,
            actor: self.events.clone(),
            stop: Arc::clone(&stop),
        };
        let job = CheckpointJob { pod, target: target.ok_or_else(no_files)?, tracker, memory: *memory };
        self.checkpoint = Some(RunningCheckpoint { offer, stop });
        Ok(job)
    }

    /// Makes a checkpoint in progress end soon.
    pub(super) fn stop_checkpoint(&mut self) {
        if let Some(checkpoint) = &self.checkpoint {
            checkpoint.stop.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the checkpoint end soon whose files came with this offer.
    pub(super) fn stop_checkpoint_of(&mut self, offer: u64) {
        if self.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.offer == offer) {
            self.stop_checkpoint();
        }
    }

    /// Returns what the pod has at the moment, or why it cannot be saved.
    pub(super) fn describe_savable(&self) -> Result<SavablePod, PodError> {
        let has_ended =
            |state| matches!(state, ContainerState::Gone | ContainerState::Exited | ContainerState::Removing);
        let mut volumes = Vec::new();
        for entry in self.containers.values().filter(|entry| !has_ended(entry.state)) {
            check_container(&entry.request)?;
            volumes.extend(volumes_in_guest(&entry.request));
        }
        let images = self.images.placed().map(|(key, placement)| pod::PlacedImage {
            image_key: key.to_owned(),
            partition: placement.partition,
            offset: placement.offset,
            length: placement.length,
        });
        Ok(SavablePod { containers: self.containers.keys().cloned().collect(), images: images.collect(), volumes })
    }
}
