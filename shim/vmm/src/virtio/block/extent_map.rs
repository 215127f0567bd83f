//! Maps the bytes of a slot to the placed files. Pure: it performs no I/O and takes no lock; a change creates a new table.

use super::SECTOR;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The granularity of the capacity in bytes.
const CAPACITY_STEP: u64 = 1 << 20;

/// The maximum capacity of a slot in bytes.
pub(super) const MAX_CAPACITY: u64 = 1 << 60;

/// A range of an open file, which holds the bytes of a part of the slot's disk.
#[derive(Clone, Debug)]
pub(super) struct FileRange {
    pub file: Arc<File>,
    pub offset: u64,
    pub length: u64,
    /// The state of writes; `None` for a read-only source.
    pub writes: Option<Arc<WriteState>>,
}

/// The state of writes to a source. It is kept when the source is replaced by another one of the same file or device.
#[derive(Debug, Default)]
pub(super) struct WriteState {
    /// Data was written since the last flush.
    pub pending: AtomicBool,
    /// Written data was lost. The host reports an error once; the guest gets an error for every later flush.
    pub lost: AtomicBool,
}

#[derive(Clone, Debug)]
struct PlacedExtent {
    start: u64,
    source: FileRange,
    /// The position of the image that this extent belongs to.
    image: u64,
}

impl PlacedExtent {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.source.length)
    }
}

/// The content at a byte of a slot, up to the next boundary.
#[derive(Debug)]
pub(super) enum SlotContent<'t> {
    /// A source, the offset in its file, and the number of bytes.
    File(&'t FileRange, u64, u64),
    /// The number of zero bytes.
    Hole(u64),
}

/// The map of a slot.
#[derive(Clone, Debug, Default)]
pub(super) struct ExtentMap {
    capacity: u64,
    /// Sorted by start, without overlaps.
    placed: Vec<PlacedExtent>,
}

impl ExtentMap {
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the table with an image placed at `at`, or the existing range that it would overlap. The caller must have
    /// checked that all numbers are aligned and the image ends before [`MAX_CAPACITY`].
    pub(super) fn with(&self, at: u64, sources: Vec<FileRange>) -> Result<ExtentMap, Range<u64>> {
        let end = sources.iter().fold(at, |end, source| end.saturating_add(source.length));
        if let Some(other) = self.images().find(|other| other.start < end && at < other.end) {
            return Err(other);
        }
        let mut extents = self.clone();
        let mut start = at;
        for source in sources {
            let next = start.saturating_add(source.length);
            extents.placed.push(PlacedExtent { start, source, image: at });
            start = next;
        }
        extents.placed.sort_by_key(|placed| placed.start);
        extents.capacity = extents.capacity.max(end.next_multiple_of(CAPACITY_STEP));
        Ok(extents)
    }

    /// Returns the table without the image placed at `at`, or `None` if there is none.
    pub(super) fn without(&self, at: u64) -> Option<ExtentMap> {
        let mut extents = self.clone();
        extents.placed.retain(|placed| placed.image != at);
        (extents.placed.len() < self.placed.len()).then_some(extents)
    }

    /// Returns the table with this source in place of the image at `at`, if there is one.
    pub(super) fn replaced(&self, at: u64, source: FileRange) -> Result<ExtentMap, Range<u64>> {
        match self.without(at) {
            Some(extents) => extents.with(at, vec![source]),
            None => self.with(at, vec![source]),
        }
    }

    /// Returns the first source of the image at `at`.
    pub(super) fn source(&self, at: u64) -> Option<&FileRange> {
        self.placed.iter().find(|placed| placed.image == at).map(|placed| &placed.source)
    }

    /// Returns the sources of all images.
    pub(super) fn sources(&self) -> impl Iterator<Item = &FileRange> {
        self.placed.iter().map(|placed| &placed.source)
    }

    /// Returns the table with at least this capacity.
    pub(super) fn grown(&self, capacity: u64) -> ExtentMap {
        ExtentMap { capacity: self.capacity.max(capacity), ..self.clone() }
    }

