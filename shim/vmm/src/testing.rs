//! Simulates the guest's driver of a virtqueue for tests: it lays a queue out in memory and can break the rules of the
//! specification as a test requires. The unit tests, the fuzz harness and (included by path) the tests in `tests/` use it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The number of bytes that the parts of a queue occupy, counted from its base.
pub const QUEUE_BYTES: u64 = 0x4000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// The driver's side of one queue.
pub struct Driver {
    pub memory: Arc<GuestMemoryMmap<()>>,
    base: u64,
    size: u16,
    offered: u16,
    taken: u16,
    free: Vec<u16>,
}

impl Driver {
    /// Creates a queue of `size` descriptors at `base`, which must be a multiple of 16.
    pub fn new(memory: Arc<GuestMemoryMmap<()>>, base: u64, size: u16) -> Driver {
        Driver { memory, base, size, offered: 0, taken: 0, free: (0..size).rev().collect() }
    }

    /// Creates a queue whose first `index` requests were made available and returned before.
    pub fn starting_at(memory: Arc<GuestMemoryMmap<()>>, base: u64, size: u16, index: u16) -> Driver {
        let driver = Driver { offered: index, taken: index, ..Driver::new(memory, base, size) };
        driver.set_available(index);
        driver.memory.store(index, GuestAddress(base + USED + 2), Ordering::Release).unwrap();
        driver
    }

    /// Returns the index of the next request that the driver will take from the used ring.
    pub fn taken(&self) -> u16 {
        self.taken
    }

    /// Returns the addresses of descriptor table, available ring and used ring.
    pub fn addresses(&self) -> (u64, u64, u64) {
        (self.base, self.base + AVAILABLE, self.base + USED)
    }

    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the number of descriptors that no request uses.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Writes one descriptor into the table at `table`.
    pub fn describe_in(&self, table: u64, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = table + 16 * u64::from(index);
        self.memory.write_obj(address, GuestAddress(at)).unwrap();
        self.memory.write_obj(length, GuestAddress(at + 8)).unwrap();
        self.memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        self.memory.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    /// Writes one descriptor of the queue.
    pub fn describe(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        self.describe_in(self.base, index, address, length, flags, next);
    }

    /// Makes a chain available without checking it.
    pub fn offer(&mut self, head: u16) {
        let slot = self.base + AVAILABLE + 4 + 2 * u64::from(self.offered % self.size);
        self.memory.write_obj(head, GuestAddress(slot)).unwrap();
        self.offered = self.offered.wrapping_add(1);
        self.set_available(self.offered);
    }

    /// Sets the index of the available ring without checking it.
    pub fn set_available(&self, index: u16) {
        self.memory.store(index, GuestAddress(self.base + AVAILABLE + 2), Ordering::Release).unwrap();
    }

    /// Requests an interrupt for the next buffer that the device returns (with event indexes).
    pub fn want_next_interrupt(&self) {
        let at = self.base + AVAILABLE + 4 + 2 * u64::from(self.size);
        self.memory.store(self.taken, GuestAddress(at), Ordering::SeqCst).unwrap();
    }

    /// Makes a request of these buffers (address, length, writable) available. Returns the index of its first descriptor.
    pub fn submit(&mut self, buffers: &[(u64, u32, bool)]) -> u16 {
        let indexes: Vec<u16> = buffers.iter().map(|_| self.free.pop().expect("a free descriptor")).collect();
        for (place, (address, length, writable)) in buffers.iter().enumerate() {
            let next = indexes.get(place + 1);
            let flags = if *writable { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
            self.describe(indexes[place], *address, *length, flags, next.copied().unwrap_or(0));
        }
        self.offer(indexes[0]);
        indexes[0]
    }

    /// Takes the next request from the used ring. Returns its head and the number of bytes that the device reports as written.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let index: u16 = self.memory.load(GuestAddress(self.base + USED + 2), Ordering::Acquire).unwrap();
        if index == self.taken {
            return None;
        }
        let at = self.base + USED + 4 + 8 * u64::from(self.taken % self.size);
        let head: u32 = self.memory.read_obj(GuestAddress(at)).unwrap();
        let length: u32 = self.memory.read_obj(GuestAddress(at + 4)).unwrap();
        self.taken = self.taken.wrapping_add(1);
        let mut next = head as u16;
        loop {
            self.free.push(next);
            let descriptor = self.base + 16 * u64::from(next);
            let flags: u16 = self.memory.read_obj(GuestAddress(descriptor + 12)).unwrap();
            if flags & NEXT == 0 || self.free.len() >= usize::from(self.size) {
                return Some((head as u16, length));
            }
            next = self.memory.read_obj(GuestAddress(descriptor + 14)).unwrap();
        }
    }

    /// Takes all used chains without reading their descriptors, for tests that write their own. Returns their number.
    pub fn count_used(&mut self) -> u16 {
        let index: u16 = self.memory.load(GuestAddress(self.base + USED + 2), Ordering::Acquire).unwrap();
        let count = index.wrapping_sub(self.taken);
        self.taken = index;
        count
    }
}
