//! Owns: which bytes of a read-only slot come from where. Pure: no I/O, no locks; a change makes a new table.

use super::SECTOR;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// The capacity grows in steps of this many bytes.
const STEP: u64 = 1 << 20;

/// No slot is larger than this many bytes.
pub(super) const MAX_CAPACITY: u64 = 1 << 60;

/// A piece of a file, opened.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub file: Arc<File>,
    pub offset: u64,
    pub length: u64,
}

#[derive(Clone, Debug)]
struct Mapped {
    start: u64,
    source: Source,
    /// Where the image of which this is a part was placed.
    image: u64,
}

impl Mapped {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.source.length)
    }
}

/// What lies at some byte of a slot, up to the next change.
#[derive(Debug)]
pub(super) enum Here<'t> {
    /// Bytes of a file, from this offset, so many.
    File(&'t File, u64, u64),
    /// Zeros, so many.
    Hole(u64),
}

/// The map of a read-only slot.
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

    /// The table with an image placed at `at`; the error is the range that is in the way. The caller has checked
    /// that everything is aligned and ends before [`MAX_CAPACITY`].
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

    /// The table without the image placed at `at`; `None` if there is none.
    pub(super) fn without(&self, at: u64) -> Option<Table> {
        let mut table = self.clone();
        table.mapped.retain(|mapped| mapped.image != at);
        (table.mapped.len() < self.mapped.len()).then_some(table)
    }

    /// The ranges that images take.
    fn images(&self) -> impl Iterator<Item = Range<u64>> {
        self.mapped.chunk_by(|one, two| one.image == two.image).filter_map(|parts| {
            let (first, last) = (parts.first()?, parts.last()?);
            Some(first.start..last.end())
        })
    }

    /// What lies at byte `at`.
    pub(super) fn at(&self, at: u64) -> Here<'_> {
        let next = self.mapped.partition_point(|mapped| mapped.end() <= at);
        match self.mapped.get(next) {
            Some(mapped) if mapped.start <= at => {
                let inside = at - mapped.start;
                Here::File(&mapped.source.file, mapped.source.offset + inside, mapped.source.length - inside)
            }
            Some(mapped) => Here::Hole(mapped.start - at),
            None => Here::Hole(self.capacity.saturating_sub(at).max(SECTOR)),
        }
    }
}
