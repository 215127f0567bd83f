//! Tests pulls with a full disk.

use crate::common::server::{Reply, Server, honest};
use crate::common::{Image, Packing, Tar, image, store_config};
use nacelle_base::{Classify, FailureKind};
use nacelle_image::{ImageStore, ImageStoreConfig, Reference, RegistryConfig};
use std::path::Path;
use std::process::Command;

/// A small file system; unmounted when dropped.
struct Small(tempfile::TempDir);

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

fn small() -> Option<Small> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: mounting needs root");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs"]).arg(directory.path()).status();
    match mounted {
        Ok(status) if status.success() => Some(Small(directory)),
        other => {
            eprintln!("skipped: cannot mount a tmpfs: {other:?}");
            None
        }
    }
}

fn files(directory: &Path) -> Vec<String> {
    let parts = ["configs", "layers", "trees", "partial", "work"];
    let names = parts.iter().flat_map(|part| std::fs::read_dir(directory.join(part)).unwrap());
    names.map(|entry| entry.unwrap().path().display().to_string()).collect()
}

fn layer(content: &[u8]) -> Vec<u8> {
    Tar::new().file("f", 0o644, content).done()
}

async fn fills(image: Image, text: &str) {
    let Some(small) = small() else { return };
    let fitting = crate::common::image(&[(layer(b"fits"), Packing::Gzip)]);
    let (large, good) = (image.clone(), fitting.clone());
    let server = Server::start(move |asked| match asked.path.contains("/large/") {
        true => honest(&large, asked),
        false => honest(&good, asked),
    });
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    let config = ImageStoreConfig { registries: [(server.host(), special)].into(), ..store_config() };
    let store = ImageStore::open(small.0.path(), config).unwrap();
    let name = |name: &str| Reference::parse(&format!("{}/{name}:t", server.host())).unwrap();
    let error = store.pull(&name("large"), None).await.unwrap_err();
    let chain = nacelle_base::Chain(&error).to_string();
    assert_eq!(error.kind(), FailureKind::Exhausted, "{chain}");
    assert!(chain.contains(text), "{chain}");
    assert_eq!(files(small.0.path()), Vec::<String>::new());
    // A smaller image fits, and the store still has its earlier images.
    assert_eq!(store.pull(&name("good"), None).await.unwrap().to_string(), fitting.config);
    let before = store.list();
    assert_eq!(store.pull(&name("large"), None).await.unwrap_err().kind(), FailureKind::Exhausted);
    assert_eq!(store.list(), before);
    // Configuration, blob, index, origins and metadata, and the sums of the layer and of the metadata.
    assert_eq!(files(small.0.path()).len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_unpacks_to_more_than_the_disk() {
    let layers = [(layer(b"small"), Packing::Gzip), (layer(&vec![7; 20 << 20]), Packing::Gzip)];
    fills(image(&layers), "No space left on device").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_that_are_together_more_than_the_disk() {
    let layers = [3u8, 4, 5].map(|byte| (layer(&vec![byte; 3 << 20]), Packing::Zstd));
    fills(image(&layers), "No space left on device").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_whose_size_alone_is_more_than_the_disk() {
    fills(image(&[(layer(&vec![7; 20 << 20]), Packing::Plain)]), "the image needs 2097").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_with_more_than_the_configuration_allows() {
    let good = image(&[(layer(&vec![0; 4 << 20]), Packing::Gzip)]);
    let many = (0..40).fold(Tar::new(), |tar, number| tar.file(&number.to_string(), 0o644, b"")).done();
    let many = image(&[(many, Packing::Gzip)]);
    for (image, what) in [(good, "bytes"), (many, "entries")] {
        let server = Server::start(move |asked| match honest(&image, asked) {
            reply if reply.status == 200 => reply,
            _ => Reply::status(404),
        });
        let special = RegistryConfig { http: true, ..RegistryConfig::default() };
        let registries = [(server.host(), special)].into();
        let config = ImageStoreConfig { registries, max_layer_bytes: 1 << 20, max_layer_entries: 20, ..store_config() };
        let directory = tempfile::tempdir().unwrap();
        let store = ImageStore::open(directory.path(), config).unwrap();
        let reference = Reference::parse(&format!("{}/x:t", server.host())).unwrap();
        let error = store.pull(&reference, None).await.unwrap_err();
        let chain = nacelle_base::Chain(&error).to_string();
        assert!(chain.contains(&format!("more than {} {what}", if what == "bytes" { 1 << 20 } else { 20 })), "{chain}");
        assert_eq!((error.kind(), files(directory.path())), (FailureKind::Exhausted, vec![]));
    }
}
