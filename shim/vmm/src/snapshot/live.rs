//! Saves the memory of a running VM, which is paused only while the pages are copied that it has written meanwhile.
//!
//! The pages that the process has for itself are copied first, while the kernel notes which pages are written
//! (kernel's admin-guide/mm/soft-dirty). With the VM paused, those are copied again. What the VM shares with the file that it was
//! restored from is copied from that file when the VM runs again, because that file does not change.
//!
//! Easy to get wrong: a page that was copied may belong to the file again later, because its memory was released.

use super::memory::{is_zero, runs_of_pages};
use super::page_set::PageSet;
use super::pagemap::{self, PAGE, PageEntry};
use super::working_set::with_positions;
use super::{MEMORY_FILE, SnapshotError, SnapshotFiles};
use crate::machine::find_data;
use crate::virtio::Memory;
use nacelle_base::retry::retry_interrupted;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

/// The unit of copying in bytes.
const CHUNK: usize = 1 << 20;
/// How much is kept in memory of what is copied while the VM is paused, in bytes. The rest is written to the file meanwhile.
const MAX_KEPT: usize = 16 << 20;
/// What clears the soft-dirty bits of all pages of a process when it is written to /proc/PID/clear_refs.
const CLEAR_SOFT_DIRTY: &[u8] = b"4";

/// Access to what the kernel knows of the pages of this process. A process that enters a jail without /proc opens it before.
#[derive(Debug)]
pub struct PageTracker {
    pagemap: File,
    /// Without it, or without the kernel's CONFIG_MEM_SOFT_DIRTY, no writes are noted.
    clear_refs: Option<File>,
}

impl PageTracker {
    /// Opens the files of this process in /proc, and finds out whether the kernel notes writes.
    pub fn open() -> io::Result<PageTracker> {
        let pagemap = File::open(super::PAGEMAP)?;
        let clear_refs = OpenOptions::new().write(true).open("/proc/self/clear_refs").ok();
        let clear_refs = clear_refs.filter(|file| notes_writes(&pagemap, file).unwrap_or(false));
        Ok(PageTracker { pagemap, clear_refs })
    }

    /// Returns whether the kernel notes which pages are written. Otherwise all pages are copied while a VM is paused.
    pub fn notes_writes(&self) -> bool {
        self.clear_refs.is_some()
    }

    /// Returns a tracker of files with the entries of a test.
    #[cfg(test)]
    pub(super) fn of_files(pagemap: File, clear_refs: Option<File>) -> PageTracker {
        PageTracker { pagemap, clear_refs }
    }
}

/// Tries whether a page of this function loses its soft-dirty bit, and gets it by a write.
fn notes_writes(pagemap: &File, clear_refs: &File) -> io::Result<bool> {
    let mut pages = vec![1_u8; 3 * PAGE];
    let start = pages.as_ptr().addr().next_multiple_of(PAGE);
    let is_dirty = || {
        let mut dirty = false;
        pagemap::read(pagemap, start, 1, |entry| {
            dirty = entry.is_soft_dirty();
            false
        })?;
        Ok::<bool, io::Error>(dirty)
    };
    clear_refs.write_all_at(CLEAR_SOFT_DIRTY, 0)?;
    let before = is_dirty()?;
    let offset = start - pages.as_ptr().addr();
    std::hint::black_box(&mut pages).get_mut(offset).into_iter().for_each(|byte| *byte = 2);
    Ok(!before && is_dirty()?)
}

/// What was saved, and how much of it while the VM was paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedPages {
    /// The pages that the VM had for itself.
    pub own: u64,
    /// The part of them that was copied while the VM was paused.
    pub paused: u64,
}

/// A memory whose pages are being copied to a file.
pub(super) struct LiveCopy<'a> {
    memory: &'a Memory,
    files: &'a SnapshotFiles,
    tracker: &'a PageTracker,
    stop: &'a AtomicBool,
    /// The pages that were copied, or are zero in the file as in the memory, unless they have been written since.
    copied: PageSet,
}

/// The memory of a paused VM. It is complete in the file when [`CapturedMemory::finish`] has written the rest.
pub(super) struct CapturedMemory<'a> {
    copy: LiveCopy<'a>,
    own: PageSet,
    kept: Vec<(u64, Vec<u8>)>,
    pages: SavedPages,
}

