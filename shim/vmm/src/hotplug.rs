//! Releases to the host the guest memory that the guest has taken offline, which is the unused rest of the VM's hot-plug memory.
//! May be called on any thread; it blocks for as long as the host's kernel frees pages.

use crate::sys;
use crate::virtio::Memory;
use std::io;
use std::ops::Range;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// Frees those parts of the guest address ranges that are guest memory, in every process that maps them. Later reads of the
/// guest return zeros, or what was saved there if the VM was restored.
pub fn release_ranges(memory: &Memory, ranges: &[Range<u64>]) -> io::Result<()> {
    for range in ranges {
        for region in memory.iter() {
            let base = region.start_addr().0;
            let (from, to) = (range.start.max(base), range.end.min(base.saturating_add(region.len())));
            if from < to {
                sys::discard(region, from - base, to - from)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn only_the_named_ranges_are_released() {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 0x4000), (GuestAddress(0x8000), 0x4000)]).unwrap();
        let touched = [0, 0x1000, 0x3000, 0x8000, 0xb000];
        for at in touched {
            memory.write_obj(7u8, GuestAddress(at)).unwrap();
        }
        release_ranges(&memory, &[0x1000..0x2000, 0x3000..0x9000, 0x2_0000..0x3_0000]).unwrap();
        let left = touched.map(|at| memory.read_obj::<u8>(GuestAddress(at)).unwrap());
        assert_eq!(left, [7, 0, 0, 0, 7]);
    }
}
