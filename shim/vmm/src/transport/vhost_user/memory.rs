//! Maps the guest memory that a front end shares, and translates its two kinds of addresses.

use super::wire::{Region, WireError};
use crate::virtio::Memory;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use std::fs::File;
use std::sync::Arc;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};

/// The guest memory of a front end, mapped.
#[derive(Debug)]
pub(super) struct Shared {
    pub memory: Arc<Memory>,
    spans: Vec<Span>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    user: u64,
    guest: u64,
    length: u64,
}

impl Shared {
    /// Maps the regions. Rejects memory that could shrink, because an access beyond its end would kill this process.
    pub(super) fn map(mut regions: Vec<Region>) -> Result<Shared, WireError> {
        regions.sort_by_key(|region| region.guest);
        let spans = regions.iter().map(|region| Span { user: region.user, guest: region.guest, length: region.length });
        let spans = spans.collect();
        let mapped = regions.into_iter().map(map).collect::<Result<Vec<_>, _>>()?;
        Ok(Shared { memory: Arc::new(Memory::from_regions(mapped)?), spans })
    }

    /// Translates an address of the front end into a guest address.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.spans.iter().find_map(|span| {
            let inside = user.checked_sub(span.user).filter(|inside| *inside < span.length)?;
            span.guest.checked_add(inside)
        })
    }
}

fn map(region: Region) -> Result<GuestRegionMmap, WireError> {
    let Region { guest: address, length, user, offset, fd } = region;
    let bad = |why| WireError::Memory { address, length, why };
    if length == 0 || address.checked_add(length).is_none() || user.checked_add(length).is_none() {
        return Err(bad("it is empty or wraps around"));
    }
    let file = File::from(fd);
    let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map_err(|_unknown| bad("it is not a memfd"))?;
    if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
        return Err(bad("it is not sealed against shrinking"));
    }
    let end = offset.checked_add(length).ok_or_else(|| bad("it wraps around"))?;
    if file.metadata()?.len() < end {
        return Err(bad("its file is too short"));
    }
    let size = usize::try_from(length).map_err(|_wide| bad("it is too large"))?;
    let mapping = MmapRegion::from_file(FileOffset::new(file, offset), size).map_err(|source| WireError::Map {
        address,
        length,
        source,
    })?;
    GuestRegionMmap::new(mapping, GuestAddress(address)).ok_or_else(|| bad("it wraps around"))
}
