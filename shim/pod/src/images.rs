//! Allocates the images' ranges and partition numbers on the image disk, and counts how many containers use each image. It
//! performs no I/O.

use nacelle_base::machine::ImageDisk;
use nacelle_base::{Classify, FailureKind};
use nacelle_proto::pod;
use std::collections::BTreeMap;

/// The alignment of images in bytes. The first image does not begin at offset 0, so that no image looks like a partition table.
pub const ALIGNMENT: u64 = 1 << 20;
/// The end of the address space of one image disk: 64 TiB.
pub const DISK_END: u64 = 1 << 46;
/// The largest partition number; the smallest is 1.
pub const MAX_PARTITIONS: u32 = 255;
/// Image lengths are multiples of this: the block size of EROFS.
const BLOCK_SIZE: u64 = 4096;
/// The maximum number of extents of an image; no image has so many layers.
pub const MAX_EXTENTS: usize = 512;

/// The position of an image on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The partition number.
    pub partition: u32,
    /// The offset in bytes from the start of the disk.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
}

/// An image cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The length is zero or not a multiple of the block size.
    #[error("cannot attach image {key}: it has {length} bytes, which is not a positive multiple of {BLOCK_SIZE}")]
    Length {
        /// The key of the image.
        key: String,
        /// The length in bytes.
        length: u64,
    },
    /// The image has too many extents, or the sum of their lengths overflows.
    #[error("cannot attach image {key}: it has {extents} extents (maximum {MAX_EXTENTS}), or its length overflows")]
    Extents {
        /// The key of the image.
        key: String,
        /// The number of extents.
        extents: usize,
    },
    /// The path of an extent is relative.
    #[error("cannot attach image {key}: the path {path:?} of an extent is not absolute")]
    Relative {
        /// The key of the image.
        key: String,
        /// The path.
        path: std::path::PathBuf,
    },
    /// The daemon has not offered the files of the image.
    #[error("cannot attach image {key}: the daemon has not offered {expected} files for it")]
    NotOffered {
        /// The key of the image.
        key: String,
        /// The number of files.
        expected: usize,
    },
    /// The image is not the one that the restored guest has mounted.
    #[error(
        "cannot attach image {key}: it has {length} bytes, and the guest was saved with {saved}; make a new checkpoint"
    )]
    OtherLength {
        /// The key of the image.
        key: String,
        /// The length in bytes.
        length: u64,
        /// The length in the checkpoint.
        saved: u64,
    },
    /// All partition numbers or all offsets are in use.
    #[error(
        "cannot attach image {key}: the pod's image disk is full ({images} images are attached); use fewer images in the pod"
    )]
    DiskFull {
        /// The key of the image.
        key: String,
        /// The number of images on the disk.
        images: usize,
    },
}

impl Classify for PlacementError {
    fn kind(&self) -> FailureKind {
        match self {
            PlacementError::DiskFull { .. } => FailureKind::Exhausted,
            PlacementError::NotOffered { .. } | PlacementError::OtherLength { .. } => FailureKind::Conflict,
            _ => FailureKind::Invalid,
        }
    }
}

/// The images on one disk.
#[derive(Debug, Default)]
pub struct ImageTable {
    /// All ranges in use by offset, including those that are being detached.
    ranges_in_use: BTreeMap<u64, Placement>,
    /// The images that containers can share, by key, with the number of users.
    by_key: BTreeMap<String, (Placement, usize)>,
    /// The images that a restored guest has mounted, by key, until their first user.
    saved: BTreeMap<String, Placement>,
}

