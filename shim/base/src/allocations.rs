//! Measures the heap memory and the number of allocations of a piece of work, so that a fuzz harness can compare its cost with the
//! size of its input. Only with the feature `fuzz`; the program must have [`CountingAllocator`] as its global allocator.
//!
//! Only the calling thread is measured. Memory that the work frees and that was allocated before it counts as negative.
#![allow(unsafe_code)] // reason: a global allocator is an unsafe trait.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, which counts for [`measure`].
#[derive(Debug)]
pub struct CountingAllocator;

/// The cost of a piece of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationCost {
    /// The largest amount of memory in bytes that was allocated at the same time. A buffer that grows counts twice while it is copied.
    pub peak: usize,
    /// The memory in bytes that is still allocated afterwards.
    pub kept: usize,
    /// The number of allocations; also of those that make a buffer larger or smaller.
    pub count: usize,
}

/// The largest cost that an input of a given size may cause.
#[derive(Clone, Copy, Debug)]
pub struct AllocationLimit {
    /// The memory in bytes for any input.
    pub base: usize,
    /// The memory in bytes for each byte of the input.
    pub per_byte: usize,
    /// The number of allocations for any input.
    pub base_count: usize,
    /// The number of allocations for each byte of the input.
    pub count_per_byte: usize,
}

#[derive(Clone, Copy, Default)]
struct Counters {
    live: isize,
    peak: isize,
    count: usize,
}

thread_local! {
    static COUNTERS: Cell<Counters> = const { Cell::new(Counters { live: 0, peak: 0, count: 0 }) };
}

/// Records that `new` bytes were allocated and then `old` bytes were freed.
fn record(new: usize, old: usize) {
    // Fails only while the thread ends.
    let _ = COUNTERS.try_with(|counters| {
        let mut now = counters.get();
        now.live = now.live.saturating_add_unsigned(new);
        now.peak = now.peak.max(now.live);
        now.live = now.live.saturating_sub_unsigned(old);
        now.count += usize::from(new > 0);
        counters.set(now);
    });
}

// SAFETY: all functions pass their arguments to the system's allocator unchanged, and return what it returns.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        record(0, layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        record(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        record(size, layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::realloc`.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// Does the work and returns its result and its cost.
///
/// # Panics
///
/// If [`CountingAllocator`] is not the program's global allocator.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, AllocationCost) {
    let outer = COUNTERS.replace(Counters::default());
    drop(std::hint::black_box(Box::new(0_u8)));
    assert_eq!(COUNTERS.replace(Counters::default()).count, 1, "CountingAllocator is not the global allocator");
    let result = work();
    let inner = COUNTERS.get();
    COUNTERS.set(Counters {
        live: outer.live + inner.live,
        peak: outer.peak.max(outer.live + inner.peak),
        count: outer.count + inner.count,
    });
    let bytes = |number| usize::try_from(number).unwrap_or(0);
    (result, AllocationCost { peak: bytes(inner.peak), kept: bytes(inner.live), count: inner.count })
}

impl AllocationLimit {
    /// Does the work on an input of `size` bytes and returns its result.
    ///
    /// # Panics
    ///
    /// If the cost exceeds the limit, or as [`measure`].
    pub fn enforce<T>(self, size: usize, work: impl FnOnce() -> T) -> T {
        let (result, cost) = measure(work);
        let (peak, count) = (self.base + self.per_byte * size, self.base_count + self.count_per_byte * size);
        assert!(cost.peak <= peak, "{size} bytes of input took {} bytes of memory, more than {peak}", cost.peak);
        assert!(cost.count <= count, "{size} bytes of input took {} allocations, more than {count}", cost.count);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn the_peak_and_the_allocations_are_counted() {
        let (_kept, cost) = measure(|| {
            let first: Vec<u8> = std::hint::black_box(Vec::with_capacity(1000));
            drop(first);
            let mut second: Vec<u8> = std::hint::black_box(Vec::with_capacity(100));
            second.reserve_exact(300);
            second
        });
        assert_eq!(cost, AllocationCost { peak: 1000, kept: 300, count: 3 });
        let (inner, outer) = measure(|| measure(|| drop(std::hint::black_box(vec![1_u8; 70]))).1);
        assert_eq!((inner.peak, outer.peak, outer.count), (70, 70, inner.count));
    }

    #[test]
    fn work_that_exceeds_its_limit_fails() {
        let limit = AllocationLimit { base: 10, per_byte: 2, base_count: 1, count_per_byte: 0 };
        let allocate = |bytes: usize| move || drop(std::hint::black_box(vec![1_u8; bytes]));
        limit.enforce(5, allocate(20));
        assert!(std::panic::catch_unwind(|| limit.enforce(5, allocate(21))).is_err());
        let twice = || (allocate(1)(), allocate(1)());
        assert!(std::panic::catch_unwind(|| limit.enforce(5, twice)).is_err());
    }
}
