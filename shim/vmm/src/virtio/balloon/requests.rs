//! Serves the requests of the balloon's queues.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::discard::{PAGE, discard};
use super::handle::{BalloonInner, Statistics};
use crate::virtio::Memory;
use crate::virtio::buffers::MemoryRanges;
use crate::virtio::ring::Request;
use nacelle_base::guest_warn;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// The queues, by number. Queues of features that were not negotiated do not exist, and the later ones move up (as in Linux):
/// without statistics, reporting is queue 2.
pub(crate) const INFLATE: u16 = 0;
pub(crate) const DEFLATE: u16 = 1;
pub(crate) const STATISTICS: u16 = 2;

/// The maximum number of pages in one request; Linux sends 256.
pub(super) const MAX_PAGES: usize = 16384;
/// The maximum size of the statistics in bytes; Linux sends 16 entries of 10 bytes each.
const MAX_STATISTICS: usize = 1024;

/// Serves a request of queue `index`. Returns `None` if the device keeps the request for now.
pub(crate) fn serve(inner: &BalloonInner, index: u16, memory: &Memory, request: Request) -> Option<u32> {
    match index {
        INFLATE => inflate(inner, memory, &request.buffers.readable),
        DEFLATE => {
            let pages = request.buffers.readable.len() / 4;
            inner.metrics.deflated_pages.fetch_add(pages as u64, Relaxed);
        }
        STATISTICS if inner.statistics_negotiated.load(SeqCst) => {
            return statistics(inner, memory, &request.buffers.readable);
        }
        _ => release_reported(inner, memory, &request.buffers.writable),
    }
    Some(0)
}

/// Releases the pages of a list of page numbers; adjacent pages are released together.
fn inflate(inner: &BalloonInner, memory: &Memory, list: &MemoryRanges) {
    let metrics = &inner.metrics;
    let mut bytes = vec![0; list.len().min(MAX_PAGES * 4)];
    match list.read(memory, &mut bytes) {
        Ok(read) => bytes.truncate(read),
        Err(error) => {
            guest_warn!("the guest inflated its balloon with {error}");
            return;
        }
    }
    if list.len() > MAX_PAGES * 4 {
        metrics.refused.fetch_add(1, Relaxed);
        guest_warn!("the guest put more than {MAX_PAGES} pages into its balloon at once");
    }
    let (numbers, _rest) = bytes.as_chunks::<4>();
    let mut pages: Vec<u32> = numbers.iter().map(|number| u32::from_le_bytes(*number)).collect();
    metrics.inflated_pages.fetch_add(pages.len() as u64, Relaxed);
    pages.sort_unstable();
    pages.dedup();
    for run in pages.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
        if let Some(first) = run.first() {
            let start = u64::from(*first) * PAGE;
            discard(metrics, memory, start..start + run.len() as u64 * PAGE);
        }
    }
}

/// Releases the memory that the guest reports as free.
fn release_reported(inner: &BalloonInner, memory: &Memory, free: &MemoryRanges) {
    for range in free.ranges() {
        inner.metrics.reported_bytes.fetch_add(range.end.saturating_sub(range.start), Relaxed);
        discard(&inner.metrics, memory, range);
    }
}

/// Stores the guest's statistics. The buffer is returned to the guest when the host requests new statistics.
fn statistics(inner: &BalloonInner, memory: &Memory, list: &MemoryRanges) -> Option<u32> {
    let mut bytes = vec![0; list.len().min(MAX_STATISTICS)];
    match list.read(memory, &mut bytes) {
        Ok(read) => inner.set_statistics(Statistics::parse(bytes.get(..read).unwrap_or_default())),
        Err(error) => guest_warn!("the guest sent memory statistics in {error}"),
    }
    inner.take_statistics_request().then_some(0)
}
