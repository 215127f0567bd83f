//! Collects and checks the buffers of one request, as lists of pieces of guest memory.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::Memory;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// The maximum number of pieces in a request. Linux sends at most 256 on these queues.
pub(crate) const MAX_BUFFERS: usize = 1024;

/// An error in a descriptor chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// No descriptor can be read at the head.
    #[error("a chain without a descriptor")]
    Empty,
    /// The chain has more pieces than any driver sends.
    #[error("a chain of more than {MAX_BUFFERS} descriptors")]
    TooLong,
    /// The chain has a loop, an index out of range, a bad indirect table or more than 4 GiB.
    #[error("a chain that does not end")]
    Endless,
    /// A device-readable buffer follows a device-writable one.
    #[error("a readable buffer behind a writable one")]
    Order,
    /// A buffer is not in guest memory.
    #[error("a buffer of {length} bytes at {address:#x}, outside guest memory")]
    Outside {
        /// The guest address of the buffer.
        address: u64,
        /// The length of the buffer in bytes.
        length: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryRange {
    address: GuestAddress,
    length: usize,
}

/// A list of pieces of guest memory, together at most 4 GiB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryRanges {
    list: Vec<MemoryRange>,
    length: usize,
}

/// The buffers of one request.
#[derive(Clone, Debug, Default)]
pub struct RequestBuffers {
    /// The buffers that the device reads.
    pub readable: MemoryRanges,
    /// The buffers that the device may write.
    pub writable: MemoryRanges,
}

impl RequestBuffers {
    /// Collects the buffers of a chain. Checks that the chain ends, is in order and lies in guest memory.
    pub fn collect(memory: &Memory, chain: DescriptorChain<&Memory>) -> Result<RequestBuffers, ChainError> {
        let mut buffers = RequestBuffers::default();
        let mut has_next = None;
        for descriptor in chain {
            has_next = Some(descriptor.has_next());
            let length = descriptor.len() as usize;
            let access = if descriptor.is_write_only() { Permissions::Write } else { Permissions::Read };
            if !memory.check_range(descriptor.addr(), length, access) {
                return Err(ChainError::Outside { address: descriptor.addr().0, length });
            }
            if buffers.readable.list.len() + buffers.writable.list.len() >= MAX_BUFFERS {
                return Err(ChainError::TooLong);
            }
            if descriptor.is_write_only() {
                buffers.writable.push(descriptor.addr(), length);
            } else if buffers.writable.list.is_empty() {
                buffers.readable.push(descriptor.addr(), length);
            } else {
                return Err(ChainError::Order);
            }
        }
        match has_next {
            None => Err(ChainError::Empty),
            Some(true) => Err(ChainError::Endless),
            Some(false) => Ok(buffers),
        }
    }
}

impl MemoryRanges {
    fn push(&mut self, address: GuestAddress, length: usize) {
        if length > 0 {
            self.list.push(MemoryRange { address, length });
            self.length = self.length.saturating_add(length); // a chain has at most 4 GiB
        }
    }

