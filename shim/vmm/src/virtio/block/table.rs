//! Maps the bytes of a slot to the placed files. Pure: it performs no I/O and takes no lock; a change creates a new table.

use super::SECTOR;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The granularity of the capacity in bytes.
const STEP: u64 = 1 << 20;

/// The maximum capacity of a slot in bytes.
pub(super) const MAX_CAPACITY: u64 = 1 << 60;

/// An extent of an open file.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub file: Arc<File>,
    pub offset: u64,
    pub length: u64,
    /// The state of writes; `None` for a read-only source.
    pub writes: Option<Arc<Writes>>,
}

/// The state of writes to a source. It is kept when the source is replaced by another one of the same file or device.
#[derive(Debug, Default)]
pub(super) struct Writes {
    /// Data was written since the last flush.
    pub pending: AtomicBool,
    /// Written data was lost. The host reports an error once; the guest gets an error for every later flush.
    pub lost: AtomicBool,
}

#[derive(Clone, Debug)]
struct Mapped {
    start: u64,
    source: Source,
    /// The position of the image that this extent belongs to.
    image: u64,
}

impl Mapped {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.source.length)
    }
}

/// The content at a byte of a slot, up to the next boundary.
#[derive(Debug)]
pub(super) enum Here<'t> {
    /// A source, the offset in its file, and the number of bytes.
    File(&'t Source, u64, u64),
    /// The number of zero bytes.
    Hole(u64),
}

/// The map of a slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    capacity: u64,
    /// Sorted by start, without overlaps.
    mapped: Vec<Mapped>,
}

impl Table {
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the table with an image placed at `at`, or the existing range that it would overlap. The caller must have
    /// checked that all numbers are aligned and the image ends before [`MAX_CAPACITY`].
    pub(super) fn with(&self, at: u64, sources: Vec<Source>) -> Result<Table, Range<u64>> {
        let end = sources.iter().fold(at, |end, source| end.saturating_add(source.length));
        if let Some(other) = self.images().find(|other| other.start < end && at < other.end) {
            return Err(other);
        }
        let mut table = self.clone();
        let mut start = at;
        for source in sources {
            let next = start.saturating_add(source.length);
            table.mapped.push(Mapped { start, source, image: at });
            start = next;
        }
        table.mapped.sort_by_key(|mapped| mapped.start);
        table.capacity = table.capacity.max(end.next_multiple_of(STEP));
        Ok(table)
    }

    /// Returns the table without the image placed at `at`, or `None` if there is none.
    pub(super) fn without(&self, at: u64) -> Option<Table> {
        let mut table = self.clone();
        table.mapped.retain(|mapped| mapped.image != at);
        (table.mapped.len() < self.mapped.len()).then_some(table)
    }

    /// Returns the table with this source in place of the image at `at`, if there is one.
    pub(super) fn replaced(&self, at: u64, source: Source) -> Result<Table, Range<u64>> {
        match self.without(at) {
            Some(table) => table.with(at, vec![source]),
            None => self.with(at, vec![source]),
        }
    }

    /// Returns the first source of the image at `at`.
    pub(super) fn source(&self, at: u64) -> Option<&Source> {
        self.mapped.iter().find(|mapped| mapped.image == at).map(|mapped| &mapped.source)
    }

    /// Returns the sources of all images.
    pub(super) fn sources(&self) -> impl Iterator<Item = &Source> {
        self.mapped.iter().map(|mapped| &mapped.source)
    }

    /// Returns the table with at least this capacity.
    pub(super) fn grown(&self, capacity: u64) -> Table {
        Table { capacity: self.capacity.max(capacity), ..self.clone() }
    }

    /// Returns the ranges of the images.
    fn images(&self) -> impl Iterator<Item = Range<u64>> {
        self.mapped.chunk_by(|one, two| one.image == two.image).filter_map(|parts| {
            let (first, last) = (parts.first()?, parts.last()?);
            Some(first.start..last.end())
        })
    }

    /// Returns the content at byte `at`.
    pub(super) fn at(&self, at: u64) -> Here<'_> {
        let next = self.mapped.partition_point(|mapped| mapped.end() <= at);
        match self.mapped.get(next) {
            Some(mapped) if mapped.start <= at => {
                let inside = at - mapped.start;
                Here::File(&mapped.source, mapped.source.offset + inside, mapped.source.length - inside)
            }
            Some(mapped) => Here::Hole(mapped.start - at),
            None => Here::Hole(self.capacity.saturating_sub(at).max(SECTOR)),
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

    fn look(table: &Table, sector: u64) -> Option<u64> {
        match table.at(sector * SECTOR) {
            Here::File(_, offset, length) => {
                assert!(length > 0 && offset.is_multiple_of(SECTOR));
                Some(offset / SECTOR)
            }
            Here::Hole(length) => {
                assert!(length > 0);
                None
            }
        }
    }

    #[test]
    fn what_lies_somewhere_can_be_replaced_by_something_longer_that_fits() {
        let source = |length: u64| Source {
            file: Arc::new(File::open("/dev/null").unwrap()),
            offset: 0,
            length: length * SECTOR,
            writes: None,
        };
        let table = Table::default().replaced(0, source(4)).unwrap().replaced(8 * SECTOR, source(4)).unwrap();
        let longer = table.replaced(0, source(8)).unwrap();
        assert_eq!(longer.source(0).unwrap().length, 8 * SECTOR);
        assert_eq!(longer.sources().count(), 2);
        assert_eq!(longer.replaced(0, source(9)).unwrap_err(), 8 * SECTOR..12 * SECTOR);
        assert!(longer.source(SECTOR).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

        /// Compares the table with a list of one entry per sector.
        #[test]
        fn a_table_shows_what_was_placed(
            asks in prop::collection::vec((0..SECTORS, prop::collection::vec((0..100u64, 1..8u64), 0..4)), 1..40)
        ) {
            let file = Arc::new(File::open("/dev/null").unwrap());
            let mut table = Table::default();
            let mut model: Model = vec![None; 2 * SECTORS as usize];
            for (at, parts) in asks {
                if parts.is_empty() {
                    let there = model.iter().any(|here| here.is_some_and(|(image, _)| image == at));
                    let without = table.without(at * SECTOR);
                    prop_assert_eq!(without.is_some(), there);
                    table = without.unwrap_or(table);
                    model.iter_mut().filter(|here| here.is_some_and(|(image, _)| image == at)).for_each(|here| *here = None);
                } else {
                    let sources = parts.iter().map(|(offset, length)| Source {
                        file: file.clone(),
                        offset: offset * SECTOR,
                        length: length * SECTOR,
                        writes: None,
                    });
                    let sectors: Vec<u64> = parts.iter().flat_map(|(offset, length)| *offset..offset + length).collect();
                    let range = at as usize..at as usize + sectors.len();
                    let free = model[range.clone()].iter().all(Option::is_none);
                    let with = table.with(at * SECTOR, sources.collect());
                    prop_assert_eq!(with.is_ok(), free);
                    if let Ok(with) = with {
                        prop_assert!(with.capacity() >= table.capacity() && with.capacity() >= range.end as u64 * SECTOR);
                        table = with;
                        model[range].iter_mut().zip(sectors).for_each(|(here, sector)| *here = Some((at, sector)));
                    }
                }
                for (sector, here) in model.iter().enumerate() {
                    prop_assert_eq!(look(&table, sector as u64), here.map(|(_, sector)| sector));
                }
            }
        }
    }
}
