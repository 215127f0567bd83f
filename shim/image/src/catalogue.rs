//! Keeps the list of images on disk: one JSON file, replaced atomically at each change. Readers use the published copy in memory
//! and never wait for the disk.

use crate::directory::{ContentKey, ContentKind};
use crate::{ImageError, ImageRecord, ImageUser, Reference};
use nacelle_base::files::{at, write_whole};
use nacelle_model::digest::{Digest, ImageId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

const FORMAT_VERSION: u64 = 1;

/// The images, by id.
pub type Images = BTreeMap<ImageId, StoredImage>;

/// The record of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredImage {
    /// The tags, `registry/repository:tag`.
    pub tags: BTreeSet<String>,
    /// The digest references, `registry/repository@sha256:...`.
    pub digests: BTreeSet<String>,
    /// The user of the image's configuration.
    pub user: String,
    /// The artifact type; `None` for an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The size of the image's files in bytes.
    pub size: u64,
    /// When the image was added, in seconds since 1970.
    pub added: u64,
    /// The layers (digests of the unpacked form), lowest first.
    pub layers: Vec<Digest>,
    /// The digest that names the metadata EROFS.
    pub tree: Digest,
    /// The length of the metadata in bytes.
    pub tree_length: u64,
    /// The blobs that follow the metadata on the device, with their lengths in bytes.
    pub blobs: Vec<(Digest, u64)>,
    /// The image was removed while it was in use.
    pub removed: bool,
    /// The length in bytes of the document that identifies the image; `None` in lists of Nacelle 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document_length: Option<u64>,
}

impl StoredImage {
    /// Returns all content of the image, with the lengths in bytes of the main files as far as the list has them.
    pub fn content(&self, id: &ImageId) -> Vec<(ContentKey, Option<u64>)> {
        let first = [
            ((ContentKind::Config, *id), self.document_length),
            ((ContentKind::Tree, self.tree), Some(self.tree_length)),
        ];
        let blobs: BTreeMap<Digest, u64> = self.blobs.iter().copied().collect();
        let layers: BTreeSet<Digest> = self.layers.iter().chain(blobs.keys()).copied().collect();
        let layers = layers.into_iter().map(|layer| ((ContentKind::Layer, layer), blobs.get(&layer).copied()));
        first.into_iter().chain(layers).collect()
    }

    /// Returns the text by which messages name the image: a tag or digest reference, otherwise the id.
    pub fn display_name(&self, id: &ImageId) -> String {
        self.tags.iter().chain(&self.digests).next().map_or_else(|| id.to_string(), String::clone)
    }
}

/// Entries of the list that cannot be read, by their key. They stay as they are until a readable entry has the key.
pub type UnreadableEntries = BTreeMap<String, serde_json::Value>;

