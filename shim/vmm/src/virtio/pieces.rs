//! Collects and checks the buffers of one request, as lists of pieces of guest memory.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::Memory;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// The maximum number of pieces in a request. Linux sends at most 256 on these queues.
pub(crate) const MAX_PIECES: usize = 1024;

/// An error in a descriptor chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadChain {
    /// No descriptor can be read at the head.
    #[error("a chain without a descriptor")]
    Empty,
    /// The chain has more pieces than any driver sends.
    #[error("a chain of more than {MAX_PIECES} descriptors")]
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
struct Piece {
    address: GuestAddress,
    length: usize,
}

/// A list of pieces of guest memory, together at most 4 GiB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pieces {
    list: Vec<Piece>,
    length: usize,
}

/// The buffers of one request.
#[derive(Clone, Debug, Default)]
pub struct Buffers {
    /// The buffers that the device reads.
    pub readable: Pieces,
    /// The buffers that the device may write.
    pub writable: Pieces,
}

impl Buffers {
    /// Collects the buffers of a chain. Checks that the chain ends, is in order and lies in guest memory.
    pub fn collect(memory: &Memory, chain: DescriptorChain<&Memory>) -> Result<Buffers, BadChain> {
        let mut buffers = Buffers::default();
        let mut more = None;
        for descriptor in chain {
            more = Some(descriptor.has_next());
            let length = descriptor.len() as usize;
            let access = if descriptor.is_write_only() { Permissions::Write } else { Permissions::Read };
            if !memory.check_range(descriptor.addr(), length, access) {
                return Err(BadChain::Outside { address: descriptor.addr().0, length });
            }
            if buffers.readable.list.len() + buffers.writable.list.len() >= MAX_PIECES {
                return Err(BadChain::TooLong);
            }
            if descriptor.is_write_only() {
                buffers.writable.push(descriptor.addr(), length);
            } else if buffers.writable.list.is_empty() {
                buffers.readable.push(descriptor.addr(), length);
            } else {
                return Err(BadChain::Order);
            }
        }
        match more {
            None => Err(BadChain::Empty),
            Some(true) => Err(BadChain::Endless),
            Some(false) => Ok(buffers),
        }
    }
}

impl Pieces {
    fn push(&mut self, address: GuestAddress, length: usize) {
        if length > 0 {
            self.list.push(Piece { address, length });
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
        self.list.iter().map(|piece| piece.address.0..piece.address.0.saturating_add(piece.length as u64))
    }

    /// Removes and returns the first `count` bytes. Returns `None`, without a change, if there are fewer.
    pub fn take_front(&mut self, count: usize) -> Option<Pieces> {
        let back = self.cut(count)?;
        Some(std::mem::replace(self, back))
    }

    /// Removes and returns the last `count` bytes. Returns `None`, without a change, if there are fewer.
    pub fn take_back(&mut self, count: usize) -> Option<Pieces> {
        self.cut(self.length.checked_sub(count)?)
    }

    /// Keeps the first `count` bytes and returns the others. Returns `None`, without a change, if there are fewer.
    fn cut(&mut self, count: usize) -> Option<Pieces> {
        let length = self.length.checked_sub(count)?;
        let (mut whole, mut left) = (0, count);
        while let Some(piece) = self.list.get(whole).filter(|piece| piece.length <= left) {
            left = left.saturating_sub(piece.length);
            whole += 1;
        }
        let mut list = self.list.split_off(whole);
        if let Some(first) = list.first_mut().filter(|_| left > 0) {
            self.list.push(Piece { address: first.address, length: left });
            // The piece lies in guest memory, so an address within it does not overflow.
            first.address = GuestAddress(first.address.0.saturating_add(left as u64));
            first.length = first.length.saturating_sub(left);
        }
        self.length = count;
        Some(Pieces { list, length })
    }

    /// Returns the pieces as slices of memory. A piece that spans several regions gives several slices.
    pub fn slices<'m>(&self, memory: &'m Memory, access: Permissions) -> Result<Vec<VolatileSlice<'m>>, BadChain> {
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
    ) -> Result<(), BadChain> {
        for piece in &self.list {
            let outside = || BadChain::Outside { address: piece.address.0, length: piece.length };
            // `GuestMemory::get_slices`, unlike the backend's method of the same name, checks permissions.
            let found = GuestMemory::get_slices(memory, piece.address, piece.length, access);
            for slice in found.map_err(|_why| outside())? {
                slices.push(slice.map_err(|_why| outside())?);
            }
        }
        Ok(())
    }

    /// Copies the first bytes into `bytes`. Returns the number of copied bytes.
    pub fn read(&self, memory: &Memory, bytes: &mut [u8]) -> Result<usize, BadChain> {
        let mut rest = bytes;
        let mut done = 0;
        for piece in &self.list {
            let here = piece.length.min(rest.len());
            let (now, later) = rest.split_at_mut(here);
            memory
                .read_slice(now, piece.address)
                .map_err(|_why| BadChain::Outside { address: piece.address.0, length: here })?;
            done += here;
            rest = later;
        }
        Ok(done)
    }

    /// Copies `bytes` to the start of the pieces. Returns the number of copied bytes.
    pub fn write(&self, memory: &Memory, bytes: &[u8]) -> Result<usize, BadChain> {
        self.write_at(memory, 0, bytes)
    }

    /// Copies `bytes` to the pieces, starting at byte `skip`. Returns the number of copied bytes.
    pub fn write_at(&self, memory: &Memory, skip: usize, bytes: &[u8]) -> Result<usize, BadChain> {
        let (mut skip, mut rest, mut done) = (skip, bytes, 0);
        for piece in &self.list {
            let before = skip.min(piece.length);
            skip -= before;
            let (now, later) = rest.split_at(rest.len().min(piece.length - before));
            if now.is_empty() {
                continue;
            }
            // The piece lies in guest memory, so an address within it does not overflow.
            let address = piece.address.0.saturating_add(before as u64);
            memory
                .write_slice(now, GuestAddress(address))
                .map_err(|_why| BadChain::Outside { address, length: now.len() })?;
            done += now.len();
            rest = later;
        }
        Ok(done)
    }

    /// Fills all pieces with zeros.
    pub fn zero(&self, memory: &Memory) -> Result<(), BadChain> {
        static ZEROS: [u8; 4096] = [0; 4096];
        for slice in self.slices(memory, Permissions::Write)? {
            let mut rest = slice;
            while !rest.is_empty() {
                let here = rest.len().min(ZEROS.len());
                rest.copy_from(ZEROS.get(..here).unwrap_or(&ZEROS));
                rest = rest.offset(here).map_err(|_why| BadChain::Outside { address: 0, length: here })?;
            }
        }
        Ok(())
    }
}