impl ImageTable {
    /// A table for a guest that has mounted these images.
    pub fn with_saved<'a>(images: impl IntoIterator<Item = (&'a str, Placement)>) -> ImageTable {
        let saved: BTreeMap<_, _> = images.into_iter().map(|(key, placement)| (key.to_owned(), placement)).collect();
        let ranges_in_use = saved.values().map(|placement| (placement.offset, *placement)).collect();
        ImageTable { ranges_in_use, by_key: BTreeMap::new(), saved }
    }

    /// Forgets an image that the restored guest has mounted and no container has used. Its range stays in use until
    /// [`ImageTable::free`].
    pub fn forget_saved(&mut self, key: &str) -> Option<Placement> {
        self.saved.remove(key)
    }

    /// Counts one more user of `key`. The flag is true if the image is new and must be placed and attached. An image that the guest has
    /// mounted keeps its place.
    pub fn acquire(&mut self, key: &str, image: &ImageDisk) -> Result<(Placement, bool), PlacementError> {
        if let Some((placement, users)) = self.by_key.get_mut(key) {
            *users += 1;
            return Ok((*placement, false));
        }
        let length = checked_length(key, image)?;
        if let Some(placement) = self.saved.get(key).copied() {
            if placement.length != length {
                return Err(PlacementError::OtherLength { key: key.to_owned(), length, saved: placement.length });
            }
            self.saved.remove(key);
            self.by_key.insert(key.to_owned(), (placement, 1));
            return Ok((placement, true));
        }
        let disk_full = || PlacementError::DiskFull { key: key.to_owned(), images: self.ranges_in_use.len() };
        let numbers: std::collections::BTreeSet<u32> = self.ranges_in_use.values().map(|p| p.partition).collect();
        let partition = (1..=MAX_PARTITIONS).find(|n| !numbers.contains(n)).ok_or_else(disk_full)?;
        let offset = self.find_gap(length).ok_or_else(disk_full)?;
        let placement = Placement { partition, offset, length };
        self.ranges_in_use.insert(offset, placement);
        self.by_key.insert(key.to_owned(), (placement, 1));
        Ok((placement, true))
    }

    /// Counts one user less. After the last one the key is forgotten and the placement returned; its range stays in use
    /// until [`ImageTable::free`].
    pub fn release(&mut self, key: &str) -> Option<Placement> {
        let (placement, users) = self.by_key.get_mut(key)?;
        let placement = *placement;
        *users = users.saturating_sub(1);
        if *users > 0 {
            return None;
        }
        self.by_key.remove(key);
        Some(placement)
    }

    /// Makes the range of a detached image available again.
    pub fn free(&mut self, placement: Placement) {
        if self.ranges_in_use.get(&placement.offset) == Some(&placement) {
            self.ranges_in_use.remove(&placement.offset);
        }
    }

    /// Returns the images that the guest has mounted and containers can share, by key.
    pub fn placed(&self) -> impl Iterator<Item = (&str, Placement)> {
        let saved = self.saved.iter().map(|(key, placement)| (key.as_str(), *placement));
        self.by_key.iter().map(|(key, (placement, _))| (key.as_str(), *placement)).chain(saved)
    }

    /// Returns the first gap of this length.
    fn find_gap(&self, length: u64) -> Option<u64> {
        let mut start = ALIGNMENT;
        for (&offset, placement) in &self.ranges_in_use {
            if offset.checked_sub(start)? >= length {
                break;
            }
            start = offset.checked_add(placement.length)?.checked_next_multiple_of(ALIGNMENT)?;
        }
        (start.checked_add(length)? <= DISK_END).then_some(start)
    }
}

/// Returns the images of a container with their extents, the root's first.
pub fn images_of(request: &pod::CreateContainerRequest) -> impl Iterator<Item = (&str, &[pod::Extent])> {
    let volumes = request.volumes.iter().map(|volume| (volume.image_key.as_str(), volume.image.as_slice()));
    std::iter::once((request.image_key.as_str(), request.image.as_slice())).chain(volumes)
}

