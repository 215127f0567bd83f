//! Records which pages a restored VM touches before it does anything for its user, so that later VMs of the same snapshot get these pages
//! before they run, and single ones where they need few.
//!
//! The first write to a page of the file that was read before costs three faults: one that maps it to be read, one that copies it, and
//! one that maps the copy. The first access to memory that had no data costs 2 MiB.

use super::pagemap;
use crate::machine::{HUGE_PAGE, find_data};
use crate::pages::PAGE;
use crate::sys;
use crate::virtio::Memory;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::ops::Range;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

/// Pages of a snapshot's memory that follow each other: the number of the first in the file `memory`, and how many they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRun(u32, u32);

impl PageRun {
    /// Returns the position in the file, in bytes.
    fn bytes(self) -> Range<u64> {
        let start = u64::from(self.0) * PAGE as u64;
        start..start + u64::from(self.1) * PAGE as u64
    }
}

/// The pages that a restored VM touches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSet {
    /// Pages with saved data, or beside it, that the VM has written.
    written: Vec<PageRun>,
    /// Pages of memory without data that the VM has touched.
    new: Vec<PageRun>,
    /// Pages of memory without data that it touches later. They get no memory before, and no huge page then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    later: Vec<PageRun>,
}

impl WorkingSet {
    /// Returns whether it has no page.
    pub fn is_empty(&self) -> bool {
        self.written.is_empty() && self.new.is_empty()
    }

