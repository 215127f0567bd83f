//! Tests that damage of the store's files is found, named and repaired, and that sound files are left alone.

use crate::common::server::{Reply, Server, honest};
use crate::common::{Image, Packing, Tar, image, noise, reopen, store_config, write_layout};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_image::{DamagedFile, FileDamage, ImageError, ImageStore, ImageStoreConfig, Reference, RegistryConfig};
use nacelle_model::digest::{Digest, ImageId};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A store and a registry with two images, of which the first is pulled. They share a layer.
struct Scene {
    directory: tempfile::TempDir,
    server: Server,
    images: [Image; 2],
}

impl Scene {
    fn new() -> Scene {
        let shared = (Tar::new().file("shared", 0o644, &noise(10_000)).done(), Packing::Gzip);
        let own = |text: &[u8]| (Tar::new().file("own", 0o644, text).done(), Packing::Zstd);
        let images = [image(&[shared.clone(), own(b"one")]), image(&[shared, own(b"two")])];
        let served = images.clone();
        let server = Server::start(move |asked| honest(&served[usize::from(asked.path.contains("/two/"))], asked));
        Scene { directory: tempfile::tempdir().unwrap(), server, images }
    }

    fn config(&self) -> ImageStoreConfig {
        let special = RegistryConfig { http: true, ..RegistryConfig::default() };
        ImageStoreConfig { registries: [(self.server.host(), special)].into(), ..store_config() }
    }

    fn root(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    fn open(&self) -> ImageStore {
        reopen(&self.root(), &self.config())
    }

    fn name(&self, name: &str) -> String {
        format!("{}/{name}:t", self.server.host())
    }

    async fn pull(&self, store: &ImageStore, name: &str) -> Result<ImageId, ImageError> {
        store.pull(&Reference::parse(&self.name(name)).unwrap(), None).await
    }

    /// Returns the name, the inode, the time and the content of all content files.
    fn files(&self) -> BTreeMap<PathBuf, (u64, i64, i64, Vec<u8>)> {
        let mut files = BTreeMap::new();
        for part in ["configs", "layers", "trees"] {
            for entry in fs::read_dir(self.root().join(part)).unwrap() {
                let path = entry.unwrap().path();
                let metadata = fs::metadata(&path).unwrap();
                let content = fs::read(&path).unwrap();
                files.insert(path, (metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), content));
            }
        }
        files
    }

    /// Returns the only file of this extension whose content is the longest.
    fn file(&self, extension: &str) -> PathBuf {
        let files = self.files();
        let of = files.iter().filter(|(path, _)| path.extension().unwrap_or_default().to_string_lossy() == extension);
        of.max_by_key(|(_, (.., content))| content.len()).unwrap().0.clone()
    }

    /// Returns the numbers of layer downloads so far.
    fn downloads(&self) -> usize {
        let config = |path: &str| self.images.iter().any(|image| path.contains(&image.config));
        let is_layer = |path: &str| path.contains("/blobs/") && !config(path);
        self.server.asked().iter().filter(|asked| asked.method == "GET" && is_layer(&asked.path)).count()
    }
}

