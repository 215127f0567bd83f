//! Tests artifacts as trees of files: from a registry, from a layout, and from servers that lie.

use crate::common::registry::{Registry, missing};
use crate::common::server::{Asked, Reply, Server, honest};
use crate::common::{
    EMPTY_CONFIG, Image, Packing, Tar, artifact, can_mount, digest, image, look, mount, noise, store_config, title,
    write_layout,
};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_image::{CopyOutcome, ImageStore, ImageStoreConfig, ImageUser, Reference, RegistryConfig};
use nacelle_model::digest::ImageId;
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

const TYPE: &str = "application/vnd.example.model.v1";

fn store(directory: &Path, host: &str) -> ImageStore {
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    let config = ImageStoreConfig { registries: [(host.to_owned(), special)].into(), ..store_config() };
    ImageStore::open(directory, config).unwrap()
}

fn sample() -> Image {
    let weights = noise(300_000);
    artifact(
        TYPE,
        EMPTY_CONFIG,
        &[
            (title("model.bin"), &weights),
            (title("docs/en/README.md"), b"read me"),
            (title("docs/empty"), b""),
            (serde_json::json!({"org.cncf.model.filepath": "docs/license"}), b"free"),
            (title("packed.tar.gz"), &crate::common::compress_file(b"not a tar", Packing::Gzip)),
            (serde_json::Value::Null, b"unnamed"),
        ],
    )
}

async fn content(store: &ImageStore, id: &ImageId, path: &str) -> Option<Vec<u8>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    match store.copy_file_from_image(id, path, 1 << 20, file.reopen().unwrap()).await.unwrap() {
        CopyOutcome::All(_) => Some(std::fs::read(file.path()).unwrap()),
        _ => None,
    }
}

