//! Maps the guest memory that a front end shares, and translates its two kinds of addresses.

use super::wire::{FrontEndRegion, VhostUserProtocolError};
use crate::virtio::Memory;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use std::fs::File;
use std::sync::Arc;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};

/// The guest memory of a front end, mapped.
#[derive(Debug)]
pub(super) struct FrontEndMemory {
    pub memory: Arc<Memory>,
    ranges: Vec<AddressRange>,
}

#[derive(Clone, Copy, Debug)]
struct AddressRange {
    user: u64,
    guest: u64,
    length: u64,
}

impl FrontEndMemory {
    /// Maps the regions. Rejects memory that could shrink, because an access beyond its end would kill this process.
    pub(super) fn map(mut regions: Vec<FrontEndRegion>) -> Result<FrontEndMemory, VhostUserProtocolError> {
        regions.sort_by_key(|region| region.guest);
        let ranges =
            regions.iter().map(|region| AddressRange { user: region.user, guest: region.guest, length: region.length });
        let ranges = ranges.collect();
        let mapped = regions.into_iter().map(map).collect::<Result<Vec<_>, _>>()?;
        Ok(FrontEndMemory { memory: Arc::new(Memory::from_regions(mapped)?), ranges })
    }

    /// Translates an address of the front end into a guest address.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.ranges.iter().find_map(|range| {
            let inside = user.checked_sub(range.user).filter(|inside| *inside < range.length)?;
            range.guest.checked_add(inside)
        })
    }
}

fn map(region: FrontEndRegion) -> Result<GuestRegionMmap, VhostUserProtocolError> {
    let FrontEndRegion { guest: address, length, user, offset, fd } = region;
    let memory_error = |why| VhostUserProtocolError::Memory { address, length, why };
    if length == 0 || address.checked_add(length).is_none() || user.checked_add(length).is_none() {
        return Err(memory_error("it is empty or its addresses wrap around"));
    }
    let file = File::from(fd);
    let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map_err(|_unknown| memory_error("it is not a memfd"))?;
    if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
        return Err(memory_error("it is not sealed against shrinking"));
    }
    let end = offset.checked_add(length).ok_or_else(|| memory_error("its addresses wrap around"))?;
    if file.metadata()?.len() < end {
        return Err(memory_error("its file is too short"));
    }
    let size = usize::try_from(length).map_err(|_wide| memory_error("it is too large"))?;
    let mapping = MmapRegion::from_file(FileOffset::new(file, offset), size)
        .map_err(|source| VhostUserProtocolError::Map { address, length, source })?;
    GuestRegionMmap::new(mapping, GuestAddress(address)).ok_or_else(|| memory_error("its addresses wrap around"))
}