impl<'a> LiveCopy<'a> {
    /// Copies all pages that the process has for itself, while the VM runs. Does nothing if the kernel notes no writes. Fails with
    /// [`SnapshotError::Stopped`] soon after `stop` has become true, as all other functions here.
    pub fn begin(
        memory: &'a Memory,
        files: &'a SnapshotFiles,
        tracker: &'a PageTracker,
        stop: &'a AtomicBool,
    ) -> Result<LiveCopy<'a>, SnapshotError> {
        let total: u64 = memory.iter().map(GuestMemoryRegion::len).sum();
        files.memory.set_len(0).map_err(files.failed("truncate", MEMORY_FILE))?;
        files.memory.set_len(total).map_err(files.failed("resize", MEMORY_FILE))?;
        let mut copy = LiveCopy { memory, files, tracker, stop, copied: PageSet::new(total) };
        if let Some(clear_refs) = &tracker.clear_refs {
            // A page that is written from now on is dirty, whether it was copied before or after.
            clear_refs.write_all_at(CLEAR_SOFT_DIRTY, 0).map_err(files.failed("note writes for", MEMORY_FILE))?;
            let own = copy.find_pages(PageEntry::is_private)?;
            copy.read_pages(&own, |at, bytes| {
                let data = runs_of_pages(bytes, |_, page| !is_zero(page));
                data.map(|(start, run)| (at + start as u64, run))
                    .try_for_each(|(at, run)| files.memory.write_all_at(run, at))
            })?;
            copy.copied = own;
        }
        Ok(copy)
    }

    /// Copies what has changed since, from a VM that is paused.
    pub fn capture(mut self) -> Result<CapturedMemory<'a>, SnapshotError> {
        let mut own = PageSet::new(self.copied.bytes());
        let mut changed = own.clone();
        self.see_pages(|page, entry| {
            if entry.is_private() {
                own.insert(page);
                if entry.is_soft_dirty() || !self.copied.has(page) {
                    changed.insert(page);
                }
            }
        })?;
        let (mut kept, mut kept_bytes) = (Vec::new(), 0);
        self.read_pages(&changed, |at, bytes| {
            // In the file there are zeros already, unless the page was copied before.
            let page = |start: usize| (at + start as u64) / PAGE as u64;
            let needed = runs_of_pages(bytes, |start, content| !is_zero(content) || self.copied.has(page(start)));
            for (start, run) in needed {
                kept_bytes += run.len();
                if kept_bytes > MAX_KEPT {
                    self.files.memory.write_all_at(run, at + start as u64)?;
                } else {
                    kept.push((at + start as u64, run.to_vec()));
                }
            }
            Ok(())
        })?;
        let pages = SavedPages { own: own.count(), paused: changed.count() };
        self.copied.add_all(&changed);
        Ok(CapturedMemory { copy: self, own, kept, pages })
    }

    /// Returns the pages whose entries `is_wanted`.
    fn find_pages(&self, is_wanted: impl Fn(&PageEntry) -> bool) -> Result<PageSet, SnapshotError> {
        let mut found = PageSet::new(self.copied.bytes());
        self.see_pages(|page, entry| {
            if is_wanted(&entry) {
                found.insert(page);
            }
        })?;
        Ok(found)
    }

    /// Calls `see` with the number of each page in the file, and its entry.
    fn see_pages(&self, mut see: impl FnMut(u64, PageEntry)) -> Result<(), SnapshotError> {
        let mut page = 0;
        for region in self.memory.iter() {
            let read = pagemap::read(&self.tracker.pagemap, region.as_ptr().addr(), pages_of(region), |entry| {
                see(page, entry);
                page += 1;
                true
            });
            read.map_err(self.files.failed("find the pages for", MEMORY_FILE))?;
        }
        Ok(())
    }

    /// Calls `write` with the positions of these pages in the file and their content, at most [`CHUNK`] bytes at a time.
    fn read_pages(
        &self,
        pages: &PageSet,
        mut write: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), SnapshotError> {
        let mut buffer = vec![0; CHUNK];
        for (region, at) in with_positions(self.memory) {
            for run in pages.runs(at..at + region.len()) {
                check_stop(self.stop)?;
                let part = buffer.get_mut(..(run.end - run.start) as usize).unwrap_or_default();
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

fn check_stop(stop: &AtomicBool) -> Result<(), SnapshotError> {
    if stop.load(Ordering::Relaxed) { Err(SnapshotError::Stopped) } else { Ok(()) }
}

impl CapturedMemory<'_> {
    /// Completes the file. The VM may run meanwhile.
    pub fn finish(self) -> Result<SavedPages, SnapshotError> {
        let LiveCopy { memory, files, stop, copied: mut released, .. } = self.copy;
        for (at, bytes) in self.kept {
            files.memory.write_all_at(&bytes, at).map_err(files.failed("write", MEMORY_FILE))?;
        }
        // What was copied and has been released since is zero, or that of the file again.
        released.remove_all(&self.own);
        for run in released.runs(0..released.bytes()) {
            let (start, length) = (run.start as libc::off_t, (run.end - run.start) as libc::off_t);
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let punched = retry_interrupted(|| fallocate(&files.memory, flags, start, length));
            punched.map_err(|error| files.failed("clear pages of", MEMORY_FILE)(error.into()))?;
        }
        let mut buffer = vec![0; CHUNK];
        for (region, at) in with_positions(memory) {
            let Some(shared) = region.file_offset() else { continue };
            let file = shared.file();
            let length = file.metadata().map_err(files.failed("find what is shared by", MEMORY_FILE))?.len();
            let end = (shared.start() + region.len()).min(length).max(shared.start());
            for data in find_data(file, shared.start()..end) {
                let position = |offset: u64| offset - shared.start() + at;
                for run in self.own.gaps(position(data.start)..position(data.end)) {
                    check_stop(stop)?;
                    let part = buffer.get_mut(..(run.end - run.start) as usize).unwrap_or_default();
                    let read = file.read_exact_at(part, run.start - at + shared.start());
                    read.map_err(files.failed("read what is shared by", MEMORY_FILE))?;
                    let mut data = runs_of_pages(part, |_, page| !is_zero(page));
                    let written =
                        data.try_for_each(|(start, bytes)| files.memory.write_all_at(bytes, run.start + start as u64));
                    written.map_err(files.failed("write", MEMORY_FILE))?;
                }
            }
        }
        files.memory.sync_all().map_err(files.failed("flush", MEMORY_FILE))?;
        Ok(self.pages)
    }
}

fn pages_of(region: &GuestRegionMmap<()>) -> usize {
    (region.len() / PAGE as u64) as usize
}

#[cfg(test)]
mod tests;
