//! Keeps account of the checkpoints in progress: one of each pod at a time, each with the reasons to end it early.

use super::error::CheckpointError;
use nacelle_base::PodId;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

/// The bounds of the time before the caller's limit in which a checkpoint is stopped and removed.
const MARGIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// The checkpoints in progress on a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Checkpoints {
    pods: Arc<Mutex<BTreeSet<PodId>>>,
    ending: CancellationToken,
}

impl Checkpoints {
    /// Begins a checkpoint of this pod. It must be stopped in time to answer before `limit`.
    ///
    /// # Errors
    /// [`CheckpointError::InProgress`].
    pub(crate) fn begin(
        &self,
        pod: &PodId,
        limit: Instant,
    ) -> Result<(CheckpointClaim, CheckpointStop), CheckpointError> {
        if !self.lock().insert(pod.clone()) {
            return Err(CheckpointError::InProgress { pod: pod.clone() });
        }
        let now = Instant::now();
        let margin = (limit.saturating_duration_since(now) / 10).clamp(MARGIN.0, MARGIN.1);
        let deadline = limit.checked_sub(margin).unwrap_or(now);
        let claim = CheckpointClaim { pod: pod.clone(), all: self.clone() };
        Ok((claim, CheckpointStop { token: self.ending.child_token(), deadline }))
    }

    /// Stops all checkpoints, now and from now on: the daemon ends.
    pub(crate) fn stop_all(&self) {
        self.ending.cancel();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<PodId>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps other checkpoints of a pod away until it is dropped.
#[derive(Debug)]
pub(crate) struct CheckpointClaim {
    pod: PodId,
    all: Checkpoints,
}

impl Drop for CheckpointClaim {
    fn drop(&mut self) {
        self.all.lock().remove(&self.pod);
    }
}

/// The reasons to stop a checkpoint early.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointStop {
    token: CancellationToken,
    deadline: Instant,
}

impl CheckpointStop {
    /// Returns a guard that stops the checkpoint when it is dropped.
    pub(crate) fn guard(&self) -> DropGuard {
        self.token.clone().drop_guard()
    }

    /// Returns why the checkpoint must stop, if it must.
    pub(super) fn cause(&self) -> Option<StopCause> {
        if self.token.is_cancelled() {
            return Some(StopCause::Cancelled);
        }
        (Instant::now() >= self.deadline).then_some(StopCause::Deadline)
    }

    /// Fails if the checkpoint of this pod must stop.
    pub(super) fn check(&self, pod: &PodId) -> Result<(), CheckpointError> {
        self.cause().map_or(Ok(()), |cause| Err(CheckpointError::Stopped { pod: pod.clone(), cause }))
    }

    /// Completes when the checkpoint must stop.
    pub(super) async fn wait(&self) {
        tokio::select! {
            () = self.token.cancelled() => {}
            () = sleep_until(self.deadline) => {}
        }
    }
}

/// The reason for which a checkpoint was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// The time of the caller ends.
    Deadline,
    /// The caller has gone, or the daemon ends.
    Cancelled,
}

impl fmt::Display for StopCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StopCause::Deadline => "it was not complete before the time limit of the caller (grpc-timeout)",
            StopCause::Cancelled => "the caller has gone, or the daemon ends",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_stops_a_margin_before_the_limit_of_its_caller() {
        let pod = PodId::from_bytes([1; 32]);
        for (limit, margin) in [(1000, 200), (15_000, 1500), (600_000, 2000)] {
            let limit = Instant::now() + Duration::from_millis(limit);
            let (_claim, stop) = Checkpoints::default().begin(&pod, limit).unwrap();
            // A tenth of a time that has begun to pass.
            let (found, expected) = (limit - stop.deadline, Duration::from_millis(margin));
            assert!(found <= expected && found + Duration::from_millis(100) > expected, "{found:?}");
            assert_eq!(stop.cause(), None);
        }
        let limit = Instant::now() + Duration::from_millis(100);
        let (_claim, stop) = Checkpoints::default().begin(&pod, limit).unwrap();
        assert_eq!(stop.cause(), Some(StopCause::Deadline), "too little time for the margin");
    }

    #[tokio::test]
    async fn one_checkpoint_of_a_pod_is_in_progress_until_its_caller_or_the_daemon_ends() {
        let all = Checkpoints::default();
        let limit = Instant::now() + Duration::from_secs(60);
        let [one, two] = [1, 2].map(|n| PodId::from_bytes([n; 32]));
        let (claim, stop) = all.begin(&one, limit).unwrap();
        assert!(matches!(all.begin(&one, limit), Err(CheckpointError::InProgress { .. })));
        let (_other, of_other) = all.begin(&two, limit).unwrap();
        drop(stop.guard());
        stop.wait().await;
        assert_eq!((stop.cause(), of_other.cause()), (Some(StopCause::Cancelled), None));
        drop(claim);
        all.begin(&one, limit).unwrap();
        all.stop_all();
        assert_eq!(of_other.cause(), Some(StopCause::Cancelled));
        assert_eq!(all.begin(&one, limit).unwrap().1.cause(), Some(StopCause::Cancelled));
    }
}
