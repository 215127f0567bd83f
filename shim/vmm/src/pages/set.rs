//! A set of pages of a VM's memory or of a disk.

use super::PAGE;
use std::ops::Range;

/// The longest run that is returned, in bytes.
pub const MAX_RUN_BYTES: usize = 1 << 20;
const MAX_RUN: u64 = (MAX_RUN_BYTES / PAGE) as u64;

/// A set of pages, by their numbers in a file. One bit for each page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    /// Returns an empty set of pages of a file with so many bytes, the last of which may be shorter.
    pub fn new(bytes: u64) -> PageSet {
        let pages = bytes.div_ceil(PAGE as u64);
        PageSet { words: vec![0; pages.div_ceil(64) as usize], pages }
    }

    /// Returns the size of all pages in bytes.
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE as u64
    }

    pub fn insert(&mut self, page: u64) {
        let word = self.words.get_mut((page / 64) as usize).filter(|_word| page < self.pages);
        if let Some(word) = word {
            *word |= 1 << (page % 64);
        }
    }

    /// Adds the pages of a range of bytes.
    pub fn insert_all(&mut self, range: Range<u64>) {
        (range.start / PAGE as u64..range.end.div_ceil(PAGE as u64)).for_each(|page| self.insert(page));
    }

    pub fn contains(&self, page: u64) -> bool {
        self.words.get((page / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    pub fn remove_all(&mut self, other: &PageSet) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= !other);
    }

    /// Returns the runs of pages of the set within a part of the file, in bytes, each at most [`MAX_RUN_BYTES`] long.
    pub fn runs(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.runs_of(within, true)
    }

    /// Returns the runs of pages that the set does not have, as [`runs`](PageSet::runs) does.
    pub fn gaps(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.runs_of(within, false)
    }

    /// Returns the first of the [`gaps`](PageSet::gaps).
    pub fn first_gap(&self, within: Range<u64>) -> Option<Range<u64>> {
        self.gaps(within).next()
    }

    fn runs_of(&self, within: Range<u64>, wanted: bool) -> impl Iterator<Item = Range<u64>> {
        let bytes = PAGE as u64;
        let (mut page, end) = (within.start / bytes, (within.end / bytes).min(self.pages));
        std::iter::from_fn(move || {
            page = self.find_next(page, end, wanted)?;
            let start = page;
            page = self.find_next(page, end.min(start + MAX_RUN), !wanted).unwrap_or(end.min(start + MAX_RUN));
            Some(start * bytes..page * bytes)
        })
    }

    /// Returns the first page from `page` on, before `end`, that is in the set, or that is not.
    fn find_next(&self, mut page: u64, end: u64, wanted: bool) -> Option<u64> {
        while page < end {
            let word = self.words.get((page / 64) as usize).copied()?;
            let word = (if wanted { word } else { !word }) >> (page % 64);
            if word != 0 {
                return Some(page + u64::from(word.trailing_zeros())).filter(|page| *page < end);
            }
            page = (page / 64 + 1) * 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn runs_and_gaps_are_those_of_the_pages(
            members in proptest::collection::btree_set(0_u64..1500, 0..900),
            start in 0_u64..1500,
            length in 0_u64..1500,
        ) {
            let mut set = PageSet::new(1400 * PAGE as u64);
            members.iter().for_each(|page| set.insert(*page));
            let within = start..(start + length).min(1400).max(start);
            let bytes = within.start * PAGE as u64..within.end * PAGE as u64;
            let pages = |runs: Vec<Range<u64>>| {
                assert!(runs.iter().all(|run| run.start < run.end && run.end - run.start <= MAX_RUN * PAGE as u64));
                runs.into_iter().flat_map(|run| run.start / PAGE as u64..run.end / PAGE as u64).collect::<Vec<u64>>()
            };
            let (inside, outside): (Vec<u64>, Vec<u64>) = within.partition(|page| members.contains(page));
            prop_assert_eq!(pages(set.runs(bytes.clone()).collect()), inside);
            prop_assert_eq!(pages(set.gaps(bytes).collect()), outside);
            let kept: BTreeSet<u64> = members.iter().copied().filter(|page| *page < 1400).collect();
            prop_assert_eq!(set.count(), kept.len() as u64);
        }
    }
}
