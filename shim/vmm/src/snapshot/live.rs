//! Saves the memory of a running VM, which is paused only while the pages are copied that it has written meanwhile.
//!
//! The private pages of the process are copied first, while the kernel tracks which pages are written. With the VM paused, those are copied
//! again. Pages that are still those of the source file, from which the VM was restored, are copied from there when the VM runs again: that
//! file does not change.
//!
//! Easy to get wrong: a page that was copied may be released later, and is then zero or that of the source file again. And no thread may have
//! pages of guest memory pinned to write to them (O_DIRECT, io_uring): the kernel does not track such writes.

use super::pagemap::{self, PageEntry};
use super::tracker::{PageTracker, Tracking};
use super::working_set::with_positions;
use super::{MEMORY_FILE, SnapshotError, SnapshotFiles};
use crate::machine::find_data;
use crate::pages::{MAX_RUN_BYTES, PAGE, PageSet, is_zero, runs_of_pages};
use crate::virtio::Memory;
use nacelle_base::retry::retry_interrupted;
use nix::fcntl::{FallocateFlags, fallocate};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

/// How much of what is copied while the VM is paused is kept in memory, in bytes. The rest is written to the file meanwhile.
const MAX_KEPT: usize = 16 << 20;

/// What was saved, and how much of it while the VM was paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedPages {
    /// The private pages of the VM.
    pub private: u64,
    /// The part of them that was copied while the VM was paused.
    pub paused: u64,
}

/// A memory whose pages are being copied to a file.
pub(super) struct LiveCopy<'a> {
    memory: &'a Memory,
    files: &'a SnapshotFiles,
    tracker: &'a PageTracker,
    stop: &'a AtomicBool,
    /// The pages whose content is in the file, unless they are dirty.
    copied: PageSet,
    /// `None`: no page was copied.
    _tracking: Option<Tracking>,
}

/// The memory of a paused VM. It is complete in the file after [`CapturedMemory::finish`].
pub(super) struct CapturedMemory<'a> {
    memory: &'a Memory,
    files: &'a SnapshotFiles,
    stop: &'a AtomicBool,
    private: PageSet,
    /// The pages that were copied and are not private any more.
    released: PageSet,
    /// Content with its position in the file, at most [`MAX_KEPT`] bytes.
    kept: Vec<(u64, Vec<u8>)>,
    pages: SavedPages,
}

impl<'a> LiveCopy<'a> {
    /// Gives the file the size of the memory and copies all private pages, while the VM runs; no page if the kernel tracks no writes. Fails with
    /// [`SnapshotError::Stopped`] soon after `stop` has become true, as the later steps do.
    pub fn begin(
        memory: &'a Memory,
        files: &'a SnapshotFiles,
        tracker: &'a PageTracker,
        stop: &'a AtomicBool,
    ) -> Result<LiveCopy<'a>, SnapshotError> {
        let total: u64 = memory.iter().map(GuestMemoryRegion::len).sum();
        files.memory.set_len(0).map_err(files.failed("truncate", MEMORY_FILE))?;
        files.memory.set_len(total).map_err(files.failed("resize", MEMORY_FILE))?;
        // A page that is written from now on is dirty, whether it is copied before or after.
        let tracking = tracker.start().map_err(files.failed("track writes for", MEMORY_FILE))?;
        let copied = PageSet::new(total);
        let mut copy = LiveCopy { memory, files, tracker, stop, copied, _tracking: tracking };
        if copy._tracking.is_some() {
            let mut private = copy.copied.clone();
            copy.visit_pages(|page, entry| {
                if entry.is_private() {
                    private.insert(page);
                }
            })?;
            copy.read_pages(&private, |at, bytes| {
                let mut data = runs_of_pages(bytes, |_, page| !is_zero(page));
                data.try_for_each(|(start, run)| files.memory.write_all_at(run, at + start as u64))
            })?;
            copy.copied = private;
        }
        Ok(copy)
    }

    /// Copies what has changed since, from a VM that is paused.
    pub fn capture(self) -> Result<CapturedMemory<'a>, SnapshotError> {
        let mut private = PageSet::new(self.copied.bytes());
        let mut changed = private.clone();
        self.visit_pages(|page, entry| {
            if entry.is_private() {
                private.insert(page);
                // The page of zeros, which is there after a released page is read, is private and never dirty, but not the process's own.
                if entry.is_soft_dirty() || !entry.is_own() || !self.copied.contains(page) {
                    changed.insert(page);
                }
            }
        })?;
        let (mut kept, mut kept_bytes) = (Vec::new(), 0);
        self.read_pages(&changed, |at, bytes| {
            // In the file there are zeros already, unless the page was copied before.
            let page = |start: usize| (at + start as u64) / PAGE as u64;
            let needed = runs_of_pages(bytes, |start, content| !is_zero(content) || self.copied.contains(page(start)));
            for (start, run) in needed {
                if kept_bytes + run.len() > MAX_KEPT {
                    self.files.memory.write_all_at(run, at + start as u64)?;
                } else {
                    kept_bytes += run.len();
                    kept.push((at + start as u64, run.to_vec()));
                }
            }
            Ok(())
        })?;
        let pages = SavedPages { private: private.count(), paused: changed.count() };
        let LiveCopy { memory, files, stop, copied: mut released, .. } = self;
        released.remove_all(&private);
        Ok(CapturedMemory { memory, files, stop, private, released, kept, pages })
    }

    /// Calls `visit` with the number of each page in the file, and its entry.
    fn visit_pages(&self, mut visit: impl FnMut(u64, PageEntry)) -> Result<(), SnapshotError> {
        let mut page = 0;
        for region in self.memory.iter() {
            check_stop(self.stop)?;
            let pages = (region.len() / PAGE as u64) as usize;
            let read = pagemap::read(&self.tracker.pagemap, region.as_ptr().addr(), pages, |entry| {
                visit(page, entry);
                page += 1;
                true
            });
            read.map_err(self.files.failed("find the pages for", MEMORY_FILE))?;
        }
        Ok(())
    }

    /// Calls `write` with the positions of these pages in the file and their content, at most [`MAX_RUN_BYTES`] at a time.
    fn read_pages(
        &self,
        pages: &PageSet,
        mut write: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), SnapshotError> {
        let mut buffer = vec![0; MAX_RUN_BYTES];
        for (region, at) in with_positions(self.memory) {
            for run in pages.runs(at..at + region.len()) {
                check_stop(self.stop)?;
                let part = part_of(&mut buffer, run.end - run.start);
                // The copy is volatile: the guest may write meanwhile, and then the page is dirty.
                let slice = region.get_slice(MemoryRegionAddress(run.start - at), part.len());
                let copied = slice.map_err(io::Error::other).map(|slice| slice.copy_to(part));
                let written = copied.and_then(|_length| write(run.start, part));
                written.map_err(self.files.failed("write", MEMORY_FILE))?;
            }
        }
        Ok(())
    }
}