    /// Checks that the pages are those of a memory of so many bytes.
    pub(super) fn check(&self, memory_bytes: u64) -> Result<(), &'static str> {
        for runs in [&self.written, &self.new, &self.later] {
            let mut last = 0;
            for run in runs {
                let Range { start, end } = run.bytes();
                if start < last || end <= start || end > memory_bytes {
                    return Err("the pages of the working set overlap, or are not in the memory");
                }
                last = end;
            }
        }
        Ok(())
    }

    /// Finds the pages that this process has for itself in a memory that was restored from `file`. Memory without data must not be in
    /// huge pages, because all of a huge page is there.
    pub(super) fn find(memory: &Memory, file: &File, pagemap: &File) -> io::Result<WorkingSet> {
        let saved = file.metadata()?.len();
        let mut found = WorkingSet::default();
        for (region, at) in with_positions(memory) {
            let end = at.saturating_add(region.len()).min(saved).max(at);
            let mut start = at;
            for data in find_data(file, at..end) {
                collect_own(region, at, start..data.start, pagemap, &mut found.new)?;
                start = data.end;
                collect_own(region, at, data, pagemap, &mut found.written)?;
            }
            collect_own(region, at, start..end, pagemap, &mut found.new)?;
        }
        Ok(found)
    }

    /// Adds the memory without data that the VM has touched until a later time, as far as it is in other huge pages.
    pub(super) fn extend(&mut self, found: WorkingSet) {
        let of_run = |run: &PageRun| units_of(&[run.bytes()]);
        let known = units_of(&self.new.iter().map(|run| run.bytes()).collect::<Vec<_>>());
        let is_known = |unit: &Range<u64>| known.iter().any(|known| known.start <= unit.start && unit.end <= known.end);
        self.later = found.new.into_iter().filter(|run| !of_run(run).iter().all(is_known)).collect();
    }

    /// Gives a memory that was restored from the same snapshot pages of its own for the working set. What fails here costs time or memory
    /// only.
    pub(super) fn populate(&self, memory: &Memory) {
        if let Err(error) = self.try_populate(memory) {
            // EINVAL: the host runs Linux before 5.14, which cannot populate memory.
            tracing::debug!(%error, "the pages that the guest will touch are not populated");
        }
    }

    fn try_populate(&self, memory: &Memory) -> io::Result<()> {
        for (region, at) in with_positions(memory) {
            for runs in [&self.new, &self.later] {
                for Range { start, end } in units_of(&parts_of(runs, region, at)) {
                    sys::use_small_pages(region, start, end.min(region.len()) - start)?;
                }
            }
        }
        for (region, at) in with_positions(memory) {
            for runs in [&self.new, &self.written] {
                for Range { start, end } in parts_of(runs, region, at) {
                    sys::populate(region, start, end - start)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the parts of the runs that lie in a region, in bytes from its start. `at` is its position in the file.
fn parts_of(runs: &[PageRun], region: &GuestRegionMmap<()>, at: u64) -> Vec<Range<u64>> {
    let end = at.saturating_add(region.len());
    let part = |run: &PageRun| {
        let bytes = run.bytes();
        let (from, to) = (bytes.start.max(at), bytes.end.min(end));
        (from < to).then(|| from - at..to - at)
    };
    runs.iter().filter_map(part).collect()
}

/// Adds the pages of `part`, a part of the file, that this process has for itself. `at` is the region's position in the file.
fn collect_own(
    region: &GuestRegionMmap<()>,
    at: u64,
    part: Range<u64>,
    pagemap: &File,
    runs: &mut Vec<PageRun>,
) -> io::Result<()> {
    let number = |at: u64| u32::try_from(at / PAGE as u64).map_err(io::Error::other);
    let (mut page, pages) = (number(part.start)?, number(part.end.saturating_sub(part.start))?);
    let address = region.as_ptr().addr().saturating_add((part.start - at) as usize);
    pagemap::read(pagemap, address, pages as usize, |entry| {
        if entry.is_own() {
            match runs.last_mut() {
                Some(PageRun(first, pages)) if *first + *pages == page => *pages += 1,
                _ => runs.push(PageRun(page, 1)),
            }
        }
        page += 1;
        true
    })
}

/// Returns the units of huge pages, from the start of a region, that have any of the parts, which ascend.
fn units_of(parts: &[Range<u64>]) -> Vec<Range<u64>> {
    let huge = HUGE_PAGE as u64;
    let mut units: Vec<Range<u64>> = Vec::new();
    for part in parts {
        let (start, end) = (part.start / huge * huge, part.end.next_multiple_of(huge));
        match units.last_mut() {
            Some(last) if last.end >= start => last.end = end,
            _ => units.push(start..end),
        }
    }
    units
}

/// Returns each region with its position in the file.
pub(super) fn with_positions(memory: &Memory) -> impl Iterator<Item = (&GuestRegionMmap<()>, u64)> {
    memory.iter().scan(0_u64, |next, region| {
        let at = *next;
        *next = next.saturating_add(region.len());
        Some((region, at))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{Bytes, FileOffset, GuestAddress};

    const MIB: u64 = 1 << 20;

    /// Maps 16 MiB of the file in two regions.
    fn map(file: &File) -> Memory {
        let region = |at: u64, address: u64| {
            let mapping = MmapRegionBuilder::new(8 << 20)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_PRIVATE)
                .with_file_offset(FileOffset::new(file.try_clone().unwrap(), at));
            GuestRegionMmap::new(mapping.build().unwrap(), GuestAddress(address)).unwrap()
        };
        Memory::from_regions(vec![region(0, 0), region(8 * MIB, 1 << 32)]).unwrap()
    }

    #[test]
    fn pages_that_one_vm_has_touched_are_populated_for_the_next() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * MIB).unwrap();
        for at in [0, 6, 8, 14] {
            file.write_all_at(&vec![7; 2 << 20], at * MIB).unwrap();
        }
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let find = |memory: &Memory| WorkingSet::find(memory, &file, &pagemap).unwrap();
        let (one, two) = (map(&file), map(&file));
        if !can_populate(&map(&file)) {
            return println!("skipped: this kernel cannot populate memory");
        }
        let mut all = vec![0; 8 << 20];
        one.read_slice(&mut all, GuestAddress(0)).unwrap();
        assert!(find(&one).is_empty(), "what is only read is shared");
        // Two pages that follow each other, the last one of the first region, the first one of the second, and the last one of all.
        for at in [0x1000, 0x2fff, 8 * MIB - 1, 1 << 32, (1 << 32) + 8 * MIB - 1] {
            one.write_obj(1u8, GuestAddress(at)).unwrap();
        }
        // Pages without data.
        for at in [2 * MIB, 4 * MIB - 1, (1 << 32) + 5 * MIB] {
            one.write_obj(1u8, GuestAddress(at)).unwrap();
        }
        let found = find(&one);
        assert_eq!(found.written, [PageRun(1, 2), PageRun(2047, 2), PageRun(4095, 1)]);
        assert_eq!(found.new, [PageRun(512, 1), PageRun(1023, 1), PageRun(3328, 1)]);
        found.check(16 * MIB).unwrap();
        found.populate(&two);
        assert_eq!(find(&two), found);
        assert_eq!(two.read_obj::<u8>(GuestAddress(0x1000)).unwrap(), 7, "a copy of what was saved");
    }

    #[test]
    fn few_pages_of_memory_without_data_stay_few() {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 16 << 20)]).unwrap();
        if !can_populate(&memory) || !Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return println!("skipped: this kernel cannot populate memory, or has no huge pages");
        }
        let start = memory.iter().next().unwrap().as_ptr().addr() as u64;
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * MIB).unwrap();
        let find = || WorkingSet::find(&memory, &file, &File::open("/proc/self/pagemap").unwrap()).unwrap();
        // Reading maps a page of zeros, which all memory shares.
        memory.read_obj::<u8>(GuestAddress(9 * MIB)).unwrap();
        let before = find();
        let set = WorkingSet { new: vec![PageRun(1000, 30)], later: vec![PageRun(4000, 1)], ..WorkingSet::default() };
        set.populate(&memory);
        let found = find();
        assert!(found.new.contains(&PageRun(1000, 30)), "{found:?}");
        assert!(!found.new.iter().any(|run| run.0 >= 9 * 256), "{before:?} {found:?}");
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{:x}-", start + 14 * MIB)));
        let flags = lines.find(|line| line.starts_with("VmFlags")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "nh"), "{flags}");
    }

    /// Linux can populate memory since 5.14.
    fn can_populate(memory: &Memory) -> bool {
        sys::populate(memory.iter().next().unwrap(), 0, PAGE as u64).is_ok()
    }

    #[test]
    fn what_is_touched_later_is_recorded_once() {
        let mut set = WorkingSet { new: vec![PageRun(1000, 30), PageRun(1500, 40)], ..WorkingSet::default() };
        let new =
            [(1000, 30), (1100, 2), (1500, 40), (2000, 10), (2040, 20)].map(|(first, pages)| PageRun(first, pages));
        set.extend(WorkingSet { new: new.into(), written: vec![PageRun(7, 1)], ..WorkingSet::default() });
        assert_eq!(set.new, [PageRun(1000, 30), PageRun(1500, 40)]);
        assert_eq!(set.later, [PageRun(2040, 20)], "the pages from 512 to 2047 are in huge pages of the first");
        assert!(set.written.is_empty());
    }

    #[test]
    fn huge_pages_are_given_up_where_few_pages_are_needed() {
        assert_eq!(units_of(&[]), []);
        let mib = |start: u64, end: u64| start * MIB..end * MIB;
        let parts = [0x1000..0x2000, mib(2, 2).start + 5..mib(3, 3).start, mib(7, 9), mib(12, 14)];
        assert_eq!(units_of(&parts), [mib(0, 4), mib(6, 10), mib(12, 14)]);
    }

    #[test]
    fn pages_must_ascend_and_lie_in_the_memory() {
        let check = |runs: &[(u32, u32)]| {
            let runs: Vec<_> = runs.iter().map(|(first, pages)| PageRun(*first, *pages)).collect();
            let checks = [(runs.clone(), Vec::new()), (Vec::new(), runs)]
                .map(|(written, new)| WorkingSet { written, new, later: Vec::new() }.check(16 << 20).is_ok());
            assert_eq!(checks[0], checks[1]);
            checks[0]
        };
        assert!(check(&[]) && check(&[(0, 1), (1, 2), (4000, 96)]));
        for bad in [&[(0, 0)][..], &[(4000, 97)], &[(u32::MAX, u32::MAX)], &[(1, 2), (2, 1)], &[(5, 1), (0, 1)]] {
            assert!(!check(bad), "{bad:?}");
        }
    }
}
