//! Releases guest memory to the host. The method and its effect depend on the backing of the region:
//! - private anonymous memory: MADV_DONTNEED; the guest later reads zeros;
//! - a shared mapping (memfd, shared hugetlb): MADV_REMOVE, which frees the memory in every process that maps it; the guest
//!   later reads zeros;
//! - a private mapping of a snapshot's file (the parts with data of a restored VM): MADV_DONTNEED frees the copies that the
//!   guest has made. The guest later reads the file's bytes, which virtio allows (without VIRTIO_BALLOON_F_PAGE_POISON the
//!   driver expects no particular content). They are no secret to the guest: they were its memory when it was restored.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::BalloonMetrics;
use crate::sys;
use crate::virtio::Memory;
use nacelle_base::guest_warn;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// The size of a page in bytes, the unit of the balloon.
pub(super) const PAGE: u64 = 4096;

/// Releases the whole pages in `bytes` (guest addresses) that are guest memory.
pub(super) fn discard(metrics: &BalloonMetrics, memory: &Memory, bytes: Range<u64>) {
    let (start, end) = (bytes.start.next_multiple_of(PAGE), bytes.end & !(PAGE - 1));
    let mut there = 0;
    for region in memory.iter() {
        let base = region.start_addr().0;
        let (from, to) = (start.max(base), end.min(base.saturating_add(region.len())));
        let Some(length) = to.checked_sub(from).filter(|length| *length > 0) else { continue };
        there += length;
        match sys::discard(region, from - base, length) {
            Ok(()) => _ = metrics.freed_bytes.fetch_add(length, Relaxed),
            Err(error) => {
                metrics.failed.fetch_add(1, Relaxed);
                guest_warn!("cannot release {length} bytes of guest memory at {from:#x} to the host: {error}");
            }
        }
    }
    if there < end.saturating_sub(start) {
        metrics.refused.fetch_add(1, Relaxed);
        guest_warn!("the guest released memory at {start:#x} that it does not have");
    }
}