fn checked_length(key: &str, image: &ImageDisk) -> Result<u64, PlacementError> {
    let count = image.extents.len();
    if count > MAX_EXTENTS {
        return Err(PlacementError::Extents { key: key.to_owned(), extents: count });
    }
    if let Some(extent) = image.extents.iter().find(|extent| !extent.path.is_absolute()) {
        return Err(PlacementError::Relative { key: key.to_owned(), path: extent.path.clone() });
    }
    let length = image.extents.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.length));
    match length {
        Some(length) if length > 0 && length % BLOCK_SIZE == 0 => Ok(length),
        Some(length) => Err(PlacementError::Length { key: key.to_owned(), length }),
        None => Err(PlacementError::Extents { key: key.to_owned(), extents: count }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::machine::Extent;
    use proptest::prelude::*;

    fn image(length: u64) -> ImageDisk {
        ImageDisk { extents: vec![Extent { path: "/blob".into(), offset: 0, length }] }
    }

    #[test]
    fn one_key_is_placed_once() {
        let mut images = ImageTable::default();
        let (first, new) = images.acquire("a", &image(4096)).unwrap();
        assert_eq!((first, new), (Placement { partition: 1, offset: ALIGNMENT, length: 4096 }, true));
        assert_eq!(images.acquire("a", &image(4096)).unwrap(), (first, false));
        assert_eq!(images.acquire("b", &image(ALIGNMENT + 4096)).unwrap().0.offset, 2 * ALIGNMENT);
        assert_eq!(images.acquire("c", &image(4096)).unwrap().0.offset, 4 * ALIGNMENT);
        assert_eq!(images.release("a"), None);
        assert_eq!(images.release("a"), Some(first));
        assert_eq!(images.release("a"), None);
        // An image that is being detached is neither shared nor free.
        assert_eq!(images.acquire("a", &image(4096)).unwrap().0.offset, 5 * ALIGNMENT);
        images.free(first);
        assert_eq!(images.acquire("d", &image(4096)).unwrap().0, first);
    }

    #[test]
    fn saved_images_keep_their_places() {
        let saved = |partition, offset| Placement { partition, offset, length: 4096 };
        let (a, b) = (saved(2, 3 * ALIGNMENT), saved(1, ALIGNMENT));
        let mut images = ImageTable::with_saved([("a", a), ("b", b)]);
        assert_eq!(images.placed().collect::<Vec<_>>(), [("a", a), ("b", b)]);
        let other = images.acquire("a", &image(8192)).unwrap_err();
        assert!(matches!(other, PlacementError::OtherLength { length: 8192, saved: 4096, .. }));
        assert_eq!(images.acquire("a", &image(4096)).unwrap(), (a, true));
        assert_eq!(images.acquire("a", &image(4096)).unwrap(), (a, false));
        // Others get a range and a number that no saved image has.
        assert_eq!(images.acquire("c", &image(4096)).unwrap().0, Placement { partition: 3, ..saved(3, 2 * ALIGNMENT) });
        assert_eq!((images.forget_saved("b"), images.forget_saved("b")), (Some(b), None));
        images.free(b);
        assert_eq!(images.acquire("b", &image(4096)).unwrap(), (b, true));
        assert_eq!((images.release("a"), images.release("a")), (None, Some(a)));
    }

    #[test]
    fn partition_numbers_run_out() {
        let mut images = ImageTable::default();
        for n in 0..MAX_PARTITIONS {
            images.acquire(&n.to_string(), &image(4096)).unwrap();
        }
        let error = images.acquire("one more", &image(4096)).unwrap_err();
        assert_eq!((error.kind(), images.acquire("7", &image(4096)).is_ok()), (FailureKind::Exhausted, true));
        assert_eq!(ImageTable::default().acquire("big", &image(DISK_END)).unwrap_err().kind(), FailureKind::Exhausted);
    }

    #[test]
    fn an_invalid_image_is_rejected() {
        let mut relative = image(4096);
        relative.extents[0].path = "blob".into();
        let huge = ImageDisk { extents: [image(u64::MAX - 4095).extents, image(8192).extents].concat() };
        let many = ImageDisk { extents: vec![image(4096).extents.remove(0); MAX_EXTENTS + 1] };
        for bad in [image(0), image(512), ImageDisk::default(), relative, huge, many] {
            assert_eq!(ImageTable::default().acquire("k", &bad).unwrap_err().kind(), FailureKind::Invalid);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn ranges_never_overlap(steps in prop::collection::vec((any::<bool>(), 0u8..12, 1u64..2000), 1..80)) {
            let mut images = ImageTable::default();
            let mut live: BTreeMap<String, (Placement, usize)> = BTreeMap::new();
            for (acquire, key, blocks) in steps {
                let key = key.to_string();
                if acquire {
                    let (placement, new) = images.acquire(&key, &image(blocks * BLOCK_SIZE)).unwrap();
                    prop_assert_eq!(new, !live.contains_key(&key));
                    prop_assert_eq!(placement.offset % ALIGNMENT, 0);
                    prop_assert!(placement.offset >= ALIGNMENT && (1..=MAX_PARTITIONS).contains(&placement.partition));
                    live.entry(key).or_insert((placement, 0)).1 += 1;
                } else if let Some((placement, users)) = live.get_mut(&key) {
                    *users -= 1;
                    let (placement, last) = (*placement, *users == 0);
                    prop_assert_eq!(images.release(&key), last.then_some(placement));
                    if last {
                        live.remove(&key);
                        images.free(placement);
                    }
                }
                let mut all: Vec<Placement> = live.values().map(|(placement, _)| *placement).collect();
                all.sort_by_key(|placement| placement.offset);
                for pair in all.windows(2) {
                    prop_assert!(pair[0].offset + pair[0].length <= pair[1].offset);
                    prop_assert_ne!(pair[0].partition, pair[1].partition);
                }
            }
        }
    }
}
