//! Holds a pod while its VM is saved: a hold freezes the containers and delays every operation that would change the pod.
//!
//! A task owns each hold from its beginning to its end, so that a client that disconnects leaves nothing halfway. Everything that ends the
//! task thaws the containers: a failure, Release, the end of the lease, a panic.

use nacelle_base::{Classify, FailureKind};
use nacelle_proto::agent::HoldResponse;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::error::AgentError;
use super::pod::AgentPod;

/// The length of a token in bytes.
const TOKEN_BYTES: usize = 16;
/// The shortest and the longest lease.
const LEASES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Reasons a pod is not held or not released.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum HoldError {
    #[error("cannot write the scratch disk: the pod has none, because it has no guest")]
    NoScratchDisk,
    #[error("cannot hold the pod: it has no guest; its processes are on the node")]
    NoGuest,
    #[error("cannot hold or release the pod: the token has {length} bytes; a token of {TOKEN_BYTES} bytes is needed")]
    Token { length: usize },
    #[error("cannot hold the pod: lease_ms is {millis}; {} to {} are allowed", LEASES.0.as_millis(), LEASES.1.as_millis())]
    Lease { millis: u128 },
    #[error("cannot hold the pod: it is held with another token; release it first, or wait for the end of the lease")]
    OtherToken,
    #[error("cannot hold the pod: the hold with this token has been released or its lease has ended; use a new token")]
    Ended,
    #[error("cannot hold the pod: a command runs in the guest; end it first")]
    GuestShell,
    #[error("cannot hold the pod: an operation that changes it has not ended within {seconds} s; try again later")]
    Operation { seconds: u64 },
    #[error("cannot freeze the containers within {seconds} s; try again later")]
    FreezeTimeout { seconds: u64 },
    #[error("cannot freeze the containers by {}", path.display())]
    Freeze { path: PathBuf, source: io::Error },
}

impl Classify for HoldError {
    fn kind(&self) -> FailureKind {
        match self {
            HoldError::Token { .. } | HoldError::Lease { .. } => FailureKind::Invalid,
            HoldError::NoScratchDisk
            | HoldError::NoGuest
            | HoldError::OtherToken
            | HoldError::Ended
            | HoldError::GuestShell => FailureKind::Conflict,
            HoldError::Operation { .. } | HoldError::FreezeTimeout { .. } => FailureKind::Timeout,
            HoldError::Freeze { .. } => FailureKind::Internal,
        }
    }
}

/// Identifies a hold. The client chooses a new one for each hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HoldToken([u8; TOKEN_BYTES]);

impl HoldToken {
    fn parse(token: &[u8]) -> Result<HoldToken, HoldError> {
        token.try_into().map(HoldToken).map_err(|_length| HoldError::Token { length: token.len() })
    }
}

/// The result of the attempt to freeze the containers; `None` during the attempt.
type HoldOutcome = Option<Result<HoldResponse, Arc<HoldError>>>;

/// A hold, which may have ended.
#[derive(Debug)]
struct HoldTask {
    token: HoldToken,
    task: AbortHandle,
    /// The task drops the sender when the containers are thawed.
    outcome: watch::Receiver<HoldOutcome>,
    /// Becomes true when the VM was restored while the pod was held, which ends the lease.
    is_restored: watch::Sender<bool>,
}

impl HoldTask {
    fn has_ended(&self) -> bool {
        self.outcome.has_changed().is_err()
    }

    /// Whether the VM was restored while this hold kept the containers frozen.
    fn is_restored(&self) -> bool {
        *self.is_restored.borrow() && matches!(&*self.outcome.borrow(), Some(Ok(_)))
    }

    fn has_failed(&self) -> bool {
        matches!(&*self.outcome.borrow(), Some(Err(_)))
    }
}

#[derive(Debug, Default)]
struct Holds {
    last: Option<HoldTask>,
    /// The token of the last Release. A Hold that this Release has overtaken must not begin.
    released: Option<HoldToken>,
}

/// The hold of a pod. There is one at a time.
#[derive(Debug, Default)]
pub(super) struct HoldTable(Mutex<Holds>);

