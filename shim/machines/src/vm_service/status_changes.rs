//! Follows the status of running VMs: each VM's keeper reports when it has changed. The keeper is untrusted: it can only cause a
//! notification, at a bounded rate.

use crate::runtime::{ExecStreams, PodRuntime, PodRuntimeError};
use nacelle_base::{Chain, ContainerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// The pause after a notification of one VM. What changes meanwhile causes one notification.
const PAUSE: Duration = Duration::from_millis(250);
/// The pause before the keeper of a VM is asked again after its reports have ended: its VM may only be about to start.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The running VMs of one watch. Dropping it ends the reports of their keepers.
pub(super) struct StatusChanges {
    runtime: Arc<dyn PodRuntime>,
    followed: BTreeMap<ContainerId, AbortOnDropHandle<()>>,
    notified: watch::Sender<()>,
    changes: watch::Receiver<()>,
}

impl StatusChanges {
    /// Follows no VM yet.
    pub fn new(runtime: Arc<dyn PodRuntime>) -> StatusChanges {
        let (notified, changes) = watch::channel(());
        StatusChanges { runtime, followed: BTreeMap::new(), notified, changes }
    }

    /// Follows the VMs in exactly these containers.
    pub fn follow(&mut self, containers: BTreeSet<ContainerId>) {
        self.followed.retain(|container, _| containers.contains(container));
        for container in containers {
            let (runtime, notified) = (Arc::clone(&self.runtime), self.notified.clone());
            self.followed.entry(container).or_insert_with_key(|container| {
                let container = container.clone();
                AbortOnDropHandle::new(tokio::spawn(async move {
                    loop {
                        if let Err(error) = follow_vm(&*runtime, &container, &notified).await {
                            let error = Chain(&error);
                            tracing::debug!(container = %container, %error, "cannot follow the status of a VM");
                        }
                        tokio::time::sleep(RETRY_PAUSE).await;
                    }
                }))
            });
        }
    }

    /// Forgets the changes so far. A list of the VMs that begins after this call includes them.
    pub fn mark_unchanged(&mut self) {
        self.changes.mark_unchanged();
    }

    /// Completes when the status of a VM may have changed.
    pub async fn changed(&mut self) {
        // This value has a sender, so there is no other result.
        let _ = self.changes.changed().await;
    }
}

/// Notifies of changes until the keeper's reports end.
async fn follow_vm(
    runtime: &dyn PodRuntime,
    container: &ContainerId,
    notified: &watch::Sender<()>,
) -> Result<(), PodRuntimeError> {
    let args = ["@vm", "changes"].map(str::to_owned).to_vec();
    let ExecStreams { mut stdout, stderr: _stderr, exit_code: _exit_code } =
        runtime.start_exec(container, args).await?;
    let mut reports = [0; 64];
    while let Ok(1..) = stdout.read(&mut reports).await {
        notified.send_replace(());
        tokio::time::sleep(PAUSE).await;
    }
    // The VM has ended, or its pod process has.
    notified.send_replace(());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::testing::FakeRuntime;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn a_vm_is_followed_again_after_its_reports_have_ended() {
        let (runtime, mut execs) = FakeRuntime::new();
        let runtime = Arc::new(runtime);
        let mut changes = StatusChanges::new(runtime.clone());
        let id = ContainerId::from_bytes([7; 32]);
        for _ in 0..2 {
            changes.follow(BTreeSet::from([id.clone()]));
            assert_eq!(execs.recv().await.unwrap(), ["@vm", "changes"]);
            let mut keeper = runtime.next_stream().await;
            changes.mark_unchanged();
            keeper.write_all(b"\n").await.unwrap();
            changes.changed().await;
            changes.mark_unchanged();
            drop(keeper);
            changes.changed().await;
        }
    }

    #[tokio::test]
    async fn a_keeper_that_reports_without_end_is_read_at_a_bounded_rate() {
        let (runtime, mut execs) = FakeRuntime::new();
        let runtime = Arc::new(runtime);
        let mut changes = StatusChanges::new(runtime.clone());
        changes.follow(BTreeSet::from([ContainerId::from_bytes([7; 32])]));
        execs.recv().await.unwrap();
        let mut keeper = runtime.next_stream().await;
        let flood =
            AbortOnDropHandle::new(tokio::spawn(
                async move { while keeper.write_all(&[b'\n'; 4096]).await.is_ok() {} },
            ));
        let start = std::time::Instant::now();
        for _ in 0..8 {
            changes.changed().await;
        }
        assert!(start.elapsed() >= 7 * PAUSE, "{:?}", start.elapsed());
        // A VM that is no longer followed has a closed stream.
        changes.follow(BTreeSet::new());
        flood.await.unwrap();
    }
}
