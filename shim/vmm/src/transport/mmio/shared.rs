//! Owns: memory that a device shares with its driver apart from the guest's own (VIRTIO 1.2, section 2.10): where it lies, and
//! what is kept of it over a save and restore.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::reg;
use crate::virtio::{Memory, SHARED_ID};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use vm_memory::{Address, Bytes, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

const PAGE: usize = 4096;

/// A page of shared memory that is not all zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPage {
    /// Its number, from the beginning of that memory.
    pub number: u32,
    /// Its 4096 bytes.
    pub bytes: Vec<u8>,
}

/// The memory that a device shares; most have none.
#[derive(Debug, Default)]
pub(super) struct Shared(Option<Arc<GuestRegionMmap<()>>>);

impl Shared {
    pub fn new(region: Option<Arc<GuestRegionMmap<()>>>) -> Shared {
        Shared(region)
    }

    /// The guest's memory with this beside it; `None`: they overlap.
    pub fn beside(&self, memory: Arc<Memory>) -> Option<Arc<Memory>> {
        match &self.0 {
            None => Some(memory),
            Some(region) => memory.insert_region(region.clone()).ok().map(Arc::new),
        }
    }

    /// What the driver reads at a register of the region that it has selected: all ones if there is none.
    pub fn read(&self, register: u64, selected: u32) -> u32 {
        let region = self.0.as_ref().filter(|_| selected == SHARED_ID);
        let number = match register {
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH => region.map(|region| region.len()),
            _ => region.map(|region| region.start_addr().raw_value()),
        };
        let number = number.unwrap_or(u64::MAX);
        match register {
            reg::SHM_LEN_HIGH | reg::SHM_BASE_HIGH => (number >> 32) as u32,
            _ => number as u32, // its lower half
        }
    }

    /// What is in it. Its file is read: to touch a page makes one.
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
                    tracing::error!(%error, number, "a page that a device shares with its driver cannot be saved");
                    None
                }
            }
        };
        (0..pages).filter_map(page).collect()
    }

    /// Puts back what was in it, and nothing else; the number of a page that it has no place for.
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

/// The error of memory that overlaps the guest's.
pub(super) fn overlaps() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the memory that it shares overlaps the guest's")
}
