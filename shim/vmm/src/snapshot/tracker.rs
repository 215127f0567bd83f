//! Tracks which pages of this process are written (kernel's admin-guide/mm/soft-dirty). The marks belong to the process: only one copy of
//! memory at a time uses them.

use super::pagemap;
use crate::pages::PAGE;
use crate::virtio::Memory;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

const CLEAR_REFS: &str = "/proc/self/clear_refs";
/// Clears the soft-dirty bits of all pages of a process when it is written to `clear_refs`.
const CLEAR_SOFT_DIRTY: &[u8] = b"4";
/// Held from the clearing of the bits until they have been read.
static SOFT_DIRTY: Mutex<()> = Mutex::new(());

/// Access to what the kernel knows of the pages of this process. A process that enters a jail without /proc opens it before; then its VM does
/// not exist yet, which would pay for the clearing of the bits with a fault for each page.
#[derive(Debug)]
pub struct PageTracker {
    pub(super) pagemap: File,
    /// `None`: no writes are tracked.
    clear_refs: Option<File>,
}

/// The time from the clearing of the bits until they have been read.
pub(super) type Tracking = MutexGuard<'static, ()>;

impl PageTracker {
    /// Opens the files of this process in /proc, and finds out whether the kernel tracks writes (CONFIG_MEM_SOFT_DIRTY).
    pub fn open() -> io::Result<PageTracker> {
        let pagemap = pagemap::open()?;
        let tracker = PageTracker { pagemap, clear_refs: OpenOptions::new().write(true).open(CLEAR_REFS).ok() };
        // Another thread may write to a huge page with the page of the probe.
        match (0..3).any(|_| tracker.probe().unwrap_or(false)) {
            true => Ok(tracker),
            false => Ok(PageTracker { clear_refs: None, ..tracker }),
        }
    }

    /// Returns whether the kernel tracks which pages are written. Otherwise all private pages are copied while a VM is paused.
    pub fn tracks_writes(&self) -> bool {
        self.clear_refs.is_some()
    }

    /// Clears the bits of all pages; `None` if no writes are tracked. Waits for another copy of memory in this process.
    pub(super) fn start(&self) -> io::Result<Option<Tracking>> {
        let Some(clear_refs) = &self.clear_refs else { return Ok(None) };
        let tracking = SOFT_DIRTY.lock().unwrap_or_else(PoisonError::into_inner);
        clear_refs.write_all_at(CLEAR_SOFT_DIRTY, 0)?;
        Ok(Some(tracking))
    }

    /// Tries whether a page loses its bit, and gets it by a write.
    fn probe(&self) -> io::Result<bool> {
        let page = Memory::from_ranges(&[(GuestAddress(0), PAGE)]).map_err(io::Error::other)?;
        let address = page.get_host_address(GuestAddress(0)).map_err(io::Error::other)?.addr();
        let write = |byte: u8| page.write_obj(byte, GuestAddress(0)).map_err(io::Error::other);
        let is_dirty = || {
            let mut dirty = false;
            pagemap::read(&self.pagemap, address, 1, |entry| {
                dirty = entry.is_soft_dirty();
                false
            })?;
            Ok::<bool, io::Error>(dirty)
        };
        write(1)?;
        let _tracking = self.start()?;
        let before = is_dirty()?;
        write(2)?;
        Ok(!before && is_dirty()?)
    }

    /// Returns a tracker of files with the entries of a test.
    #[cfg(test)]
    pub(super) fn of_files(pagemap: File, clear_refs: Option<File>) -> PageTracker {
        PageTracker { pagemap, clear_refs }
    }
}