fn flip_bit(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let at = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

fn truncate(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

fn damage_of(error: ImageError) -> (PathBuf, FileDamage) {
    let text = Chain(&error).to_string();
    assert_eq!(error.kind(), FailureKind::Conflict, "{text}");
    let ImageError::Damaged { file, .. } = error else { panic!("{text}") };
    let DamagedFile { path, damage } = *file;
    assert!(text.contains(&format!("{} {damage}; pull the image again", path.display())), "{text}");
    (path, damage)
}

/// The kinds of files, as extensions; configurations have none.
const KINDS: [&str; 4] = ["", "blob", "idx", "erofs"];

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_or_short_file_is_named_and_the_next_pull_repairs_it() {
    for (kind, deleted, restart) in KINDS
        .into_iter()
        .flat_map(|kind| [(kind, true, true), (kind, true, false), (kind, false, true), (kind, false, false)])
    {
        let what = format!("kind {kind:?}, deleted: {deleted}, restart: {restart}");
        let scene = Scene::new();
        let mut store = scene.open();
        let id = scene.pull(&store, "one").await.unwrap();
        let (before, downloads, path) = (scene.files(), scene.downloads(), scene.file(kind));
        if deleted {
            fs::remove_file(&path).unwrap()
        } else {
            truncate(&path)
        }
        let length = before[&path].3.len() as u64;
        let expected = match deleted {
            true => FileDamage::Missing,
            false => FileDamage::Length { found: length / 2, expected: length },
        };
        if restart {
            drop(store);
            store = scene.open();
            assert_eq!(store.status(&scene.name("one")).unwrap(), None, "{what}");
            assert_eq!(scene.files().len(), before.len() - usize::from(deleted), "{what}: the rest stays");
        }
        // The image is absent for kubelet, listed for its garbage collection, and no container gets it.
        for error in [store.find_sound(&scene.name("one")).await.unwrap_err(), store.rootfs(&id).await.unwrap_err()] {
            assert_eq!(damage_of(error), (path.clone(), expected.clone()), "{what}");
        }
        assert_eq!(store.status(&scene.name("one")).unwrap(), None, "{what}");
        assert_eq!(store.list().len(), 1);
        assert_eq!(scene.pull(&store, "one").await.unwrap(), id, "{what}");
        assert!(store.find_sound(&scene.name("one")).await.unwrap().is_some(), "{what}");
        store.rootfs(&id).await.unwrap();
        // Only what belongs to the damaged content is written again.
        let after = scene.files();
        let stem = |path: &Path| path.file_stem().unwrap().to_owned();
        assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>(), "{what}");
        for (file, was) in &before {
            assert_eq!(after[file].3, was.3, "{what}: {}", file.display());
            let same_content = stem(file) == stem(&path);
            assert!(same_content || after[file] == *was, "{what}: {} was written again", file.display());
        }
        let is_layer = matches!(kind, "blob" | "idx");
        assert_eq!(scene.downloads() - downloads, usize::from(is_layer), "{what}");
        let report = store.verify(&[], false).await.unwrap();
        assert_eq!((report.images, report.files, report.damaged), (1, 6, vec![]), "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_is_found_remembered_and_repaired() {
    for kind in KINDS.into_iter().chain(["sum"]) {
        let scene = Scene::new();
        let store = scene.open();
        let id = scene.pull(&store, "one").await.unwrap();
        let (before, path) = (scene.files(), scene.file(kind));
        flip_bit(&path);
        let report = store.verify(&[scene.name("one")], false).await.unwrap();
        let [damaged] = report.damaged.as_slice() else { panic!("{kind}: {report:?}") };
        assert_eq!((&damaged.image, &damaged.names), (&id.to_string(), &vec![scene.name("one")]));
        assert!(!damaged.repaired && damaged.repair_error.is_none());
        if kind != "sum" {
            assert_eq!(damaged.path, path);
            assert!(matches!(damaged.damage, FileDamage::Content { .. }), "{kind}: {damaged:?}");
        }
        drop(store);
        let store = scene.open();
        assert_eq!(store.status(&id.to_string()).unwrap(), None, "{kind}: a restart remembers it");
        damage_of(store.rootfs(&id).await.unwrap_err());
        assert_eq!(scene.pull(&store, "one").await.unwrap(), id);
        assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![], "{kind}");
        store.rootfs(&id).await.unwrap();
        for (file, (.., content)) in &before {
            assert!(fs::read(file).unwrap() == *content, "{kind}: {}", file.display());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_in_a_configuration_is_found_when_it_is_read() {
    let scene = Scene::new();
    let store = scene.open();
    let id = scene.pull(&store, "one").await.unwrap();
    let path = scene.file("");
    flip_bit(&path);
    let (named, damage) = damage_of(store.rootfs(&id).await.unwrap_err());
    assert!(named == path && matches!(damage, FileDamage::Content { expected, .. } if expected == id), "{damage:?}");
    assert_eq!(store.status(&id.to_string()).unwrap(), None);
    scene.pull(&store, "one").await.unwrap();
    store.rootfs(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_store_is_left_alone() {
    let scene = Scene::new();
    let store = scene.open();
    for name in ["one", "two"] {
        scene.pull(&store, name).await.unwrap();
    }
    let (before, downloads) = (scene.files(), scene.downloads());
    let list = fs::metadata(scene.root().join("index.json")).unwrap().ino();
    drop(store);
    let store = scene.open();
    let report = store.verify(&[], true).await.unwrap();
    // Two configurations, two trees, three layers of two files.
    assert_eq!((report.images, report.files, report.damaged), (2, 10, vec![]));
    assert_eq!(
        report.bytes,
        before
            .iter()
            .filter(|(path, _)| path.extension().is_none_or(|end| end != "sum" && end != "origins"))
            .map(|(_, file)| file.3.len() as u64)
            .sum::<u64>()
    );
    for name in ["one", "two"] {
        scene.pull(&store, name).await.unwrap();
    }
    assert!(scene.files() == before);
    assert_eq!((scene.downloads(), fs::metadata(scene.root().join("index.json")).unwrap().ino()), (downloads, list));
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_repairs_what_the_registry_still_has() {
    let scene = Scene::new();
    let store = scene.open();
    for name in ["one", "two"] {
        scene.pull(&store, name).await.unwrap();
    }
    let shared = scene.file("blob");
    let mut in_use = File::open(&shared).unwrap();
    let damaged = {
        flip_bit(&shared);
        fs::read(&shared).unwrap()
    };
    let report = store.verify(&[], true).await.unwrap();
    let found: Vec<_> =
        report.damaged.iter().map(|damage| (&damage.path, damage.repaired, &damage.repair_error)).collect();
    assert_eq!(found, [(&shared, true, &None), (&shared, true, &None)], "one for each image");
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
    for name in ["one", "two"] {
        assert!(store.find_sound(&scene.name(name)).await.unwrap().is_some());
    }
    // A container that uses the file keeps it.
    let mut kept = Vec::new();
    in_use.read_to_end(&mut kept).unwrap();
    assert!(kept == damaged && fs::read(&shared).unwrap() != damaged);
    let error = store.verify(&["none:1".into()], false).await.unwrap_err();
    assert_eq!(error.kind(), FailureKind::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_cannot_be_repaired_stays_damaged_with_the_reason() {
    let Scene { directory, server, images } = Scene::new();
    let scene = Scene { directory, server, images };
    let store = scene.open();
    let id = scene.pull(&store, "one").await.unwrap();
    flip_bit(&scene.file("idx"));
    let host = scene.server.host();
    let Scene { directory, server, .. } = scene;
    drop(server);
    let report = store.verify(&[], true).await.unwrap();
    let [damaged] = report.damaged.as_slice() else { panic!("{report:?}") };
    assert!(!damaged.repaired && damaged.repair_error.as_ref().unwrap().contains(&host), "{damaged:?}");
    assert_eq!(store.status(&id.to_string()).unwrap(), None);
    drop((store, directory));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_repairs_its_images_and_metadata_need_no_registry() {
    let scene = Scene::new();
    let layout = scene.directory.path().join("layout");
    write_layout(&scene.images[0], &layout, "test");
    let store = scene.open();
    let name = Reference::parse("r.test/x:1").unwrap();
    let id = store.load(&layout, Some(&name)).await.unwrap()[0].id;
    flip_bit(&scene.file("erofs"));
    let report = store.verify(&[], true).await.unwrap();
    assert!(report.damaged.len() == 1 && report.damaged[0].repaired, "{report:?}");
    flip_bit(&scene.file("blob"));
    fs::remove_file(scene.file("idx")).unwrap();
    let report = store.verify(&["r.test/x:1".into()], true).await.unwrap();
    assert_eq!(report.damaged.len(), 2, "{report:?}");
    let why = report.damaged[0].repair_error.clone().unwrap();
    assert!(why.contains("load it again"), "{why}");
    assert_eq!(store.load(&layout, Some(&name)).await.unwrap()[0].id, id);
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
    store.rootfs(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_was_removed_while_in_use_is_not_pulled_again() {
    let scene = Scene::new();
    let store = scene.open();
    let one = scene.pull(&store, "one").await.unwrap();
    let two = scene.pull(&store, "two").await.unwrap();
    store.remove(&one.to_string(), &[one].into()).await.unwrap();
    // The layer of both is repaired for the other image.
    flip_bit(&scene.file("blob"));
    let report = store.verify(&[], true).await.unwrap();
    assert_eq!(report.damaged.iter().filter(|damage| damage.repaired).count(), 2, "{report:?}");
    let path = scene.root().join("configs").join(one.hex());
    flip_bit(&path);
    let asked = scene.server.asked().len();
    let report = store.verify(&[], true).await.unwrap();
    let [damaged] = report.damaged.as_slice() else { panic!("{report:?}") };
    assert_eq!((&damaged.path, damaged.repaired), (&path, false));
    let why = damaged.repair_error.clone().unwrap();
    assert!(why.contains("the image was removed"), "{why}");
    assert_eq!(scene.server.asked().len(), asked);
    assert!(store.find_sound(&two.to_string()).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_removed_during_a_repair_is_not_reported_as_repaired() {
    let images = [b"one", b"two"].map(|text| image(&[(Tar::new().file("f", 0o644, text).done(), Packing::Gzip)]));
    let (served, waits) = (images.clone(), Arc::new(AtomicBool::new(false)));
    let wait = Arc::clone(&waits);
    let server = Server::start(move |asked| {
        while wait.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        honest(&served[usize::from(asked.path.contains("/two/"))], asked)
    });
    let scene = Scene { directory: tempfile::tempdir().unwrap(), server, images };
    let store = scene.open();
    let mut ids = [scene.pull(&store, "one").await.unwrap(), scene.pull(&store, "two").await.unwrap()];
    ids.sort_by_key(ImageId::to_string); // The order of the repairs.
    for id in ids {
        flip_bit(&scene.root().join("configs").join(id.hex()));
    }
    waits.store(true, Ordering::SeqCst);
    let asked = scene.server.asked().len();
    let verifier = store.clone();
    let running = tokio::spawn(async move { verifier.verify(&[], true).await });
    let deadline = Instant::now() + Duration::from_secs(60);
    while scene.server.asked().len() == asked {
        assert!(Instant::now() < deadline, "the first image is not pulled");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    store.remove(&ids[1].to_string(), &Default::default()).await.unwrap();
    waits.store(false, Ordering::SeqCst);
    let report = running.await.unwrap().unwrap();
    let found: Vec<_> = report.damaged.iter().map(|damage| (damage.image.clone(), damage.repaired)).collect();
    assert_eq!(found, [(ids[0].to_string(), true)], "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_read_does_not_keep_the_other_images_from_verification() {
    let scene = Scene::new();
    let store = scene.open();
    let mut ids = [scene.pull(&store, "one").await.unwrap(), scene.pull(&store, "two").await.unwrap()];
    ids.sort();
    let paths = ids.map(|id| scene.root().join("configs").join(id.hex()));
    // ELOOP proves no damage; it also hits root.
    let sound = fs::read(&paths[0]).unwrap();
    fs::remove_file(&paths[0]).unwrap();
    std::os::unix::fs::symlink(&paths[0], &paths[0]).unwrap();
    flip_bit(&paths[1]);
    for repair in [false, true] {
        let report = store.verify(&[], repair).await.unwrap();
        let [unreadable, rest @ ..] = report.damaged.as_slice() else { panic!("{report:?}") };
        assert_eq!((&unreadable.image, &unreadable.path), (&ids[0].to_string(), &paths[0]));
        assert!(unreadable.damage.to_string().starts_with("cannot be read: "), "{unreadable:?}");
        assert!(!unreadable.repaired && unreadable.repair_error.is_some() == repair, "{unreadable:?}");
        assert!(store.status(&ids[0].to_string()).unwrap().is_some(), "the image is not known to be damaged");
        let [other] = rest else { panic!("{report:?}") };
        assert_eq!((&other.path, other.repaired), (&paths[1], repair));
        assert!(fs::read_to_string(scene.root().join("health.json")).unwrap().contains("\"verified\":"));
    }
    fs::remove_file(&paths[0]).unwrap();
    fs::write(&paths[0], sound).unwrap();
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
}

/// Takes everything out of a store that Nacelle 0.1 did not write.
fn make_old(scene: &Scene) {
    for path in scene.files().into_keys().filter(|path| path.extension().is_some_and(|end| end == "sum")) {
        fs::remove_file(path).unwrap();
    }
    let list = scene.root().join("index.json");
    let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
    for entry in value["images"].as_object_mut().unwrap().values_mut() {
        entry.as_object_mut().unwrap().remove("document_length").unwrap();
    }
    fs::write(&list, value.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_an_older_version_gets_its_digests_from_a_verification() {
    let scene = Scene::new();
    let store = scene.open();
    let id = scene.pull(&store, "one").await.unwrap();
    drop(store);
    make_old(&scene);
    let old = scene.files();
    let store = scene.open();
    store.rootfs(&id).await.unwrap();
    assert!(scene.files() == old, "nothing is written before a verification");
    // The list has the lengths of what a device consists of; an index has a checksum of its own.
    for kind in ["blob", "erofs", "idx"] {
        let path = scene.file(kind);
        let content = fs::read(&path).unwrap();
        if kind == "idx" {
            flip_bit(&path);
            let report = store.verify(&[], false).await.unwrap();
            assert_eq!(report.damaged[0].damage, FileDamage::Checksum, "{report:?}");
            assert_eq!(damage_of(store.rootfs(&id).await.unwrap_err()).0, path);
        } else {
            truncate(&path);
            assert_eq!(damage_of(store.rootfs(&id).await.unwrap_err()).0, path);
        }
        fs::write(&path, content).unwrap();
    }
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
    store.rootfs(&id).await.unwrap();
    assert!(scene.files().len() > old.len());
    flip_bit(&scene.file("erofs"));
    let report = store.verify(&[], false).await.unwrap();
    assert!(matches!(report.damaged[0].damage, FileDamage::Content { .. }), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_of_another_layout_renews_the_metadata_of_all_its_images() {
    let scene = Scene::new();
    let store = scene.open();
    for name in ["one", "two"] {
        scene.pull(&store, name).await.unwrap();
    }
    let shared = scene.file("blob");
    // As if another version of Nacelle had written the blob.
    let sum = shared.with_extension("sum");
    let text = fs::read_to_string(&sum).unwrap();
    let digest = Digest::of(&fs::read(&shared).unwrap()).to_string();
    fs::write(&sum, text.replace(&digest, &Digest([0; 32]).to_string())).unwrap();
    fs::remove_file(&shared).unwrap();
    let before = scene.files();
    scene.pull(&store, "two").await.unwrap();
    let after = scene.files();
    for (path, was) in before.iter().filter(|(path, _)| path.extension().is_some_and(|end| end == "erofs")) {
        let is_new = (after[path].0, after[path].1, after[path].2) != (was.0, was.1, was.2);
        assert!(is_new && after[path].3 == was.3, "{}", path.display());
    }
    for name in ["one", "two"] {
        assert!(store.find_sound(&scene.name(name)).await.unwrap().is_some());
    }
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_a_worker_rejects_is_repaired_by_the_next_pull() {
    let scene = Scene::new();
    let store = scene.open();
    scene.pull(&store, "one").await.unwrap();
    flip_bit(&scene.file("blob").with_extension("idx"));
    let error = scene.pull(&store, "two").await.unwrap_err();
    assert!(Chain(&error).to_string().contains(".idx is damaged; pull the image again"), "{}", Chain(&error));
    assert_eq!(store.status(&scene.name("one")).unwrap(), None);
    scene.pull(&store, "two").await.unwrap();
    for name in ["one", "two"] {
        assert!(store.find_sound(&scene.name(name)).await.unwrap().is_some(), "{name}");
    }
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_layer_of_an_unfinished_pull_is_repaired_by_the_next_pull() {
    let layers = [b"one", b"two"].map(|text| (Tar::new().file("f", 0o644, text).done(), Packing::Gzip));
    let good = image(&layers);
    let (served, complete) = (good.clone(), Arc::new(AtomicBool::new(false)));
    let all = Arc::clone(&complete);
    let server = Server::start(move |asked| match asked.path.contains(&served.layers[1]) {
        true if !all.load(Ordering::SeqCst) => Reply::status(404),
        _ => honest(&served, asked),
    });
    let directory = tempfile::tempdir().unwrap();
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    let store =
        reopen(directory.path(), &ImageStoreConfig { registries: [(server.host(), special)].into(), ..store_config() });
    let name = Reference::parse(&format!("{}/x:t", server.host())).unwrap();
    let index = directory.path().join("layers").join(Digest::of(&layers[0].0).hex()).with_extension("idx");
    while !index.exists() {
        store.pull(&name, None).await.unwrap_err();
    }
    flip_bit(&index);
    complete.store(true, Ordering::SeqCst);
    let error = store.pull(&name, None).await.unwrap_err();
    assert!(Chain(&error).to_string().contains(".idx is damaged"), "{}", Chain(&error));
    assert_eq!(store.pull(&name, None).await.unwrap().to_string(), good.config);
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_entry_of_the_list_keeps_its_files_and_the_rest_is_collected() {
    for (field, repair) in [("tree", false), ("tree", true), ("layers", false), ("layers", true)] {
        let what = format!("field {field}, repair: {repair}");
        let scene = Scene::new();
        let store = scene.open();
        let one = scene.pull(&store, "one").await.unwrap();
        let of_one = scene.files();
        let two = scene.pull(&store, "two").await.unwrap();
        drop(store);
        let list = scene.root().join("index.json");
        let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
        let damaged = &mut value["images"][one.to_string()][field];
        // The digests of the layers are still there, but not as a list.
        *damaged = if field == "tree" { "sha256:x".into() } else { damaged.to_string().into() };
        fs::write(&list, value.to_string()).unwrap();
        let store = scene.open();
        assert_eq!(store.list().iter().map(|image| image.id).collect::<Vec<_>>(), [two], "{what}");
        assert_eq!(store.status(&scene.name("one")).unwrap(), None);
        store.remove(&two.to_string(), &Default::default()).await.unwrap();
        assert!(scene.files() == of_one, "{what}: the files of the removed image go, those of the entry stay");
        let report = store.verify(&[], repair).await.unwrap();
        let [damaged] = report.damaged.as_slice() else { panic!("{what}: {report:?}") };
        assert_eq!((&damaged.image, &damaged.path, damaged.repaired), (&one.to_string(), &list, repair), "{what}");
        assert_eq!(damaged.names, [scene.name("one")]);
        if !repair {
            assert_eq!(scene.pull(&store, "one").await.unwrap(), one);
        }
        assert!(store.find_sound(&one.to_string()).await.unwrap().is_some(), "{what}");
        assert!(store.status(&scene.name("one")).unwrap().is_some(), "{what}: it has its tag");
        assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![], "{what}");
        store.remove(&one.to_string(), &Default::default()).await.unwrap();
        assert_eq!(scene.files().len(), 0, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_keeps_an_entry_whose_image_it_cannot_pull() {
    let scene = Scene::new();
    let store = scene.open();
    let one = scene.pull(&store, "one").await.unwrap();
    drop(store);
    let list = scene.root().join("index.json");
    let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
    value["images"][one.to_string()]["digests"] = 7.into();
    fs::write(&list, value.to_string()).unwrap();
    let store = scene.open();
    for _ in 0..2 {
        let report = store.verify(&[], true).await.unwrap();
        let [damaged] = report.damaged.as_slice() else { panic!("{report:?}") };
        assert!(!damaged.repaired && damaged.repair_error.is_some(), "{report:?}");
        assert_eq!(damaged.names, [scene.name("one")]);
    }
    assert_eq!(scene.pull(&store, "one").await.unwrap(), one);
    assert_eq!(store.verify(&[], false).await.unwrap().damaged, vec![]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_background_finds_damage_and_ends_with_its_future() {
    let scene = Scene::new();
    // The last verification was before the clock was set back by many years: another one is due.
    fs::create_dir_all(scene.root()).unwrap();
    fs::write(scene.root().join("health.json"), r#"{"version":1,"verified":9999999999,"damaged":[]}"#).unwrap();
    let store = scene.open();
    let id = scene.pull(&store, "one").await.unwrap();
    let verifier = store.clone();
    let start =
        |verifier: ImageStore| tokio::spawn(async move { verifier.verify_periodically(Duration::from_secs(2)).await });
    let running = start(verifier);
    let record = || fs::read_to_string(scene.root().join("health.json")).unwrap_or_default();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !record().contains("\"verified\":") || record().contains("9999999999") {
        assert!(Instant::now() < deadline, "the first verification has not ended");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(store.status(&id.to_string()).unwrap().is_some());
    flip_bit(&scene.file("blob"));
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.status(&id.to_string()).unwrap().is_some() {
        assert!(Instant::now() < deadline, "the damage was not found");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    running.abort();
    drop(store);
    // The store can be opened again as soon as no thread holds it.
    let store = scene.open();
    assert_eq!(store.status(&id.to_string()).unwrap(), None);
    // The time of the last verification is kept: the next one of a long interval is not at the start.
    assert!(record().contains("\"verified\":"), "{}", record());
}
