//! Tests that a store survives `kill -9` at any point of a pull.

use crate::common::server::{Server, honest};
use crate::common::{Packing, Tar, image, reopen, store_config};
use nacelle_image::{ImageStore, ImageStoreConfig, Reference, RegistryConfig};
use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const DIRECTORY: &str = "NACELLE_TEST_CRASH_DIRECTORY";
const HOST: &str = "NACELLE_TEST_CRASH_HOST";

fn open(directory: &Path, host: &str) -> ImageStore {
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    reopen(directory, &ImageStoreConfig { registries: [(host.to_owned(), special)].into(), ..store_config() })
}

fn name(host: &str) -> Reference {
    Reference::parse(&format!("{host}/x:t")).unwrap()
}

/// The process that is killed: it pulls and removes the image forever. Runs only as a child of the test below.
#[tokio::test(flavor = "multi_thread")]
async fn victim() {
    let (Ok(directory), Ok(host)) = (std::env::var(DIRECTORY), std::env::var(HOST)) else { return };
    let store = open(directory.as_ref(), &host);
    loop {
        store.pull(&name(&host), None).await.unwrap();
        store.remove(&name(&host).to_string(), &HashSet::new()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_pull_leaves_the_old_state_or_the_new() {
    let layers = [5u8, 6].map(|byte| (Tar::new().file("f", 0o644, &vec![byte; 300_000]).done(), Packing::Plain));
    let good = image(&layers);
    let (served, asked) = (good.clone(), Arc::new(AtomicUsize::new(0)));
    let (count, wanted) = (Arc::clone(&asked), Arc::new(AtomicUsize::new(usize::MAX)));
    let (limit, victim) = (Arc::clone(&wanted), Arc::new(Mutex::new(None::<std::process::Child>)));
    let killer = Arc::clone(&victim);
    // The process is killed at its n-th request: before the answer, or while it works on earlier answers.
    let server = Server::start(move |asked| {
        if count.fetch_add(1, Ordering::SeqCst) >= limit.load(Ordering::SeqCst)
            && let Some(child) = killer.lock().unwrap().as_mut()
        {
            let _ = child.kill();
        }
        honest(&served, asked)
    });
    let directory = tempfile::tempdir().unwrap();
    for at in 0..12 {
        asked.store(0, Ordering::SeqCst);
        wanted.store(at, Ordering::SeqCst);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::victim"])
            .env(DIRECTORY, directory.path())
            .env(HOST, server.host())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        *victim.lock().unwrap() = Some(child);
        loop {
            if victim.lock().unwrap().as_mut().unwrap().try_wait().unwrap().is_some() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let store = open(directory.path(), &server.host());
        for record in store.list() {
            assert_eq!(record.id.to_string(), good.config);
            for extent in store.rootfs(&record.id).await.unwrap().disk.extents {
                assert_eq!(std::fs::metadata(&extent.path).unwrap().len(), extent.length);
            }
        }
    }
    wanted.store(usize::MAX, Ordering::SeqCst);
    let store = open(directory.path(), &server.host());
    assert_eq!(store.pull(&name(&server.host()), None).await.unwrap().to_string(), good.config);
    store.remove(&good.config, &HashSet::new()).await.unwrap();
    let left = || Command::new("find").arg(directory.path()).arg("-ls").output().map(|done| done.stdout);
    let inodes = store.fs_info().await.unwrap().inodes_used;
    assert_eq!(inodes, 2, "the lock file and the list: {}", String::from_utf8_lossy(&left().unwrap()));
}