impl HoldTable {
    fn lock(&self) -> MutexGuard<'_, Holds> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the pod by `freeze`, which returns what thaws the containers when it is dropped. Waits for a hold with the same token that has
    /// begun before.
    async fn hold<F: Send + 'static>(
        &self,
        token: HoldToken,
        lease: Duration,
        freeze: impl Future<Output = Result<(HoldResponse, F), HoldError>> + Send + 'static,
    ) -> Result<HoldResponse, Arc<HoldError>> {
        let mut outcome = self.begin(token, lease, freeze)?;
        match outcome.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(result)) => result.clone(),
            // The task ended during the attempt.
            Ok(None) | Err(_) => Err(HoldError::Ended.into()),
        }
    }

    fn begin<F: Send + 'static>(
        &self,
        token: HoldToken,
        lease: Duration,
        freeze: impl Future<Output = Result<(HoldResponse, F), HoldError>> + Send + 'static,
    ) -> Result<watch::Receiver<HoldOutcome>, HoldError> {
        let mut holds = self.lock();
        if holds.released == Some(token) {
            return Err(HoldError::Ended);
        }
        match &holds.last {
            Some(last) if last.token == token && last.has_ended() && !last.has_failed() => {
                return Err(HoldError::Ended);
            }
            Some(last) if last.token == token && !last.has_ended() => return Ok(last.outcome.clone()),
            Some(last) if !last.has_ended() => return Err(HoldError::OtherToken),
            _ => {}
        }
        let (sender, outcome) = watch::channel(None);
        let is_restored = watch::Sender::new(false);
        let task = tokio::spawn(keep_frozen(freeze, lease, is_restored.subscribe(), sender)).abort_handle();
        holds.last = Some(HoldTask { token, task, outcome: outcome.clone(), is_restored });
        Ok(outcome)
    }

    /// Ends the hold with this token, and waits until the containers are thawed. Succeeds if there is no such hold.
    async fn release(&self, token: HoldToken) {
        self.lock().released = Some(token);
        self.end(|last| last.token == token).await;
    }

    /// Ends the hold of a restored VM, and waits until the containers are thawed.
    pub(super) async fn release_restored(&self) {
        self.end(HoldTask::is_restored).await;
    }

    async fn end(&self, is_meant: impl Fn(&HoldTask) -> bool) {
        let mut outcome = {
            let holds = self.lock();
            let Some(last) = holds.last.as_ref().filter(|last| !last.has_ended() && is_meant(last)) else { return };
            last.task.abort();
            last.outcome.clone()
        };
        while outcome.changed().await.is_ok() {}
    }

    /// Whether the VM was restored while the pod was held, and the pod is still held.
    pub(super) fn is_restored(&self) -> bool {
        self.lock().last.as_ref().is_some_and(|last| !last.has_ended() && last.is_restored())
    }

    /// Ends the lease of the hold: it lasts until it is released, or until the VM is that of another pod.
    fn end_lease(&self) {
        if let Some(last) = &self.lock().last {
            last.is_restored.send_replace(true);
        }
    }
}

/// Freezes the containers and keeps them frozen until the lease ends, or until the task is aborted. Parameters are dropped after local
/// variables: the containers are thawed before the end of `outcome` reports it.
async fn keep_frozen<F>(
    freeze: impl Future<Output = Result<(HoldResponse, F), HoldError>>,
    lease: Duration,
    mut is_restored: watch::Receiver<bool>,
    outcome: watch::Sender<HoldOutcome>,
) {
    let _frozen = match freeze.await {
        Ok((response, frozen)) => {
            outcome.send_replace(Some(Ok(response)));
            frozen
        }
        Err(error) => {
            outcome.send_replace(Some(Err(Arc::new(error))));
            return;
        }
    };
    if tokio::time::timeout(lease, is_restored.wait_for(|restored| *restored))
        .await
        .is_ok_and(|received| received.is_ok())
    {
        tracing::info!(
            "the VM was restored while the pod was held: the containers are frozen until the pod is released"
        );
        std::future::pending::<()>().await;
    }
    tracing::warn!(seconds = lease.as_secs(), "the pod was not released within the lease: its containers run again");
}

impl AgentPod {
    /// Freezes all containers and delays every operation that changes the pod, until `release` or for the time of `lease`, which begins when
    /// this returns. A repeated call with the same token returns the same.
    pub async fn hold(self: Arc<Self>, token: &[u8], lease: Duration) -> Result<HoldResponse, AgentError> {
        let token = HoldToken::parse(token).map_err(Arc::new)?;
        if !(LEASES.0..=LEASES.1).contains(&lease) {
            return Err(Arc::new(HoldError::Lease { millis: lease.as_millis() }).into());
        }
        let freeze = Arc::clone(&self).freeze();
        Ok(self.holds.hold(token, lease, freeze).await?)
    }

    /// Ends the hold with this token, also one whose `hold` has not returned.
    pub async fn release(&self, token: &[u8]) -> Result<(), AgentError> {
        let token = HoldToken::parse(token).map_err(Arc::new)?;
        self.holds.release(token).await;
        Ok(())
    }

    /// Keeps a pod that is held frozen until Restore: its VM was restored, so that the lease has lost its meaning.
    pub fn end_lease(&self) {
        self.holds.end_lease();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::oneshot;

    const A: HoldToken = HoldToken([1; TOKEN_BYTES]);
    const B: HoldToken = HoldToken([2; TOKEN_BYTES]);
    const LEASE: Duration = Duration::from_secs(30);

    /// Counts the frozen pods that exist.
    struct Frozen(Arc<AtomicUsize>);

    impl Drop for Frozen {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[derive(Default)]
    struct Fixture {
        table: Arc<HoldTable>,
        frozen: Arc<AtomicUsize>,
    }

    impl Fixture {
        /// Freezes at once, then waits for `go` with the frozen containers.
        fn freeze(
            &self,
            go: impl Future<Output = Result<(), HoldError>> + Send + 'static,
        ) -> impl Future<Output = Result<(HoldResponse, Frozen), HoldError>> + Send + 'static {
            let count = Arc::clone(&self.frozen);
            async move {
                count.fetch_add(1, Ordering::SeqCst);
                let frozen = Frozen(count);
                go.await?;
                Ok((HoldResponse { running: vec!["c1".into()], undrained: Vec::new() }, frozen))
            }
        }

        async fn hold(&self, token: HoldToken, lease: Duration) -> Result<HoldResponse, Arc<HoldError>> {
            self.table.hold(token, lease, self.freeze(async { Ok(()) })).await
        }

        fn count(&self) -> usize {
            self.frozen.load(Ordering::SeqCst)
        }
    }

    fn test(work: impl AsyncFnOnce(Fixture)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work(Fixture::default()));
    }

