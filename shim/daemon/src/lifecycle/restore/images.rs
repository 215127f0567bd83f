//! Checks where the images are on the image disk of a saved VM. The pod process attaches its files of the images exactly there.

use super::error::Incompatibility;
use nacelle_model::checkpoint::{CheckpointManifest, SavedContainer, SavedImagePlacement};
use nacelle_model::digest::{Digest, ImageId};
use nacelle_pod::spec::CheckpointImage;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// The numbers of partitions.
const PARTITIONS: RangeInclusive<u32> = 1..=255;
/// The end of an image disk in bytes.
const DISK_END: u64 = 1 << 46;

/// The images on the disk of a saved VM.
pub(super) struct SavedImages {
    /// The part for the pod process.
    pub placed: Vec<CheckpointImage>,
    /// The layouts of those that the containers use.
    layouts: BTreeMap<ImageId, Option<Digest>>,
}

impl SavedImages {
    /// Returns the images of a container with their layouts.
    pub fn layouts_of(&self, container: &SavedContainer) -> Vec<(ImageId, Option<Digest>)> {
        let used = ids_of(container);
        used.into_iter().map(|id| (id, self.layouts.get(&id).copied().flatten())).collect()
    }
}

/// Returns the images of a container and of its image volumes.
fn ids_of(container: &SavedContainer) -> BTreeSet<ImageId> {
    std::iter::once(&container.image).chain(&container.volumes).map(|image| image.id).collect()
}

/// Returns the images on the disk. Each has a place of its own, and those of the containers are among them.
pub(super) fn images(manifest: &CheckpointManifest) -> Result<SavedImages, Incompatibility> {
    let used: BTreeSet<ImageId> = manifest.containers.iter().flat_map(ids_of).collect();
    let refuse = |image: ImageId, why| Err(Incompatibility::ImagePlacement { image, why });
    let mut by_offset: Vec<&SavedImagePlacement> = manifest.images.iter().collect();
    by_offset.sort_by_key(|placed| placed.offset);
    let (mut known, mut partitions, mut end) = (BTreeSet::new(), BTreeSet::new(), 0);
    for placed in by_offset {
        let next = placed.offset.checked_add(placed.length).filter(|next| *next <= DISK_END);
        let is_apart = placed.length > 0 && placed.offset >= end && partitions.insert(placed.partition);
        match next.filter(|_| is_apart && PARTITIONS.contains(&placed.partition)) {
            Some(next) => end = next,
            None => return refuse(placed.image, "has an invalid place, or that of another image,"),
        }
        if !known.insert(placed.image) {
            return refuse(placed.image, "has two places");
        }
    }
    if let Some(image) = used.difference(&known).next() {
        return refuse(*image, "has no place");
    }
    let placed = |placed: &SavedImagePlacement| CheckpointImage {
        key: placed.image.to_string(),
        partition: placed.partition,
        offset: placed.offset,
        length: placed.length,
        is_used: used.contains(&placed.image),
    };
    let layouts = manifest.images.iter().filter(|placed| used.contains(&placed.image));
    Ok(SavedImages {
        placed: manifest.images.iter().map(placed).collect(),
        layouts: layouts.map(|placed| (placed.image, placed.layout)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The current version of the format, with one container and its image on the disk.
    const GOLDEN: &str = include_str!("../../../../model/tests/golden/checkpoint-v1.json");

    #[test]
    fn each_image_has_a_place_of_its_own() {
        let manifest = || {
            let mut manifest = CheckpointManifest::decode(GOLDEN.as_bytes()).unwrap();
            let used = manifest.containers[0].image.id;
            let place = |n: u8, image| SavedImagePlacement {
                image,
                partition: n.into(),
                offset: u64::from(n) << 20,
                length: 1 << 20,
                layout: Some(Digest([n; 32])),
            };
            // The places need not be in their order.
            manifest.images = vec![place(2, Digest([2; 32])), place(1, used)];
            manifest
        };
        let found = images(&manifest()).unwrap();
        assert_eq!(found.placed.iter().map(|image| image.is_used).collect::<Vec<_>>(), [false, true]);
        let container = &manifest().containers[0];
        assert_eq!(found.layouts_of(container), [(container.image.id, Some(Digest([1; 32])))]);

        type Change = fn(&mut Vec<SavedImagePlacement>);
        let changes: [(Change, &str); 9] = [
            (|all| all.truncate(1), "has no place"),
            (|all| all[0].image = all[1].image, "has two places"),
            (|all| all[0].partition = 1, "or that of another image"),
            (|all| all[0].partition = 0, "an invalid place"),
            (|all| all[0].partition = 256, "an invalid place"),
            (|all| all[0].offset = (2 << 20) - 1, "or that of another image"),
            (|all| all[0].offset = DISK_END, "an invalid place"),
            (|all| all[0].length = u64::MAX, "an invalid place"),
            (|all| all[1].length = 0, "an invalid place"),
        ];
        for (change, expected) in changes {
            let mut changed = manifest();
            change(&mut changed.images);
            let error = images(&changed).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}, expected {expected}");
        }
    }
}