    /// Returns the total length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the total length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the guest address ranges of the pieces. None is empty.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<u64>> + '_ {
        self.list.iter().map(|range| range.address.0..range.address.0.saturating_add(range.length as u64))
    }

    /// Removes and returns the first `count` bytes. Returns `None`, without a change, if there are fewer.
    pub fn split_front(&mut self, count: usize) -> Option<MemoryRanges> {
        let back = self.split_off(count)?;
        Some(std::mem::replace(self, back))
    }

    /// Removes and returns the last `count` bytes. Returns `None`, without a change, if there are fewer.
    pub fn split_back(&mut self, count: usize) -> Option<MemoryRanges> {
        self.split_off(self.length.checked_sub(count)?)
    }

    /// Keeps the first `count` bytes and returns the others. Returns `None`, without a change, if there are fewer.
    fn split_off(&mut self, count: usize) -> Option<MemoryRanges> {
        let length = self.length.checked_sub(count)?;
        let (mut whole, mut left) = (0, count);
        while let Some(range) = self.list.get(whole).filter(|range| range.length <= left) {
            left = left.saturating_sub(range.length);
            whole += 1;
        }
        let mut list = self.list.split_off(whole);
        if let Some(first) = list.first_mut().filter(|_| left > 0) {
            self.list.push(MemoryRange { address: first.address, length: left });
            // The piece lies in guest memory, so an address within it does not overflow.
            first.address = GuestAddress(first.address.0.saturating_add(left as u64));
            first.length = first.length.saturating_sub(left);
        }
        self.length = count;
        Some(MemoryRanges { list, length })
    }

    /// Returns the pieces as slices of memory. A piece that spans several regions gives several slices.
    pub fn slices<'m>(&self, memory: &'m Memory, access: Permissions) -> Result<Vec<VolatileSlice<'m>>, ChainError> {
        let mut slices = Vec::with_capacity(self.list.len());
        self.add_slices(memory, access, &mut slices)?;
        Ok(slices)
    }

    /// Appends the pieces, as slices of memory, to `slices`.
    pub fn add_slices<'m>(
        &self,
        memory: &'m Memory,
        access: Permissions,
        slices: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<(), ChainError> {
        for range in &self.list {
            let outside = || ChainError::Outside { address: range.address.0, length: range.length };
            // `GuestMemory::get_slices`, unlike the backend's method of the same name, checks permissions.
            let found = GuestMemory::get_slices(memory, range.address, range.length, access);
            for slice in found.map_err(|_why| outside())? {
                slices.push(slice.map_err(|_why| outside())?);
            }
        }
        Ok(())
    }

    /// Copies the first bytes into `bytes`. Returns the number of copied bytes.
    pub fn read(&self, memory: &Memory, bytes: &mut [u8]) -> Result<usize, ChainError> {
        let mut rest = bytes;
        let mut done = 0;
        for range in &self.list {
            let here = range.length.min(rest.len());
            let (now, later) = rest.split_at_mut(here);
            memory
                .read_slice(now, range.address)
                .map_err(|_why| ChainError::Outside { address: range.address.0, length: here })?;
            done += here;
            rest = later;
        }
        Ok(done)
    }

    /// Copies `bytes` to the start of the pieces. Returns the number of copied bytes.
    pub fn write(&self, memory: &Memory, bytes: &[u8]) -> Result<usize, ChainError> {
        self.write_at(memory, 0, bytes)
    }

    /// Copies `bytes` to the pieces, starting at byte `skip`. Returns the number of copied bytes.
    pub fn write_at(&self, memory: &Memory, skip: usize, bytes: &[u8]) -> Result<usize, ChainError> {
        let (mut skip, mut rest, mut done) = (skip, bytes, 0);
        for range in &self.list {
            let before = skip.min(range.length);
            skip -= before;
            let (now, later) = rest.split_at(rest.len().min(range.length - before));
            if now.is_empty() {
                continue;
            }
            // The piece lies in guest memory, so an address within it does not overflow.
            let address = range.address.0.saturating_add(before as u64);
            memory
                .write_slice(now, GuestAddress(address))
                .map_err(|_why| ChainError::Outside { address, length: now.len() })?;
            done += now.len();
            rest = later;
        }
        Ok(done)
    }

    /// Fills all pieces with zeros.
    pub fn zero(&self, memory: &Memory) -> Result<(), ChainError> {
        static ZEROS: [u8; 4096] = [0; 4096];
        for slice in self.slices(memory, Permissions::Write)? {
            let mut rest = slice;
            while !rest.is_empty() {
                let here = rest.len().min(ZEROS.len());
                rest.copy_from(ZEROS.get(..here).unwrap_or(&ZEROS));
                rest = rest.offset(here).map_err(|_why| ChainError::Outside { address: 0, length: here })?;
            }
        }
        Ok(())
    }
}
