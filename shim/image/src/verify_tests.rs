//! Tests that a verification and the writers of content exclude each other.

use super::*;
use crate::catalogue::StoredImage;
use crate::install::tree_name;
use crate::plan::{ImageNames, ImagePlan};
use crate::{FileDamage, ImageStoreConfig};
use std::path::Path;
use std::sync::mpsc;

/// A store with one image, which has no layer.
struct Scene {
    directory: tempfile::TempDir,
    shared: Arc<StoreState>,
    id: ImageId,
}

const DOCUMENT: &[u8] = b"{}";
/// A layer that the store does not have.
const LAYER: Digest = Digest([7; 32]);

impl Scene {
    fn new() -> Scene {
        Scene::on("/tmp".as_ref())
    }

    /// A scene in a file system.
    fn on(parent: &Path) -> Scene {
        let directory = tempfile::tempdir_in(parent).unwrap();
        let shared = ImageStore::open(directory.path(), ImageStoreConfig::default()).unwrap().shared;
        let (id, tree) = (Digest::of(DOCUMENT), tree_name(&[]));
        fs::write(shared.directory.path((ContentKind::Tree, tree)), [0; 4096]).unwrap();
        let stored = StoredImage {
            tags: Default::default(),
            digests: Default::default(),
            user: String::new(),
            artifact_type: None,
            size: 0,
            added: 0,
            layers: vec![],
            tree,
            tree_length: 4096,
            blobs: vec![],
            removed: false,
            document_length: Some(DOCUMENT.len() as u64),
        };
        shared.lock_catalogue().update(|images| drop(images.insert(id, stored))).unwrap();
        Scene { directory, shared, id }
    }

    /// Asserts that this work does not end while the pin of this content is locked, and ends after that.
    fn assert_waits<R: Send>(&self, key: ContentKey, work: impl FnOnce(&StoreState) -> R + Send) -> R {
        let pin = self.shared.directory.pin(key);
        let held = pin.try_lock().unwrap();
        std::thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            scope.spawn(move || sender.send(work(&self.shared)).unwrap());
            let early = receiver.recv_timeout(Duration::from_millis(300));
            drop(held);
            assert!(early.is_err(), "the work ended while {key:?} was locked");
            receiver.recv_timeout(Duration::from_secs(60)).unwrap()
        })
    }
}

#[test]
fn metadata_are_built_and_removed_under_their_lock() {
    let scene = Scene::new();
    let tree = (ContentKind::Tree, tree_name(&[LAYER]));
    let built = scene.assert_waits(tree, |shared| shared.build_tree(&[LAYER], &Cancel::default()));
    assert!(built.is_err(), "the layer is missing");
    scene.shared.lock_catalogue().update(|images| images.get_mut(&scene.id).unwrap().layers.push(LAYER)).unwrap();
    let tree = (ContentKind::Tree, tree_name(&[]));
    let path = scene.shared.directory.path(tree);
    scene.assert_waits(tree, |shared| shared.remove_trees_of_layer(LAYER)).unwrap();
    assert!(!path.exists() && path.starts_with(scene.directory.path()));
}

#[test]
fn a_configuration_is_written_under_its_lock() {
    let scene = Scene::new();
    let config = (ContentKind::Config, scene.id);
    let plan = ImagePlan {
        id: scene.id,
        document: DOCUMENT.to_vec(),
        user: String::new(),
        artifact_type: None,
        layers: vec![],
        names: ImageNames::default(),
    };
    let committed = scene.assert_waits(config, |shared| shared.commit_image(plan, vec![], &Cancel::default()));
    assert_eq!(committed.unwrap(), scene.id);
    assert_eq!(fs::read(scene.shared.directory.path(config)).unwrap(), DOCUMENT);
}

#[test]
fn a_store_that_was_copied_to_a_file_system_without_verity_is_sound() {
    // tmpfs has no fs-verity in any kernel.
    let Scene { directory, shared, id } = Scene::on("/dev/shm".as_ref());
    let tree = (ContentKind::Tree, tree_name(&[]));
    let path = shared.directory.path(tree);
    let sum = FileSum { verity: Some(Digest([1; 32])), ..crate::sums::sum_path(&path).unwrap() };
    ContentSums::new(sum, None).write(&shared.directory.sums_path(tree)).unwrap();
    fs::write(shared.directory.path((ContentKind::Config, id)), DOCUMENT).unwrap();
    let stored = shared.published.images()[&id].clone();
    assert_eq!(shared.check_image(&id, &stored).unwrap(), None);
    let report = shared.verify_images(&[], VerifyPace::Full, &Cancel::default()).unwrap().unwrap();
    assert_eq!((report.damaged, report.verity_files), (vec![], 0));
    assert_eq!(shared.check_image(&id, &stored).unwrap(), None);
    // Under a later kernel the digest would make the sound file one that has lost its fs-verity.
    let kept = ContentSums::read(&shared.directory.sums_path(tree)).unwrap().unwrap();
    assert_eq!(kept.main, FileSum { verity: None, ..sum });
    // A kernel that cannot read the file had found this, in a store that is sound under the present one.
    shared.damage.set(tree, Some(DamagedFile { path, damage: FileDamage::VerityUnsupported }));
    assert_eq!(shared.check_image(&id, &stored).unwrap(), None);
    drop((shared, directory));
}

#[test]
fn a_damaged_layer_is_removed_only_while_it_is_damaged_and_not_written() {
    let scene = Scene::new();
    let (key, index) = ((ContentKind::Layer, LAYER), scene.shared.directory.index_path(LAYER));
    fs::write(&index, "x").unwrap();
    let set_damaged = || {
        let file = DamagedFile { path: index.clone(), damage: FileDamage::Checksum };
        scene.shared.damage.set(key, Some(file));
    };
    set_damaged();
    let pin = scene.shared.directory.pin(key);
    let writing = pin.try_lock().unwrap();
    scene.shared.remove_damaged_layer(LAYER).unwrap();
    assert!(index.exists(), "a pull writes the layer");
    scene.shared.damage.set(key, None);
    drop(writing);
    scene.shared.remove_damaged_layer(LAYER).unwrap();
    assert!(index.exists(), "the pull has repaired the layer");
    set_damaged();
    scene.shared.remove_damaged_layer(LAYER).unwrap();
    assert!(!index.exists());
}

#[test]
fn a_clock_that_was_set_back_does_not_put_off_the_verification() {
    let day = Duration::from_secs(86_400);
    let until_due = |verified, now| time_until_due(verified, now, 7 * day);
    assert_eq!(until_due(Some(1_000_000), 1_000_000 + 86_400), Some(6 * day));
    assert_eq!(until_due(Some(1_000_000), 1_000_000 + 7 * 86_400), None);
    assert_eq!(until_due(None, 1_000_000), None);
    assert_eq!(until_due(Some(1_000_001), 1_000_000), None);
}
