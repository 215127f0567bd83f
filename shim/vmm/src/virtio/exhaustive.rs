//! Proves properties of the device code by trying all inputs within stated bounds: every chain of at most two descriptors whose fields
//! are values at which the code may decide differently, directly and in an indirect table.

use super::buffers::{ChainError, MemoryRanges, RequestBuffers};
use super::{Interrupt, Memory, Ring};
use crate::testing::{Driver, INDIRECT, NEXT, WRITE};
use nix::sys::eventfd::EventFd;
use std::sync::Arc;
use virtio_queue::{Queue, QueueState};
use vm_memory::{GuestAddress, Permissions};

const QUEUE_SIZE: u16 = 4;
/// The first region holds the queue and the indirect table, and is followed by a gap. The second one is followed by nothing.
const REGIONS: [(u64, usize); 2] = [(0, 0x6000), (0x8000, 0x2000)];
const INDIRECT_TABLE: u64 = 0x5000;
/// Addresses around the ends of the regions, and those from which a length overflows.
const ADDRESSES: [u64; 10] = [0, 0x4000, 0x5fff, 0x6000, 0x7fff, 0x8000, 0x9fff, 0xa000, u64::MAX - 0xfff, u64::MAX];
const LENGTHS: [u32; 6] = [0, 1, 2, 0x2000, 0x2001, u32::MAX];

struct NoInterrupt;

impl Interrupt for NoInterrupt {
    fn notify_queue(&self, _index: u16) {}

    fn notify_config(&self) {}
}

/// One descriptor: address, length, flags, next.
type Fields = (u64, u32, u16, u16);

/// Returns all descriptors of these flags and next fields.
fn descriptors(flags: &[u16], next: &[u16]) -> Vec<Fields> {
    let mut all = Vec::new();
    for address in ADDRESSES {
        for length in LENGTHS {
            for flags in flags {
                all.extend(next.iter().map(|next| (address, length, *flags, *next)));
            }
        }
    }
    all
}

/// Returns whether a buffer lies in one region. Those of length 0 lie nowhere and are not used.
fn is_inside(address: u64, length: u32) -> bool {
    let end = u128::from(address) + u128::from(length);
    REGIONS.iter().any(|(start, size)| address >= *start && end <= u128::from(*start) + *size as u128)
}

/// Returns what a correct device makes of a chain: the readable and the writable buffers. `None` if the chain is not allowed.
fn expected(chain: &[Fields], is_ended: bool) -> Option<[Vec<(u64, u32)>; 2]> {
    let mut buffers = [Vec::new(), Vec::new()];
    for (address, length, flags, _) in chain {
        let kind = usize::from(flags & WRITE != 0);
        if (!is_inside(*address, *length) && *length > 0) || (kind == 0 && !buffers[1].is_empty()) {
            return None;
        }
        if *length > 0 {
            buffers[kind].push((*address, *length));
        }
    }
    is_ended.then_some(buffers)
}

struct Checker {
    driver: Driver,
    memory: Arc<Memory>,
}

impl Checker {
    fn new() -> Checker {
        let regions = REGIONS.map(|(start, size)| (GuestAddress(start), size));
        let memory = Arc::new(Memory::from_ranges(&regions).unwrap());
        Checker { driver: Driver::new(memory.clone(), 0, QUEUE_SIZE), memory }
    }

    /// Returns what a new ring makes of the chain that begins with descriptor 0.
    fn collect(&mut self) -> Result<RequestBuffers, ChainError> {
        self.driver = Driver::new(self.memory.clone(), 0, QUEUE_SIZE);
        let (desc_table, avail_ring, used_ring) = self.driver.addresses();
        let state = QueueState {
            max_size: QUEUE_SIZE,
            size: QUEUE_SIZE,
            ready: true,
            desc_table,
            avail_ring,
            used_ring,
            next_avail: 0,
            next_used: 0,
            event_idx_enabled: false,
        };
        self.driver.offer(0);
        let kick = EventFd::new().unwrap().into();
        let mut ring = Ring::new(0, Queue::try_from(state).unwrap(), self.memory.clone(), kick, Arc::new(NoInterrupt));
        ring.as_mut().unwrap().pop_with_error().unwrap().1
    }

