//! Copies a writable disk as it is at one moment, while the guest continues to write to it: a page that is not copied yet is copied before
//! it is changed. On a file system whose files can share blocks (FICLONE), the copy is complete at that moment.
//!
//! Easy to get wrong: every change of a disk must call [`PendingCopy::preserve`] first. A discard, which may be of gigabytes, is left out instead
//! if [`PendingCopy::needs`] its range: it is only a hint. A copy that fails does not fail the guest's request.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::{BlockError, Slot};
use crate::pages::{MAX_RUN_BYTES, PAGE, PageSet, has_data, is_zero, runs_of_pages};
use nacelle_base::retry::retry_interrupted;
use rustix::fs::ioctl_ficlone;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A file that is to become the copy of a slot's disk, see [`Slot::prepare_copy`].
#[derive(Debug)]
pub struct PreparedCopy {
    slot: Slot,
    target: File,
    shares_blocks: bool,
}

/// The copy of a slot's disk at one moment. It is complete after [`finish`](DiskCopy::finish); until then the guest's first write to a page
/// waits until the page is copied. Dropping it ends the copy.
#[derive(Debug)]
pub struct DiskCopy {
    slot: Slot,
    target: File,
    /// `None`: the target shares the blocks of the disk.
    pending: Option<Arc<PendingCopy>>,
}

/// What copying a disk took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopiedDisk {
    /// The size of the pages that were written, in bytes: all that are not zero, or none if the copy shares the blocks of the disk.
    pub copied: u64,
    /// The part of them that was copied because the guest was about to write there.
    pub preserved: u64,
}

/// The part of a copy that was not written yet. The thread that copies shares it with the one that serves the guest.
#[derive(Debug)]
pub(super) struct PendingCopy {
    source: Arc<File>,
    /// The size of the disk in bytes.
    length: u64,
    /// The number of threads that wait for the lock to change the disk. The thread that copies lets them go first.
    changing: AtomicUsize,
    progress: Mutex<CopyProgress>,
}

#[derive(Debug)]
struct CopyProgress {
    /// `None`: the copy has ended.
    open: Option<OpenCopy>,
    copied: CopiedDisk,
    /// The first error. The copy has ended then.
    failure: Option<io::Error>,
}

/// What a copy needs until it ends. Requests that are being served may keep the rest longer.
#[derive(Debug)]
struct OpenCopy {
    target: File,
    /// The pages that are in the target, or zero.
    done: PageSet,
    buffer: Vec<u8>,
}

impl Slot {
    /// Prepares a copy of this read-write slot's disk to `target`, an empty file that is open for writing, while the guest runs:
    /// where the file system can share blocks, what was written until now is flushed. The copy needs 32 MiB of memory per TiB of the disk.
    pub fn prepare_copy(&self, target: File) -> Result<PreparedCopy, BlockError> {
        let source = self.writable_file("copy")?;
        let failed = |source| self.copy_failed(source);
        target.set_len(0).map_err(failed)?;
        let shares_blocks = retry_interrupted(|| ioctl_ficlone(&target, &*source)).is_ok();
        if !shares_blocks {
            // It may have failed after some of the blocks.
            target.set_len(0).map_err(failed)?;
        }
        target.set_len(self.capacity()).map_err(failed)?;
        Ok(PreparedCopy { slot: self.clone(), target, shares_blocks })
    }

    fn copy_failed(&self, source: io::Error) -> BlockError {
        BlockError::Copy { serial: self.serial().to_owned(), source }
    }
}

impl PreparedCopy {
    /// Begins the copy: it will hold what the disk holds now. The guest must be paused, and the requests of its devices finished, until this
    /// returns. Fails if another copy of the disk has not ended.
    pub fn begin(self) -> Result<DiskCopy, BlockError> {
        let PreparedCopy { slot, target, shares_blocks } = self;
        let failed = |source| slot.copy_failed(source);
        let (source, length) = (slot.writable_file("copy")?, slot.capacity());
        if shares_blocks {
            retry_interrupted(|| ioctl_ficlone(&target, &*source)).map_err(|error| failed(error.into()))?;
            target.set_len(length).map_err(failed)?;
            return Ok(DiskCopy { slot, target, pending: None });
        }
        target.set_len(length).map_err(failed)?;
        let pending = Arc::new(PendingCopy {
            source,
            length,
            changing: AtomicUsize::new(0),
            progress: Mutex::new(CopyProgress {
                open: Some(OpenCopy {
                    target: target.try_clone().map_err(failed)?,
                    done: PageSet::new(length),
                    buffer: vec![0; MAX_RUN_BYTES],
                }),
                copied: CopiedDisk::default(),
                failure: None,
            }),
        });
        slot.begin_copy(pending.clone())?;
        Ok(DiskCopy { slot, target, pending: Some(pending) })
    }
}

