//! Tests of the store on healthy and full disks, and of commits that are cut.

use super::*;
use nacelle_model::testing::{container, pod};

mod damage;
mod migration;
mod transfer;

#[tokio::test]
async fn what_was_committed_is_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.redb");
    let (store, contents) = Store::open(&path, None).unwrap();
    assert!(contents.pods.is_empty());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let (pod, container) = (pod(1), container(2, 1));
    let changes = vec![Change::Pod(pod.clone().into()), Change::Container(container.clone().into())];
    store.commit(changes).await.unwrap();
    store.commit(vec![Change::Setting("pod_cidr", "10.0.0.0/24".into())]).await.unwrap();
    drop(store);
    let (store, contents) = Store::open(&path, None).unwrap();
    assert_eq!((contents.pods, contents.containers), (vec![pod.clone()], vec![container.clone()]));
    assert_eq!(contents.settings["pod_cidr"], "10.0.0.0/24");
    store.commit(vec![Change::ForgetContainer(container.id), Change::ForgetPod(pod.id)]).await.unwrap();
    drop(store);
    let (_, contents) = Store::open(&path, None).unwrap();
    assert!(contents.pods.is_empty() && contents.containers.is_empty());
}

/// A small tmpfs. `new` returns `None` if this process may not mount one.
struct Small(tempfile::TempDir);

impl Small {
    fn new() -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let none = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("tmpfs"), dir.path(), Some("tmpfs"), none, Some("size=16m")).ok()?;
        Some(Small(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn a_disk_that_was_full_once_is_written_again() {
    let Some(disk) = Small::new() else {
        return println!("skipped: no right to mount");
    };
    let path = disk.0.path().join("s.redb");
    let (store, _) = Store::open(&path, None).unwrap();
    store.commit(vec![Change::Pod(pod(1).into())]).await.unwrap();
    let filler = disk.0.path().join("filler");
    let _ = std::fs::write(&filler, vec![1; 16 << 20]);
    let long = || "x".repeat(4 << 20);
    let error = store.commit(vec![Change::Setting("long", long())]).await.unwrap_err();
    assert!(error.to_string().contains("write"), "{error}");
    std::fs::remove_file(&filler).unwrap();
    store.commit(vec![Change::Setting("long", long()), Change::Pod(pod(2).into())]).await.unwrap();
    drop(store);
    let contents = Store::open(&path, None).unwrap().1;
    assert_eq!((contents.pods.len(), contents.settings.len()), (2, 1));
}

#[tokio::test]
async fn a_commit_cut_before_it_is_not_there_and_cut_after_it_is() {
    for phase in [CommitPhase::Before, CommitPhase::After] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.redb");
        let cut = move |number: u64, current: CommitPhase| match number == 2 && current == phase {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let (store, _) = Store::open(&path, Some(Box::new(cut))).unwrap();
        store.commit(vec![Change::Pod(pod(1).into())]).await.unwrap();
        let second = tokio::spawn({
            let store = store.clone();
            async move { store.commit(vec![Change::Pod(pod(2).into())]).await }
        });
        let (_store, contents) = tokio::task::spawn_blocking(move || Store::open(&path, None)).await.unwrap().unwrap();
        assert_eq!(contents.pods.len(), if phase == CommitPhase::After { 2 } else { 1 });
        assert!(!second.is_finished());
        second.abort();
    }
}
