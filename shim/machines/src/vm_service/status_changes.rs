//! Follows the status of running VMs: each VM's keeper reports when it has changed. All watches share one command per VM. The keeper is
//! untrusted: it can only cause a notification, once a second.

use crate::runtime::{ExecStreams, PodRuntime, PodRuntimeError};
use nacelle_base::{Chain, ContainerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// The pause after a notification of one VM. What changes meanwhile causes one notification.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause before the keeper of a VM receives the command again after its reports have ended: the VM may only be about to start.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The VMs that the watches of a node follow.
pub(super) struct StatusFollowers {
    runtime: Arc<dyn PodRuntime>,
    followed: Mutex<BTreeMap<ContainerId, Follower>>,
    notified: Arc<watch::Sender<()>>,
}

/// The task that follows one VM.
struct Follower {
    /// The number of watches that follow the VM.
    watches: usize,
    task: AbortOnDropHandle<()>,
}

impl StatusFollowers {
    /// Follows no VM yet.
    pub fn new(runtime: Arc<dyn PodRuntime>) -> StatusFollowers {
        StatusFollowers { runtime, followed: Mutex::default(), notified: Arc::new(watch::Sender::new(())) }
    }

    fn followed(&self) -> MutexGuard<'_, BTreeMap<ContainerId, Follower>> {
        // Each change is a single insert, removal or count, so a panic in between leaves the map consistent.
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more watch of the VM in this container.
    fn add(&self, container: &ContainerId) {
        let mut followed = self.followed();
        match followed.get_mut(container) {
            Some(follower) => follower.watches += 1,
            None => {
                drop(followed.insert(container.clone(), Follower { watches: 1, task: self.start(container.clone()) }))
            }
        }
    }

    /// Counts one watch less. Without a watch the VM is no longer followed.
    fn remove(&self, container: &ContainerId) {
        let mut followed = self.followed();
        let Some(follower) = followed.get_mut(container) else { return };
        follower.watches -= 1;
        if follower.watches == 0 {
            followed.remove(container);
        }
    }

    /// Starts the task of a VM again if it has ended, which only a panic causes.
    fn restart(&self, container: &ContainerId) {
        if let Some(follower) = self.followed().get_mut(container).filter(|follower| follower.task.is_finished()) {
            follower.task = self.start(container.clone());
        }
    }

    fn start(&self, container: ContainerId) -> AbortOnDropHandle<()> {
        let (runtime, notified) = (Arc::clone(&self.runtime), Arc::clone(&self.notified));
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                if let Err(error) = follow_vm(&*runtime, &container, &notified).await {
                    tracing::debug!(container = %container, error = %Chain(&error), "cannot follow the status of a VM");
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }))
    }
}

/// The running VMs of one watch. Dropping it ends the reports of keepers that no other watch follows.
pub(super) struct StatusChanges {
    followers: Arc<StatusFollowers>,
    containers: BTreeSet<ContainerId>,
    changes: watch::Receiver<()>,
}

impl StatusChanges {
    /// Follows no VM yet.
    pub fn new(followers: Arc<StatusFollowers>) -> StatusChanges {
        let changes = followers.notified.subscribe();
        StatusChanges { followers, containers: BTreeSet::new(), changes }
    }

    /// Follows the VMs in exactly these containers.
    pub fn follow(&mut self, containers: BTreeSet<ContainerId>) {
        self.containers.intersection(&containers).for_each(|container| self.followers.restart(container));
        containers.difference(&self.containers).for_each(|container| self.followers.add(container));
        self.containers.difference(&containers).for_each(|container| self.followers.remove(container));
        self.containers = containers;
    }

    /// Forgets the changes so far. A list of the VMs that begins after this call includes them.
    pub fn mark_unchanged(&mut self) {
        self.changes.mark_unchanged();
    }

    /// Completes when the status of a VM may have changed.
    pub async fn changed(&mut self) {
        // The followers have the sender, so there is no other result.
        let _ = self.changes.changed().await;
    }
}

impl Drop for StatusChanges {
    fn drop(&mut self) {
        self.containers.iter().for_each(|container| self.followers.remove(container));
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
        let mut changes = StatusChanges::new(Arc::new(StatusFollowers::new(runtime.clone())));
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
        let mut changes = StatusChanges::new(Arc::new(StatusFollowers::new(runtime.clone())));
        changes.follow(BTreeSet::from([ContainerId::from_bytes([7; 32])]));
        execs.recv().await.unwrap();
        let mut keeper = runtime.next_stream().await;
        let flood =
            AbortOnDropHandle::new(tokio::spawn(
                async move { while keeper.write_all(&[b'\n'; 4096]).await.is_ok() {} },
            ));
        let start = std::time::Instant::now();
        for _ in 0..3 {
            changes.changed().await;
        }
        assert!(start.elapsed() >= 2 * PAUSE, "{:?}", start.elapsed());
        // A VM that is no longer followed has a closed stream.
        changes.follow(BTreeSet::new());
        flood.await.unwrap();
    }

    #[tokio::test]
    async fn watches_share_the_reports_of_a_vm() {
        let (runtime, mut execs) = FakeRuntime::new();
        let runtime = Arc::new(runtime);
        let followers = Arc::new(StatusFollowers::new(runtime.clone()));
        let id = ContainerId::from_bytes([7; 32]);
        let mut watches = [(); 2].map(|()| StatusChanges::new(Arc::clone(&followers)));
        watches.iter_mut().for_each(|watch| watch.follow(BTreeSet::from([id.clone()])));
        execs.recv().await.unwrap();
        let mut keeper = runtime.next_stream().await;
        keeper.write_all(b"\n").await.unwrap();
        for watch in &mut watches {
            watch.changed().await;
        }
        assert!(execs.try_recv().is_err(), "one command serves both");
        let [first, second] = watches;
        drop(first);
        assert_eq!(followers.followed().len(), 1);
        drop(second);
        assert!(followers.followed().is_empty());
        assert_eq!(keeper.read(&mut [0]).await.unwrap(), 0, "the command has ended");
    }
}