#[derive(Serialize)]
struct WrittenCatalogue<'a> {
    version: u64,
    images: BTreeMap<String, WrittenEntry<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum WrittenEntry<'a> {
    Known(&'a StoredImage),
    Unreadable(&'a serde_json::Value),
}

#[derive(Deserialize)]
struct ReadCatalogue {
    version: u64,
    #[serde(default)]
    images: serde_json::Value,
}

/// The list after the last change. Readers of it never wait for a disk.
#[derive(Clone, Default)]
pub struct PublishedImages(Arc<Mutex<Arc<Images>>>);

impl PublishedImages {
    /// Returns the images.
    pub fn images(&self) -> Arc<Images> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn set(&self, images: Arc<Images>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = images;
    }
}

/// The list, in memory and on disk.
pub struct ImageCatalogue {
    path: PathBuf,
    published: PublishedImages,
    unreadable: UnreadableEntries,
}

impl ImageCatalogue {
    /// Reads the list. A missing file is an empty list. Sets entries aside that cannot be read.
    pub fn open(path: &Path) -> Result<ImageCatalogue, ImageError> {
        let bytes = match std::fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let (published, unreadable) = Default::default();
                return Ok(ImageCatalogue { path: path.to_owned(), published, unreadable });
            }
            other => other.map_err(at("read", path))?,
        };
        let damaged = |source| ImageError::Catalogue { path: path.to_owned(), source };
        let file: ReadCatalogue = serde_json::from_slice(&bytes).map_err(damaged)?;
        if file.version != FORMAT_VERSION {
            return Err(ImageError::Version { path: path.to_owned(), version: file.version, known: FORMAT_VERSION });
        }
        let entries: BTreeMap<String, serde_json::Value> = serde_json::from_value(file.images).map_err(damaged)?;
        let (mut images, mut unreadable) = (Images::new(), UnreadableEntries::new());
        for (key, value) in entries {
            match (key.parse::<ImageId>(), StoredImage::deserialize(&value)) {
                (Ok(id), Ok(stored)) => drop(images.insert(id, stored)),
                (Ok(_), Err(error)) => {
                    tracing::warn!(
                        path = %path.display(), image = key, %error,
                        "an entry of the list of images is damaged; the image counts as absent until it is pulled again"
                    );
                    unreadable.insert(key, value);
                }
                (Err(error), _) => {
                    tracing::warn!(
                        path = %path.display(), %error,
                        "an entry of the list of images is damaged; nacelle image verify --repair removes it"
                    );
                    unreadable.insert(key, value);
                }
            }
        }
        let published = PublishedImages::default();
        published.set(Arc::new(images));
        Ok(ImageCatalogue { path: path.to_owned(), published, unreadable })
    }

    /// Returns the images.
    pub fn images(&self) -> Arc<Images> {
        self.published.images()
    }

    /// Returns the handle of the readers.
    pub fn published(&self) -> PublishedImages {
        self.published.clone()
    }

    /// Returns the entries that cannot be read.
    pub fn unreadable(&self) -> &UnreadableEntries {
        &self.unreadable
    }

    /// Changes the list, on disk and then in memory. Changes neither if the disk fails.
    pub fn update(&mut self, change: impl FnOnce(&mut Images)) -> Result<(), ImageError> {
        let before = self.images();
        let mut images = Images::clone(&before);
        change(&mut images);
        if images != *before {
            self.write(Arc::new(images), self.unreadable.clone())?;
        }
        Ok(())
    }

    /// Removes an entry that cannot be read. Returns whether there was one of this key, which may lack `sha256:`.
    pub fn remove_unreadable(&mut self, key: &str) -> Result<bool, ImageError> {
        let mut unreadable = self.unreadable.clone();
        if unreadable.remove(key).is_none() && unreadable.remove(&format!("sha256:{key}")).is_none() {
            return Ok(false);
        }
        self.write(self.images(), unreadable)?;
        Ok(true)
    }

    fn write(&mut self, images: Arc<Images>, mut unreadable: UnreadableEntries) -> Result<(), ImageError> {
        unreadable.retain(|key, _| !key.parse().is_ok_and(|id: ImageId| images.contains_key(&id)));
        let known = images.iter().map(|(id, stored)| (id.to_string(), WrittenEntry::Known(stored)));
        let kept = unreadable.iter().map(|(key, value)| (key.clone(), WrittenEntry::Unreadable(value)));
        let file = WrittenCatalogue { version: FORMAT_VERSION, images: known.chain(kept).collect() };
        let damaged = |source| ImageError::Catalogue { path: self.path.clone(), source };
        write_whole(&self.path, &serde_json::to_vec(&file).map_err(damaged)?)?;
        self.published.set(images);
        self.unreadable = unreadable;
        Ok(())
    }
}

/// Returns the image of this reference, id, or prefix of an id. Does not find removed images.
pub fn find_image(images: &Images, name: &str) -> Result<Option<ImageId>, ImageError> {
    let listed = || images.iter().filter(|(_, stored)| !stored.removed);
    if let Ok(reference) = Reference::parse(name) {
        let tag = reference.to_string();
        let digest = reference.digest().map(|digest| reference.with_digest(digest).to_string());
        let named = listed().find(|(_, stored)| match &digest {
            Some(digest) => stored.digests.contains(digest),
            None => stored.tags.contains(&tag),
        });
        if let Some((id, _)) = named {
            return Ok(Some(*id));
        }
    }
    let digits = name.strip_prefix("sha256:").unwrap_or(name);
    let hex = digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    if !hex || !(3..=64).contains(&digits.len()) {
        return Ok(None);
    }
    let mut fitting = listed().filter(|(id, _)| id.hex().starts_with(digits)).map(|(id, _)| *id);
    match (fitting.next(), fitting.next()) {
        (Some(_), Some(_)) => Err(ImageError::Ambiguous { name: name.to_owned() }),
        (first, _) => Ok(first),
    }
}