    /// Returns the ranges of the images.
    fn images(&self) -> impl Iterator<Item = Range<u64>> {
        self.placed.chunk_by(|one, two| one.image == two.image).filter_map(|parts| {
            let (first, last) = (parts.first()?, parts.last()?);
            Some(first.start..last.end())
        })
    }

    /// Returns the content at byte `at`.
    pub(super) fn content_at(&self, at: u64) -> SlotContent<'_> {
        let next = self.placed.partition_point(|placed| placed.end() <= at);
        match self.placed.get(next) {
            Some(placed) if placed.start <= at => {
                let inside = at - placed.start;
                SlotContent::File(&placed.source, placed.source.offset + inside, placed.source.length - inside)
            }
            Some(placed) => SlotContent::Hole(placed.start - at),
            None => SlotContent::Hole(self.capacity.saturating_sub(at).max(SECTOR)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECTORS: u64 = 64;

    /// The content of each sector: the image and the sector of its file, or `None`.
    type Model = Vec<Option<(u64, u64)>>;

    fn sector_content(extents: &ExtentMap, sector: u64) -> Option<u64> {
        match extents.content_at(sector * SECTOR) {
            SlotContent::File(_, offset, length) => {
                assert!(length > 0 && offset.is_multiple_of(SECTOR));
                Some(offset / SECTOR)
            }
            SlotContent::Hole(length) => {
                assert!(length > 0);
                None
            }
        }
    }

    #[test]
    fn a_placed_file_can_be_replaced_by_a_longer_one() {
        let source = |length: u64| FileRange {
            file: Arc::new(File::open("/dev/null").unwrap()),
            offset: 0,
            length: length * SECTOR,
            writes: None,
        };
        let extents = ExtentMap::default().replaced(0, source(4)).unwrap().replaced(8 * SECTOR, source(4)).unwrap();
        let longer = extents.replaced(0, source(8)).unwrap();
        assert_eq!(longer.source(0).unwrap().length, 8 * SECTOR);
        assert_eq!(longer.sources().count(), 2);
        assert_eq!(longer.replaced(0, source(9)).unwrap_err(), 8 * SECTOR..12 * SECTOR);
        assert!(longer.source(SECTOR).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

        /// Compares the table with a list of one entry per sector.
        #[test]
        fn the_map_contains_what_was_placed(
            operations in prop::collection::vec((0..SECTORS, prop::collection::vec((0..100u64, 1..8u64), 0..4)), 1..40)
        ) {
            let file = Arc::new(File::open("/dev/null").unwrap());
            let mut extents = ExtentMap::default();
            let mut model: Model = vec![None; 2 * SECTORS as usize];
            for (at, parts) in operations {
                if parts.is_empty() {
                    let there = model.iter().any(|here| here.is_some_and(|(image, _)| image == at));
                    let without = extents.without(at * SECTOR);
                    prop_assert_eq!(without.is_some(), there);
                    extents = without.unwrap_or(extents);
                    model.iter_mut().filter(|here| here.is_some_and(|(image, _)| image == at)).for_each(|here| *here = None);
                } else {
                    let sources = parts.iter().map(|(offset, length)| FileRange {
                        file: file.clone(),
                        offset: offset * SECTOR,
                        length: length * SECTOR,
                        writes: None,
                    });
                    let sectors: Vec<u64> = parts.iter().flat_map(|(offset, length)| *offset..offset + length).collect();
                    let range = at as usize..at as usize + sectors.len();
                    let free = model[range.clone()].iter().all(Option::is_none);
                    let with = extents.with(at * SECTOR, sources.collect());
                    prop_assert_eq!(with.is_ok(), free);
                    if let Ok(with) = with {
                        prop_assert!(with.capacity() >= extents.capacity() && with.capacity() >= range.end as u64 * SECTOR);
                        extents = with;
                        model[range].iter_mut().zip(sectors).for_each(|(here, sector)| *here = Some((at, sector)));
                    }
                }
                for (sector, here) in model.iter().enumerate() {
                    prop_assert_eq!(sector_content(&extents, sector as u64), here.map(|(_, sector)| sector));
                }
            }
        }
    }
}