    /// Checks that the result is what is expected, and that every byte of it lies in guest memory.
    fn check(&mut self, chain: &[Fields], is_ended: bool) {
        let got = self.collect();
        let Some(expected) = expected(chain, is_ended) else {
            // A buffer of length 0 outside memory may fail the chain, too.
            return assert!(got.is_err(), "{chain:x?}: {got:?}");
        };
        let Ok(buffers) = got else {
            let is_empty_outside = |field: &Fields| field.1 == 0 && !is_inside(field.0, 0);
            return assert!(chain.iter().any(is_empty_outside), "{chain:x?}: {got:?}");
        };
        for (ranges, expected) in [(&buffers.readable, &expected[0]), (&buffers.writable, &expected[1])] {
            let found: Vec<_> = ranges.ranges().map(|range| (range.start, (range.end - range.start) as u32)).collect();
            assert_eq!(&found, expected, "{chain:x?}");
            let slices = ranges.slices(&self.memory, Permissions::ReadWrite).unwrap();
            assert_eq!(slices.iter().map(vm_memory::VolatileSlice::len).sum::<usize>(), ranges.len(), "{chain:x?}");
        }
    }
}

#[test]
fn chains_stay_inside_guest_memory() {
    let mut checker = Checker::new();
    // A last descriptor that names itself, the first one or one out of range does not end the chain.
    let ends = |flags: u16| flags & NEXT == 0;
    for first in descriptors(&[0, WRITE, NEXT, NEXT | WRITE], &[0, QUEUE_SIZE]) {
        let (address, length, flags, next) = first;
        checker.driver.describe(0, address, length, flags, next);
        checker.check(&[first], ends(flags));
    }
    for first in descriptors(&[NEXT, NEXT | WRITE], &[1]) {
        let (address, length, flags, next) = first;
        checker.driver.describe(0, address, length, flags, next);
        for second in descriptors(&[0, WRITE, NEXT], &[0]) {
            let (address, length, flags, next) = second;
            checker.driver.describe(1, address, length, flags, next);
            checker.check(&[first, second], ends(flags));
        }
    }
}

#[test]
fn chains_in_indirect_tables_stay_inside_guest_memory() {
    let mut checker = Checker::new();
    for count in [1u32, 2] {
        checker.driver.describe(0, INDIRECT_TABLE, 16 * count, INDIRECT, 0);
        for first in descriptors(&[NEXT, NEXT | WRITE], &[1]) {
            let (address, length, flags, next) = first;
            checker.driver.describe_in(INDIRECT_TABLE, 0, address, length, flags, next);
            for second in descriptors(&[0, WRITE], &[0]) {
                let (address, length, flags, next) = second;
                checker.driver.describe_in(INDIRECT_TABLE, 1, address, length, flags, next);
                match count {
                    // The second descriptor is behind the end of the table.
                    1 => checker.check(&[first], false),
                    _ => checker.check(&[first, second], true),
                }
            }
            if count == 1 {
                checker.driver.describe_in(INDIRECT_TABLE, 0, address, length, flags & !NEXT, 0);
                checker.check(&[(address, length, flags & !NEXT, 0)], true);
            }
        }
    }
    // The table itself: its address and length.
    for (address, length, flags, next) in descriptors(&[INDIRECT], &[0]) {
        checker.driver.describe(0, address, length, flags, next);
        if length == 0 || !length.is_multiple_of(16) || !is_inside(address, length) {
            assert!(checker.collect().is_err(), "a table of {length} bytes at {address:#x}");
        }
    }
}

#[test]
fn buffers_are_divided_without_a_gap_or_an_overlap() {
    const PIECES: usize = 3;
    const MAX_LENGTH: u32 = 3;
    let mut checker = Checker::new();
    for lengths in 0..(MAX_LENGTH + 1).pow(PIECES as u32) {
        let length_of = |piece: u32| lengths / (MAX_LENGTH + 1).pow(piece) % (MAX_LENGTH + 1);
        for piece in 0..PIECES as u32 {
            let flags = if piece + 1 < PIECES as u32 { NEXT } else { 0 };
            checker.driver.describe(
                piece as u16,
                0x8000 + 0x100 * u64::from(piece),
                length_of(piece),
                flags,
                piece as u16 + 1,
            );
        }
        let whole = checker.collect().unwrap().readable;
        let bytes = |ranges: &MemoryRanges| ranges.ranges().flatten().collect::<Vec<u64>>();
        for count in 0..=whole.len() + 1 {
            for split in [MemoryRanges::split_front, MemoryRanges::split_back] {
                let mut rest = whole.clone();
                match split(&mut rest, count) {
                    Some(part) => {
                        assert_eq!((part.len(), rest.len()), (count, whole.len() - count));
                        let joined: Vec<u64> = [bytes(&part), bytes(&rest)].concat();
                        let swapped: Vec<u64> = [bytes(&rest), bytes(&part)].concat();
                        assert!(joined == bytes(&whole) || swapped == bytes(&whole), "{whole:?} at {count}");
                    }
                    None => assert!(count > whole.len() && rest == whole, "{whole:?} at {count}"),
                }
            }
        }
    }
}
