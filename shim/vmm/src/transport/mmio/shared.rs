//! Implements the memory that a device shares with its driver, separate from the guest's own (VIRTIO 1.2, section 2.10): the
//! registers that describe it, and its save and restore.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::reg;
use crate::virtio::{Memory, SHARED_MEMORY_ID};
use nacelle_base::guest_error;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use vm_memory::{Address, Bytes, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

const PAGE: usize = 4096;

/// A page of shared memory that is not all zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPage {
    /// The number of the page, counted from the start of the shared memory.
    pub number: u32,
    /// The content, 4096 bytes.
    pub bytes: Vec<u8>,
}

/// The shared memory of a device; most devices have none.
#[derive(Debug, Default)]
pub(super) struct SharedMemory(Option<Arc<GuestRegionMmap<()>>>);

impl SharedMemory {
    pub fn new(region: Option<Arc<GuestRegionMmap<()>>>) -> SharedMemory {
        SharedMemory(region)
    }

    /// Returns the guest's memory with the shared memory added, or `None` if they overlap.
    pub fn add_to(&self, memory: Arc<Memory>) -> Option<Arc<Memory>> {
        match &self.0 {
            None => Some(memory),
            Some(region) => memory.insert_region(region.clone()).ok().map(Arc::new),
        }
    }

    /// Returns the value of a register of the selected region: all ones if the region does not exist.
    pub fn read(&self, register: u64, selected: u32) -> u32 {
        let region = self.0.as_ref().filter(|_| selected == SHARED_MEMORY_ID);
        let number = match register {
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH => region.map(|region| region.len()),
            _ => region.map(|region| region.start_addr().raw_value()),
        };
        let number = number.unwrap_or(u64::MAX);
        match register {
            reg::SHM_LEN_HIGH | reg::SHM_BASE_HIGH => (number >> 32) as u32,
            _ => number as u32, // the lower half
        }
    }

    /// Returns the non-zero pages. It reads the file, because a read through the mapping would allocate pages.
    pub fn save(&self) -> Vec<SharedPage> {
        let Some((region, file)) = self.0.as_ref().and_then(|region| Some((region, region.file_offset()?))) else {
            return Vec::new();
        };
        let pages = u32::try_from(region.len() / PAGE as u64).unwrap_or(u32::MAX);
        let page = |number: u32| {
            let mut bytes = vec![0; PAGE];
            let at = file.start() + u64::from(number) * PAGE as u64;
            match file.file().read_exact_at(&mut bytes, at) {
                Ok(()) => bytes.iter().any(|byte| *byte != 0).then_some(SharedPage { number, bytes }),
                Err(error) => {
                    guest_error!(%error, number, "cannot save a page of a device's shared memory");
                    None
                }
            }
        };
        (0..pages).filter_map(page).collect()
    }

    /// Writes the pages back, and nothing else. Fails with the number of the first page outside the shared memory.
    pub fn restore(&self, pages: &[SharedPage]) -> Result<(), u64> {
        let before = self.save().into_iter().map(|page| SharedPage { bytes: vec![0; PAGE], ..page });
        for SharedPage { number, bytes } in before.collect::<Vec<_>>().iter().chain(pages) {
            let wrong = u64::from(*number);
            let region = self.0.as_ref().filter(|_| bytes.len() == PAGE).ok_or(wrong)?;
            let at = MemoryRegionAddress(wrong * PAGE as u64);
            region.write_slice(bytes, at).map_err(|_outside| wrong)?;
        }
        Ok(())
    }
}

/// Returns the error for shared memory that overlaps the guest's.
pub(super) fn overlap_error() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the device's shared memory overlaps guest memory")
}