impl DiskCopy {
    /// Copies what was not copied yet and flushes the target. The guest may run meanwhile. Fails with [`BlockError::CopyStopped`] soon after
    /// `stop` has become true.
    pub fn finish(self, stop: &AtomicBool) -> Result<CopiedDisk, BlockError> {
        let mut copied = CopiedDisk::default();
        if let Some(pending) = &self.pending {
            for start in (0..pending.length).step_by(MAX_RUN_BYTES) {
                if stop.load(Ordering::Relaxed) {
                    return Err(BlockError::CopyStopped { serial: self.slot.serial().to_owned() });
                }
                if !pending.copy_ahead(start..start.saturating_add(MAX_RUN_BYTES as u64)) {
                    break;
                }
            }
            copied = pending.end().map_err(|source| self.slot.copy_failed(source))?;
        }
        self.target.sync_all().map_err(|source| self.slot.copy_failed(source))?;
        Ok(copied)
    }
}

impl Drop for DiskCopy {
    fn drop(&mut self) {
        if let Some(pending) = &self.pending {
            self.slot.end_copy();
            let _ = pending.end(); // reported by `finish`
        }
    }
}

impl PendingCopy {
    /// Copies what a range of the disk holds, unless that is done, before the range is changed.
    pub fn preserve(&self, at: u64, length: u64) {
        self.changing.fetch_add(1, Ordering::Relaxed);
        let mut progress = self.lock();
        self.changing.fetch_sub(1, Ordering::Relaxed);
        let before = progress.copied.copied;
        self.copy(&mut progress, at..at.saturating_add(length));
        progress.copied.preserved += progress.copied.copied - before;
    }

    /// Returns whether the disk must keep what a part of this range holds, until that is copied.
    pub fn needs(&self, at: u64, length: u64) -> bool {
        let pages = self.pages_of(at..at.saturating_add(length));
        self.lock().open.as_ref().is_some_and(|open| open.done.first_gap(pages).is_some())
    }

    /// Returns the range of the pages that this range touches.
    fn pages_of(&self, range: Range<u64>) -> Range<u64> {
        let end = range.end.min(self.length).next_multiple_of(PAGE as u64);
        range.start / PAGE as u64 * PAGE as u64..end
    }

    /// Copies the rest of a range. Returns `false` if the copy has ended.
    fn copy_ahead(&self, range: Range<u64>) -> bool {
        while self.changing.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut progress = self.lock();
        self.copy(&mut progress, range);
        progress.open.is_some()
    }

    /// Ends the copy: the target is closed here and nothing is written to it afterwards. Returns the first error.
    fn end(&self) -> io::Result<CopiedDisk> {
        let mut progress = self.lock();
        progress.open = None;
        progress.failure.take().map_or(Ok(progress.copied), Err)
    }

    /// Copies the pages of a range that are not done. The first error ends the copy.
    fn copy(&self, progress: &mut CopyProgress, range: Range<u64>) {
        let mut rest = self.pages_of(range);
        while let Some(open) = &mut progress.open
            && let Some(run) = open.done.first_gap(rest.clone())
        {
            rest.start = run.end;
            match open.copy_run(&self.source, run.start..run.end.min(self.length)) {
                Ok(bytes) => {
                    progress.copied.copied += bytes;
                    open.done.insert_all(run);
                }
                Err(error) => {
                    progress.failure = Some(error);
                    progress.open = None;
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, CopyProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenCopy {
    /// Copies a range of at most [`MAX_RUN_BYTES`]. Returns the size of the pages that are not zero.
    fn copy_run(&mut self, source: &File, range: Range<u64>) -> io::Result<u64> {
        if !has_data(source, range.clone()) {
            return Ok(0);
        }
        let part = self.buffer.get_mut(..(range.end - range.start) as usize).unwrap_or_default();
        source.read_exact_at(part, range.start)?;
        let mut bytes = 0;
        for (start, run) in runs_of_pages(part, |_, page| !is_zero(page)) {
            self.target.write_all_at(run, range.start + start as u64)?;
            bytes += run.len() as u64;
        }
        Ok(bytes)
    }
}