impl CapturedMemory<'_> {
    /// Completes the file and flushes it. The VM may run meanwhile.
    pub fn finish(self) -> Result<SavedPages, SnapshotError> {
        let files = self.files;
        for (at, bytes) in &self.kept {
            check_stop(self.stop)?;
            files.memory.write_all_at(bytes, *at).map_err(files.failed("write", MEMORY_FILE))?;
        }
        for run in self.released.runs(0..self.released.bytes()) {
            check_stop(self.stop)?;
            let (start, length) = (run.start as libc::off_t, (run.end - run.start) as libc::off_t);
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let punched = retry_interrupted(|| fallocate(&files.memory, flags, start, length));
            punched.map_err(|error| files.failed("clear pages of", MEMORY_FILE)(error.into()))?;
        }
        for (region, at) in with_positions(self.memory) {
            self.copy_source(region, at)?;
        }
        files.memory.sync_all().map_err(files.failed("flush", MEMORY_FILE))?;
        Ok(self.pages)
    }

    /// Copies the pages of the source file that the VM has in a region, which is at this position of the file.
    fn copy_source(&self, region: &GuestRegionMmap<()>, at: u64) -> Result<(), SnapshotError> {
        let Some(source) = region.file_offset() else { return Ok(()) };
        let (file, files) = (source.file(), self.files);
        let length = file.metadata().map_err(files.failed("find the source of", MEMORY_FILE))?.len();
        let end = (source.start() + region.len()).min(length).max(source.start());
        let mut buffer = vec![0; MAX_RUN_BYTES];
        for data in find_data(file, source.start()..end) {
            let position = |offset: u64| offset - source.start() + at;
            for run in self.private.gaps(position(data.start)..position(data.end)) {
                check_stop(self.stop)?;
                let part = part_of(&mut buffer, run.end - run.start);
                let read = file.read_exact_at(part, run.start - at + source.start());
                read.map_err(files.failed("read the source of", MEMORY_FILE))?;
                let mut data = runs_of_pages(part, |_, page| !is_zero(page));
                let written =
                    data.try_for_each(|(start, bytes)| files.memory.write_all_at(bytes, run.start + start as u64));
                written.map_err(files.failed("write", MEMORY_FILE))?;
            }
        }
        Ok(())
    }
}

/// Returns the beginning of a buffer that is as long as the longest run.
fn part_of(buffer: &mut [u8], length: u64) -> &mut [u8] {
    buffer.split_at_mut(length as usize).0
}

fn check_stop(stop: &AtomicBool) -> Result<(), SnapshotError> {
    if stop.load(Ordering::Relaxed) { Err(SnapshotError::Stopped) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