fn files(directory: &Path) -> usize {
    let parts = ["configs", "layers", "trees", "work", "partial"];
    parts.iter().map(|part| std::fs::read_dir(directory.join(part)).unwrap().count()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_is_pulled_listed_read_and_removed_like_an_image() {
    if let Some(why) = missing() {
        eprintln!("skipped: {why}");
        return;
    }
    let registry = Registry::start(false, false);
    let (sample, host) = (sample(), registry.host());
    registry.push(&sample, "m/model:1", &[]);
    registry.push(&image(&[(Tar::new().file("f", 0o644, b"x").done(), Packing::Gzip)]), "image:1", &[]);
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), &host);
    let name = format!("{host}/m/model:1");
    let id = store.pull(&Reference::parse(&name).unwrap(), None).await.unwrap();
    assert_eq!(id.to_string(), sample.manifest);
    assert_eq!(store.pull(&Reference::parse(&name).unwrap(), None).await.unwrap(), id);
    let by_digest = format!("{host}/m/model@{}", sample.manifest);
    assert_eq!(store.pull(&Reference::parse(&by_digest).unwrap(), None).await.unwrap(), id);
    for wanted in [&name, &by_digest, &id.to_string()] {
        let record = store.status(wanted).unwrap().unwrap();
        assert_eq!((record.id, record.artifact_type.as_deref()), (id, Some(TYPE)));
        assert_eq!((&record.repo_tags, &record.repo_digests), (&vec![name.clone()], &vec![by_digest.clone()]));
        assert!((300_000..500_000).contains(&record.size), "{}", record.size);
        assert_eq!(record.user, ImageUser::Uid(0));
    }
    assert_eq!(store.rootfs(&id).await.unwrap().config, Default::default());
    let unnamed = format!("sha256-{}", digest(b"unnamed").strip_prefix("sha256:").unwrap());
    for (path, expected) in [
        ("model.bin", noise(300_000)),
        ("docs/en/README.md", b"read me".to_vec()),
        ("docs/empty", vec![]),
        ("docs/license", b"free".to_vec()),
        // The content stays as it is, compressed or not.
        ("packed.tar.gz", crate::common::compress_file(b"not a tar", Packing::Gzip)),
        (&unnamed, b"unnamed".to_vec()),
    ] {
        assert!(content(&store, &id, path).await.as_ref() == Some(&expected), "{path}");
    }
    assert_eq!(content(&store, &id, "docs/en").await, None);
    let other = store.pull(&Reference::parse(&format!("{host}/image:1")).unwrap(), None).await.unwrap();
    let other = store.status(&other.to_string()).unwrap().unwrap();
    assert_eq!((other.artifact_type, store.list().len()), (None, 2));
    store.remove(&other.id.to_string(), &HashSet::new()).await.unwrap();

    store.remove(&name, &HashSet::from([id])).await.unwrap();
    assert!(store.list().is_empty());
    assert_eq!(content(&store, &id, "docs/license").await.unwrap(), b"free");
    store.collect(&HashSet::new()).await.unwrap();
    assert_eq!(files(directory.path()), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layout_gives_the_same_bytes_as_a_registry() {
    let sample = sample();
    let served = sample.clone();
    let server = Server::start(move |asked| honest(&served, asked));
    let directory = tempfile::tempdir().unwrap();
    let (pulled, loaded) = (directory.path().join("pulled"), directory.path().join("loaded"));
    let (from_server, from_layout) = (store(&pulled, &server.host()), store(&loaded, "none"));
    let id = from_server.pull(&Reference::parse(&format!("{}/x:t", server.host())).unwrap(), None).await.unwrap();
    write_layout(&sample, &directory.path().join("layout"), "registry.test/model:2");
    let images = from_layout.load(&directory.path().join("layout"), None).await.unwrap();
    assert_eq!((images[0].id, images[0].names.as_slice()), (id, &["registry.test/model:2".to_owned()][..]));
    let mut trees = Vec::new();
    for store in [&from_server, &from_layout] {
        let disk = store.rootfs(&id).await.unwrap().disk;
        let pieces: Vec<_> = disk.extents.iter().map(|extent| std::fs::read(&extent.path).unwrap()).collect();
        trees.push(pieces.concat());
        if let Err(why) = can_mount() {
            eprintln!("not mounted: {why}");
            continue;
        }
        let mounted = mount(&disk);
        let seen = look(&mounted.path);
        assert_eq!(seen.len(), 9, "{:?}", seen.keys().map(|path| String::from_utf8_lossy(path)).collect::<Vec<_>>());
        for (path, file) in seen {
            let mode = if file.mode & 0o170_000 == 0o040_000 { 0o040_755 } else { 0o100_444 };
            assert_eq!(
                (file.mode, file.owner, file.time),
                (mode, (0, 0), (0, 0)),
                "{}",
                String::from_utf8_lossy(&path)
            );
        }
    }
    assert!(trees[0] == trees[1]);
    // So a guest that has mounted one finds the same in the other, also if the digests are not recorded.
    let layout = from_server.layout(&id).await.unwrap();
    assert_eq!(from_layout.layout(&id).await.unwrap(), layout);
    let extents = from_layout.rootfs(&id).await.unwrap().disk.extents;
    let sums = extents.iter().map(|extent| extent.path.with_extension("sum")).filter(|path| path.exists());
    let removed = sums.map(|path| std::fs::remove_file(path).unwrap()).count();
    assert!(removed > 0);
    assert_eq!(from_layout.layout(&id).await.unwrap(), layout);
    std::fs::write(&extents[0].path, vec![7; usize::try_from(extents[0].length).unwrap()]).unwrap();
    assert_ne!(from_layout.layout(&id).await.unwrap(), layout);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_without_files_is_an_empty_directory() {
    let empty = artifact(TYPE, EMPTY_CONFIG, &[]);
    let served = empty.clone();
    let server = Server::start(move |asked| honest(&served, asked));
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), &server.host());
    let id = store.pull(&Reference::parse(&format!("{}/x:t", server.host())).unwrap(), None).await.unwrap();
    assert_eq!(store.list_files(&id, "").await.unwrap(), Some(vec![]));
    assert_eq!(store.rootfs(&id).await.unwrap().disk.extents.len(), 1);
}

/// Pulls from a server and expects an error, and a store with nothing in it. Returns the kind and the text.
async fn refused(
    max_layer_bytes: u64,
    answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
) -> (FailureKind, String, Vec<Asked>) {
    let server = Server::start(answer);
    let directory = tempfile::tempdir().unwrap();
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    let config = ImageStoreConfig { registries: [(server.host(), special)].into(), max_layer_bytes, ..store_config() };
    let store = ImageStore::open(directory.path(), config).unwrap();
    let pulled = store.pull(&Reference::parse(&format!("{}/x:t", server.host())).unwrap(), None).await;
    let error = pulled.unwrap_err();
    assert!(store.list().is_empty());
    let text = Chain(&error).to_string();
    assert_eq!(files(directory.path()), 0, "{text}");
    (error.kind(), text, server.asked())
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_artifacts_are_refused_before_a_file_is_requested() {
    let with = |titles: &[&str]| {
        let files: Vec<_> = titles.iter().map(|text| (title(text), &b"content"[..])).collect();
        artifact(TYPE, EMPTY_CONFIG, &files)
    };
    let (long, file) = ("n".repeat(256), (title("a"), &b"content"[..]));
    let (max, huge) = (64 << 30, (title("a"), &[7; 5000][..]));
    for (image, max, kind, words) in [
        (with(&["../etc/passwd"]), max, FailureKind::Invalid, "\"../etc/passwd\", cannot be the path of a file"),
        (with(&["/etc/passwd"]), max, FailureKind::Invalid, "it is absolute"),
        (with(&[""]), max, FailureKind::Invalid, "it is empty"),
        (with(&["a\0b"]), max, FailureKind::Invalid, "control character"),
        (with(&[&long]), max, FailureKind::Invalid, "longer than 255"),
        (with(&["a", "a"]), max, FailureKind::Invalid, "several layers have it"),
        (with(&["a", "a/b"]), max, FailureKind::Invalid, "directory of another file"),
        (with(&[".wh.a"]), max, FailureKind::Invalid, "begins with .wh."),
        (artifact(TYPE, EMPTY_CONFIG, &vec![file.clone(); 1001]), max, FailureKind::Invalid, "1001 layers"),
        (artifact(TYPE, EMPTY_CONFIG, &[huge]), 4999, FailureKind::Exhausted, "more than 4999 bytes"),
        (
            artifact("application/vnd.nacelle.machine.v1", "application/vnd.nacelle.machine.config.v1+json", &[]),
            max,
            FailureKind::Invalid,
            "import it with nacelle vm import",
        ),
        (
            artifact("", "application/vnd.nacelle.machine.config.v1+json", &[file]),
            max,
            FailureKind::Invalid,
            "import it with nacelle vm import",
        ),
    ] {
        let (found, text, asked) = refused(max, move |asked| honest(&image, asked)).await;
        assert!(found == kind && text.contains(words), "{words}: {found:?} {text}");
        assert_eq!(asked.len(), 1, "{asked:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_another_size_or_content_are_not_kept() {
    let good = artifact(TYPE, EMPTY_CONFIG, &[(title("a"), &noise(9000))]);
    for (change, kind) in [
        // The descriptor announces more than the blob has, or less.
        ("\"size\":9001", FailureKind::Unavailable),
        ("\"size\":8999", FailureKind::Unavailable),
        ("\"size\":9000", FailureKind::Unavailable),
    ] {
        let mut bad = good.clone();
        let manifest = String::from_utf8(bad.blobs.remove(&good.manifest).unwrap()).unwrap();
        let manifest = manifest.replace("\"size\":9000", change).into_bytes();
        bad.manifest = digest(&manifest);
        bad.blobs.insert(bad.manifest.clone(), manifest);
        if change.contains("9000") {
            bad.blobs.get_mut(&good.layers[0]).unwrap()[8999] ^= 1;
        }
        let mut image = bad;
        if change.contains("8999") {
            image.blobs.get_mut(&good.layers[0]).unwrap().truncate(8999);
        }
        if change.contains("9001") {
            image.blobs.get_mut(&good.layers[0]).unwrap().push(0);
        }
        let (found, text, _) = refused(64 << 30, move |asked| honest(&image, asked)).await;
        assert!(found == kind && text.contains("is damaged"), "{change}: {found:?} {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_of_a_file_that_breaks_is_continued() {
    let sample = artifact(TYPE, EMPTY_CONFIG, &[(title("model"), &noise(600_000))]);
    let (served, tries) = (sample.clone(), AtomicUsize::new(0));
    let server = Server::start(move |asked| {
        let first = asked.path.contains(&served.layers[0]) && tries.fetch_add(1, Ordering::SeqCst) == 0;
        Reply { cut: first.then_some(200_000), ..honest(&served, asked) }
    });
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), &server.host());
    let id = store.pull(&Reference::parse(&format!("{}/x:t", server.host())).unwrap(), None).await.unwrap();
    assert!(content(&store, &id, "model").await.unwrap() == noise(600_000));
    let asked = server.asked();
    let froms: Vec<_> = asked.iter().filter(|asked| asked.path.contains(&sample.layers[0])).map(Asked::from).collect();
    assert!(froms.len() == 2 && froms[1] > 0, "{froms:?}");
}
