//! Checks that the files of images exist and have their lengths and their fs-verity digests: at the start, before a pull or load reuses
//! them, and before a container uses them. It reads no content, which `crate::verify` does; damage that that has found counts here, too.
//! Everything here blocks.

use crate::ImageError;
use crate::budget::Cancel;
use crate::catalogue::StoredImage;
use crate::damage::{DamagedFile, FileDamage};
use crate::directory::{ContentKey, ContentKind};
use crate::install::StoreState;
use crate::store_verity::StoreVerity;
use crate::sums::{ContentSums, FileSum};
use nacelle_base::Chain;
use nacelle_base::files::{FileError, at};
use nacelle_model::digest::{Digest, ImageId};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

impl StoreState {
    /// Checks all images, and logs one warning for each damaged one. A file that cannot be examined does not fail the start.
    pub fn check_all_images(&self) {
        for (id, stored) in self.published.images().iter() {
            let mut damaged = Vec::new();
            for (key, length) in stored.content(id) {
                match self.check_content(key, length) {
                    Ok(file) => damaged.extend(file),
                    Err(error) => {
                        tracing::warn!(image = %id, error = %Chain(&error), "cannot check a file of an image")
                    }
                }
            }
            let Some(first) = damaged.first() else { continue };
            tracing::warn!(
                image = stored.display_name(id),
                %id,
                file = %first.path.display(),
                damage = %first.damage,
                damaged_files = damaged.len(),
                "an image is damaged; it counts as absent until it is pulled again"
            );
        }
    }

    /// Returns whether a file of the image is known to be damaged. Does not block.
    pub fn is_known_damaged(&self, id: &ImageId, stored: &StoredImage) -> bool {
        self.damage.contains_any(stored.content(id).into_iter().map(|(key, _)| key))
    }

    /// Returns the record of an image whose files are all there.
    pub fn require_sound_image(&self, id: &ImageId) -> Result<StoredImage, ImageError> {
        let stored = self.published.images().get(id).cloned();
        let stored = stored.ok_or_else(|| ImageError::NotFound { name: id.to_string() })?;
        match self.check_image(id, &stored)? {
            None => Ok(stored),
            Some(file) => Err(damaged_error(id, &stored, file)),
        }
    }

    /// Returns whether the list has this image and a file of it is damaged.
    pub fn is_damaged(&self, id: &ImageId) -> Result<bool, ImageError> {
        let stored = self.published.images().get(id).cloned();
        Ok(stored.map(|stored| self.check_image(id, &stored)).transpose()?.flatten().is_some())
    }

    /// Checks all files of an image. Returns the first that is damaged.
    pub fn check_image(&self, id: &ImageId, stored: &StoredImage) -> Result<Option<DamagedFile>, ImageError> {
        let mut first = None;
        for (key, length) in stored.content(id) {
            if let Some(file) = self.check_content(key, length)? {
                first.get_or_insert(file);
            }
        }
        Ok(first)
    }

    /// Returns whether a layer is complete and not known to be damaged. Records nothing, because the layer may be one that no image
    /// has yet.
    pub fn has_sound_layer(&self, diff_id: Digest) -> Result<bool, ImageError> {
        let key = (ContentKind::Layer, diff_id);
        let images = self.published.images();
        let mut blobs = images.values().flat_map(|stored| &stored.blobs);
        let length = blobs.find(|(blob, _)| *blob == diff_id).map(|(_, length)| *length);
        let known = self.damage.get(&key).filter(|known| !known.damage.is_visible());
        Ok(known.is_none() && self.find_visible_damage(key, length)?.is_none())
    }

    /// Checks the files of this content. `length` is the length in bytes that the list has for the main file. Records damage, and that
    /// files have reappeared.
    pub fn check_content(&self, key: ContentKey, length: Option<u64>) -> Result<Option<DamagedFile>, FileError> {
        let visible = self.find_visible_damage(key, length)?;
        let known = self.damage.get(&key);
        Ok(match (visible, known) {
            (Some(file), _) => {
                self.damage.set(key, Some(file.clone()));
                Some(file)
            }
            (None, Some(known)) if known.damage.is_visible() => {
                self.damage.set(key, None);
                None
            }
            (None, known) => known,
        })
    }