    #[test]
    fn one_token_holds_until_it_is_released() {
        test(async |pod| {
            pod.table.release(B).await;
            pod.table.release_restored().await;
            let first = pod.hold(A, LEASE).await.unwrap();
            assert_eq!(pod.hold(A, LEASE).await.unwrap(), first);
            assert_eq!(pod.count(), 1);
            assert!(matches!(&*pod.hold(HoldToken([3; 16]), LEASE).await.unwrap_err(), HoldError::OtherToken));
            pod.table.release(B).await;
            pod.table.release_restored().await;
            assert_eq!((pod.count(), pod.table.is_restored()), (1, false));
            for _ in 0..2 {
                pod.table.release(A).await;
                assert_eq!(pod.count(), 0, "it is thawed when the release returns");
            }
            for token in [A, A] {
                assert!(matches!(&*pod.hold(token, LEASE).await.unwrap_err(), HoldError::Ended));
            }
            pod.hold(HoldToken([3; 16]), LEASE).await.unwrap();
            assert_eq!(pod.count(), 1);
        });
    }

    #[test]
    fn a_release_that_overtakes_a_hold_prevents_it() {
        test(async |pod| {
            pod.table.release(A).await;
            assert!(matches!(&*pod.hold(A, LEASE).await.unwrap_err(), HoldError::Ended));
            assert_eq!(pod.count(), 0);
            pod.hold(B, LEASE).await.unwrap();
        });
    }

    #[test]
    fn a_release_cancels_a_hold_that_has_not_returned() {
        test(async |pod| {
            let table = Arc::clone(&pod.table);
            let freeze = pod.freeze(std::future::pending());
            let held = tokio::spawn(async move { table.hold(A, LEASE, freeze).await });
            while pod.count() == 0 {
                tokio::task::yield_now().await;
            }
            pod.table.release(A).await;
            assert_eq!(pod.count(), 0);
            assert!(matches!(&*held.await.unwrap().unwrap_err(), HoldError::Ended));
            pod.hold(B, LEASE).await.unwrap();
        });
    }

    #[test]
    fn a_client_that_disconnects_leaves_the_hold_to_the_next_request() {
        test(async |pod| {
            let (go, gone) = oneshot::channel::<()>();
            let freeze = pod.freeze(async move { gone.await.map_err(|_closed| HoldError::GuestShell) });
            let hold = pod.table.hold(A, LEASE, freeze);
            assert!(tokio::time::timeout(Duration::from_millis(1), hold).await.is_err());
            assert_eq!(pod.count(), 1);
            go.send(()).unwrap();
            pod.hold(A, LEASE).await.unwrap();
            assert_eq!(pod.count(), 1);
        });
    }

    #[test]
    fn a_failure_thaws_and_may_be_repeated() {
        test(async |pod| {
            let failing = || pod.freeze(async { Err(HoldError::GuestShell) });
            for _ in 0..2 {
                let failed = pod.table.hold(A, LEASE, failing()).await.unwrap_err();
                assert!(matches!(&*failed, HoldError::GuestShell));
                assert_eq!(pod.count(), 0);
            }
            pod.hold(A, LEASE).await.unwrap();
        });
    }

    #[test]
    fn the_lease_ends_the_hold_unless_the_vm_was_restored() {
        test(async |pod| {
            let lease = Duration::from_millis(20);
            pod.hold(A, lease).await.unwrap();
            while pod.count() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(matches!(&*pod.hold(A, lease).await.unwrap_err(), HoldError::Ended));
            pod.table.release(A).await;
            pod.hold(B, lease).await.unwrap();
            pod.table.end_lease();
            tokio::time::sleep(lease * 3).await;
            assert_eq!(pod.count(), 1);
            for _ in 0..2 {
                pod.table.release_restored().await;
                assert_eq!((pod.count(), pod.table.is_restored()), (0, false));
            }
            // The next hold has a lease again.
            pod.hold(HoldToken([3; 16]), LEASE).await.unwrap();
            pod.table.release_restored().await;
            assert_eq!((pod.count(), pod.table.is_restored()), (1, false));
        });
    }

    #[test]
    fn tokens_have_sixteen_bytes() {
        for length in [0, 15, 17] {
            let refused = HoldToken::parse(&vec![1; length]).unwrap_err();
            assert_eq!(refused.kind(), FailureKind::Invalid);
            assert!(refused.to_string().contains(&format!("{length} bytes")), "{refused}");
        }
        assert_eq!(HoldToken::parse(&[1; 16]).unwrap(), A);
    }
}
