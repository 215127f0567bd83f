//! Writes the file `memory`: the guest's memory, region after region, with holes in place of zero pages. Writing uses up to
//! four threads for the duration of the call.

use super::pagemap;
use crate::machine::find_data;
use crate::pages::{PAGE, has_data, is_zero, runs_of_pages};
use crate::virtio::Memory;
use nacelle_base::retry::retry_interrupted;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

/// The unit of work of one thread, in bytes.
const CHUNK_BYTES: usize = 1 << 20;
const MAX_THREADS: usize = 4;

/// Allocates what [`find_data`] returns of the file.
pub(super) fn fill_holes(file: &File) -> io::Result<()> {
    for range in find_data(file, 0..file.metadata()?.len()) {
        let (start, length) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
        retry_interrupted(|| fallocate(file, FallocateFlags::empty(), start, length))?;
    }
    Ok(())
}

/// A part of a region, at most [`CHUNK_BYTES`] bytes long, and its offset in the file.
struct MemoryChunk<'a> {
    region: &'a GuestRegionMmap<()>,
    start: usize,
    length: usize,
    at: u64,
}

/// Writes the whole memory as a sparse file. The guest must be paused: no thread may write to the memory meanwhile. Without the pagemap
/// of this process, every page is read.
pub(super) fn write(file: &File, memory: &Memory, pagemap: Option<&File>) -> io::Result<()> {
    let total = memory.iter().map(GuestMemoryRegion::len).sum();
    file.set_len(total)?;
    let mut chunks = Vec::new();
    let mut at = 0;
    for region in memory.iter() {
        let size = region.as_volatile_slice().map_err(io::Error::other)?.len();
        let chunk = |start| MemoryChunk { region, start, length: CHUNK_BYTES.min(size - start), at: at + start as u64 };
        chunks.extend((0..size).step_by(CHUNK_BYTES).map(chunk));
        at += region.len();
    }
    let next_chunk = AtomicUsize::new(0);
    let write_chunks = || -> io::Result<()> {
        let mut buffer = vec![0; CHUNK_BYTES];
        while let Some(chunk) = chunks.get(next_chunk.fetch_add(1, Ordering::Relaxed)) {
            if chunk.may_have_data(pagemap) {
                chunk.write(file, &mut buffer)?;
            }
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS).min(chunks.len());
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(write_chunks)).collect();
        let mut result = write_chunks();
        for other in others {
            let joined = other.join().unwrap_or_else(|_panic| Err(io::Error::other("a thread panicked")));
            result = result.and(joined);
        }
        result
    })
}

impl MemoryChunk<'_> {
    /// Returns `false` if no page of the piece was ever touched: then it is zero, or a hole in the file that it is mapped from.
    /// Reading such pages would only allocate page tables and pages of the file.
    fn may_have_data(&self, pagemap: Option<&File>) -> bool {
        let Some(pagemap) = pagemap else { return true };
        let address = (self.region.as_ptr() as usize).saturating_add(self.start);
        let mut touched = false;
        let read = pagemap::read(pagemap, address, self.length.div_ceil(PAGE), |entry| {
            touched = entry.is_touched();
            !touched
        });
        if read.is_err() {
            return true;
        }
        touched || self.file_has_data()
    }

    fn file_has_data(&self) -> bool {
        let Some(backing) = self.region.file_offset() else { return false };
        let start = backing.start().saturating_add(self.start as u64);
        has_data(backing.file(), start..start.saturating_add(self.length as u64))
    }

    /// Writes the runs of non-zero pages.
    fn write(&self, file: &File, buffer: &mut [u8]) -> io::Result<()> {
        let slice = self.region.get_slice(MemoryRegionAddress(self.start as u64), self.length);
        slice.map_err(io::Error::other)?.copy_to(buffer);
        let pages = buffer.get(..self.length).unwrap_or_default();
        runs_of_pages(pages, |_, page| !is_zero(page))
            .try_for_each(|(start, run)| file.write_all_at(run, self.at + start as u64))
    }
}