    /// Compares existence, lengths and fs-verity digests of the files of this content with the record.
    pub fn find_visible_damage(&self, key: ContentKey, length: Option<u64>) -> Result<Option<DamagedFile>, FileError> {
        let sums = match self.read_sums(key)? {
            Ok(sums) => sums,
            Err(damaged) => return Ok(Some(damaged)),
        };
        let mut files = vec![(self.directory.path(key), length, sums.map(|sums| sums.main))];
        if key.0 == ContentKind::Layer {
            files.push((self.directory.index_path(key.1), None, sums.and_then(|sums| sums.index)));
        }
        for (path, length, sum) in files {
            match find_file_damage(self.directory.verity(), &path, length, sum) {
                Ok(None) => {}
                Ok(Some(damage)) => return Ok(Some(DamagedFile { path, damage })),
                Err(error) => return Err(at("read", &path)(error)),
            }
        }
        Ok(None)
    }

    /// Reads the sums of this content, or finds that the file with them is damaged.
    pub fn read_sums(&self, key: ContentKey) -> Result<Result<Option<ContentSums>, DamagedFile>, FileError> {
        if !matches!(key.0, ContentKind::Layer | ContentKind::Tree) {
            return Ok(Ok(None));
        }
        let path: PathBuf = self.directory.sums_path(key);
        match ContentSums::read(&path) {
            Ok(sums) => Ok(Ok(sums)),
            Err(error) => match FileDamage::from_read_error(&error) {
                Some(damage) => Ok(Err(DamagedFile { path, damage })),
                None => Err(at("read", &path)(error)),
            },
        }
    }

    /// Removes the metadata of all images with this layer: its new blob has another layout than the one that they point into.
    pub fn remove_trees_of_layer(&self, diff_id: Digest) -> Result<(), FileError> {
        let images = self.published.images();
        let with_layer = images.values().filter(|stored| stored.layers.contains(&diff_id));
        let trees: BTreeSet<Digest> = with_layer.map(|stored| stored.tree).collect();
        for tree in trees {
            let key = (ContentKind::Tree, tree);
            let pin = self.directory.pin(key);
            let _writing = pin.blocking_lock();
            self.directory.remove_tree(tree)?;
            self.damage.set(key, Some(DamagedFile { path: self.directory.path(key), damage: FileDamage::Missing }));
            tracing::info!(tree = %tree, layer = %diff_id, "the metadata of an image are written again, because a layer changed");
        }
        Ok(())
    }

    /// Writes the metadata again of all images that have lost only these. An image that fails stays damaged until its next pull.
    pub fn rebuild_lost_trees(&self, cancel: &Cancel) {
        let images = self.published.images();
        let lost = |stored: &&StoredImage| self.damage.contains_any([(ContentKind::Tree, stored.tree)]);
        let layers: BTreeSet<&Vec<Digest>> = images.values().filter(lost).map(|stored| &stored.layers).collect();
        for layers in layers {
            let sound = layers.iter().all(|layer| matches!(self.has_sound_layer(*layer), Ok(true)));
            if let Err(error) = if sound { self.rebuild_tree(layers, cancel) } else { Ok(()) } {
                tracing::warn!(error = %Chain(&error), "cannot write the metadata of an image again; its next pull does");
            }
        }
    }

    /// Writes the metadata of the images of these layers again, unless they are sound.
    pub fn rebuild_tree(&self, layers: &[Digest], cancel: &Cancel) -> Result<(), ImageError> {
        let (tree, tree_length, blobs) = self.build_tree(layers, cancel)?;
        self.lock_catalogue().update(|images| {
            for stored in images.values_mut().filter(|stored| stored.layers == layers) {
                (stored.tree, stored.tree_length, stored.blobs) = (tree, tree_length, blobs.clone());
            }
        })
    }
}

/// Compares existence, length and fs-verity digest of a file with the list of images (`listed`, a length in bytes) and with its sum.
/// Returns the error of the file if it proves no damage.
fn find_file_damage(
    verity: &StoreVerity,
    path: &Path,
    listed: Option<u64>,
    sum: Option<FileSum>,
) -> io::Result<Option<FileDamage>> {
    let found = match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
        other => other.map(|metadata| metadata.len()),
    };
    let found = match found {
        Ok(length) => length,
        Err(error) => return FileDamage::from_read_error(&error).map(Some).ok_or(error),
    };
    let mut lengths = [listed, sum.map(|sum| sum.length)].into_iter().flatten();
    if let Some(expected) = lengths.find(|expected| *expected != found) {
        return Ok(Some(FileDamage::Length { found, expected }));
    }
    match sum.and_then(|sum| sum.verity) {
        Some(expected) => verity.find_damage(path, expected),
        None => Ok(None),
    }
}

/// Returns the error of an image with a damaged file.
pub fn damaged_error(id: &ImageId, stored: &StoredImage, file: DamagedFile) -> ImageError {
    ImageError::Damaged { image: stored.display_name(id), file: Box::new(file) }
}