/// Sets a tag to an image. The image that had the tag loses it.
pub fn assign_tag(images: &mut Images, id: &ImageId, tag: &str) {
    for (other, stored) in images.iter_mut() {
        if other == id {
            stored.tags.insert(tag.to_owned());
        } else {
            stored.tags.remove(tag);
        }
    }
}

/// Removes images from the list. Images in use stay, marked as removed.
pub fn remove_image(images: &mut Images, id: &ImageId, in_use: &HashSet<ImageId>) {
    if let Some(stored) = images.get_mut(id) {
        stored.tags.clear();
        stored.digests.clear();
        stored.removed = true;
    }
    images.retain(|id, stored| !stored.removed || in_use.contains(id));
}

/// Returns the public record of an image.
pub fn image_record(id: &ImageId, stored: &StoredImage, pinned: &HashSet<String>) -> ImageRecord {
    let user = stored.user.split(':').next().unwrap_or_default();
    ImageRecord {
        id: *id,
        artifact_type: stored.artifact_type.clone(),
        repo_tags: stored.tags.iter().cloned().collect(),
        repo_digests: stored.digests.iter().cloned().collect(),
        size: stored.size,
        user: match user.parse() {
            Ok(uid) => ImageUser::Uid(uid),
            Err(_) if user.is_empty() => ImageUser::Uid(0),
            Err(_) => ImageUser::Name(user.to_owned()),
        },
        pinned: stored.tags.iter().chain(&stored.digests).any(|name| pinned.contains(name)),
        added: stored.added,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(tags: &[&str], digests: &[&str], user: &str) -> StoredImage {
        let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        StoredImage {
            tags: own(tags),
            digests: own(digests),
            user: user.into(),
            artifact_type: None,
            size: 1,
            added: 0,
            layers: vec![],
            tree: Digest([0; 32]),
            tree_length: 4096,
            blobs: vec![],
            removed: false,
            document_length: None,
        }
    }

    #[test]
    fn images_are_found_by_every_form_of_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index.json");
        let mut catalogue = ImageCatalogue::open(&path).unwrap();
        let (a, b) = (Digest([0xab; 32]), Digest([0xba; 32]));
        let by_digest = format!("docker.io/library/x@{}", Digest([1; 32]));
        catalogue
            .update(|images| {
                images.insert(a, stored(&["docker.io/library/x:latest", "r.io/y:1"], &[&by_digest], "1000:5"));
                images.insert(b, stored(&["docker.io/library/abab:latest"], &[], "nobody"));
            })
            .unwrap();
        let catalogue = ImageCatalogue::open(&path).unwrap();
        for (name, id) in [
            ("x", Some(a)),
            ("x:latest", Some(a)),
            ("r.io/y:1", Some(a)),
            ("r.io/y", None),
            (by_digest.as_str(), Some(a)),
            (&format!("x:other@{}", Digest([1; 32])), Some(a)),
            (&format!("x@{}", Digest([2; 32])), None),
            (&a.to_string(), Some(a)),
            (&a.hex(), Some(a)),
            ("sha256:abab", Some(a)),
            ("ababab", Some(a)),
            ("abab", Some(b)), // a name goes before an id
            ("ba", None),
            ("", None),
            ("../x", None),
            ("sha256:", None),
        ] {
            assert_eq!(find_image(&catalogue.images(), name).unwrap(), id, "{name}");
        }
        let pinned = HashSet::from(["r.io/y:1".to_owned()]);
        let record_of = |id| image_record(id, &catalogue.images()[id], &pinned);
        assert!(record_of(&a).pinned && !record_of(&b).pinned);
        assert_eq!((record_of(&a).user, record_of(&b).user), (ImageUser::Uid(1000), ImageUser::Name("nobody".into())));
    }

    #[test]
    fn an_ambiguous_short_id_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let mut catalogue = ImageCatalogue::open(&directory.path().join("i")).unwrap();
        let (mut one, mut two) = ([7; 32], [7; 32]);
        (one[31], two[31]) = (1, 2);
        catalogue
            .update(|images| {
                images.insert(Digest(one), stored(&[], &[], ""));
                images.insert(Digest(two), stored(&[], &[], ""));
            })
            .unwrap();
        assert!(matches!(find_image(&catalogue.images(), "0707"), Err(ImageError::Ambiguous { .. })));
        assert_eq!(find_image(&catalogue.images(), &Digest(two).hex()).unwrap(), Some(Digest(two)));
    }

    #[test]
    fn a_tag_moves_and_removal_waits_for_users() {
        let (a, b) = (Digest([1; 32]), Digest([2; 32]));
        let mut images = Images::from([(a, stored(&["t"], &["d"], "")), (b, stored(&[], &[], ""))]);
        assign_tag(&mut images, &b, "t");
        assert!(images[&a].tags.is_empty() && images[&b].tags.contains("t"));
        remove_image(&mut images, &a, &HashSet::from([a]));
        assert!(images[&a].removed && images[&a].digests.is_empty());
        remove_image(&mut images, &b, &HashSet::new());
        assert!(images.is_empty());
    }

    #[test]
    fn unknown_versions_and_damage_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index.json");
        std::fs::write(&path, r#"{"version":9}"#).unwrap();
        assert!(matches!(ImageCatalogue::open(&path), Err(ImageError::Version { version: 9, .. })));
        for whole in ["", "{", r#"{"version":1,"images":7}"#] {
            std::fs::write(&path, whole).unwrap();
            assert!(matches!(ImageCatalogue::open(&path), Err(ImageError::Catalogue { .. })), "{whole}");
        }
    }

    #[test]
    fn a_damaged_entry_is_kept_apart_from_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index.json");
        let (a, b) = (Digest([1; 32]), Digest([2; 32]));
        let mut catalogue = ImageCatalogue::open(&path).unwrap();
        let both = [(a, stored(&["a"], &[], "")), (b, stored(&["b"], &[], ""))];
        catalogue.update(|images| images.extend(both.clone())).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let (first, rest) = text.split_once("\"tree_length\"").unwrap();
        std::fs::write(&path, format!("{first}\"tree_lenght\"{rest}")).unwrap();
        let mut catalogue = ImageCatalogue::open(&path).unwrap();
        assert_eq!(catalogue.images().keys().collect::<Vec<_>>(), [&b]);
        assert_eq!(catalogue.unreadable().keys().collect::<Vec<_>>(), [&a.to_string()]);
        // A change of the list keeps the entry, and a new entry of its key replaces it.
        catalogue.update(|images| drop(images.remove(&b))).unwrap();
        let mut catalogue = ImageCatalogue::open(&path).unwrap();
        assert_eq!((catalogue.images().len(), catalogue.unreadable().len()), (0, 1));
        catalogue.update(|images| images.extend(both.clone())).unwrap();
        let catalogue = ImageCatalogue::open(&path).unwrap();
        assert_eq!((catalogue.images().len(), catalogue.unreadable().len()), (2, 0));
        // A key that is no id is removed by name only.
        std::fs::write(&path, r#"{"version":1,"images":{"x":{}}}"#).unwrap();
        let mut catalogue = ImageCatalogue::open(&path).unwrap();
        assert!(!catalogue.remove_unreadable("y").unwrap() && catalogue.remove_unreadable("x").unwrap());
        assert_eq!(ImageCatalogue::open(&path).unwrap().unreadable().len(), 0);
    }

    #[test]
    fn a_list_of_nacelle_0_1_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index.json");
        let digest = |byte| Digest([byte; 32]);
        let list = format!(
            r#"{{"version":1,"images":{{"{}":{{"tags":["t"],"digests":["d"],"user":"1","size":9,"added":8,"layers":["{}","{}"],
            "tree":"{}","tree_length":4096,"blobs":[["{}",8192]],"removed":false}}}}}}"#,
            digest(1),
            digest(2),
            digest(3),
            digest(4),
            digest(3)
        );
        std::fs::write(&path, list).unwrap();
        let catalogue = ImageCatalogue::open(&path).unwrap();
        let content = catalogue.images()[&digest(1)].content(&digest(1));
        let expected = [
            ((ContentKind::Config, digest(1)), None),
            ((ContentKind::Tree, digest(4)), Some(4096)),
            ((ContentKind::Layer, digest(2)), None),
            ((ContentKind::Layer, digest(3)), Some(8192)),
        ];
        assert_eq!(content, expected);
    }
}
