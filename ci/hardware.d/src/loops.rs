//! Implements memory loops: first touch of fresh memory, a pointer chase, and streaming. All are single-threaded and allocate the
//! memory that they use.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The size of the smallest page in bytes.
const PAGE: usize = 4096;
/// The loads of the chase between two reads of the clock.
const BATCH: u32 = 4096;

/// A cache line, so that each step of the chase loads another one.
#[derive(Clone)]
#[repr(align(64))]
struct CacheLine {
    next: usize,
}

/// Writes one byte to each page of `mib` MiB of newly allocated memory; returns nanoseconds per page.
pub fn touch(mib: usize) -> f64 {
    let bytes = mib << 20;
    // The allocator gets this much from the kernel as fresh zero pages, which are not written.
    let mut memory = vec![0u8; bytes];
    let start = Instant::now();
    for index in (0..bytes).step_by(PAGE) {
        memory[index] = 1;
    }
    let took = start.elapsed();
    black_box(&memory);
    took.as_nanos() as f64 / (bytes / PAGE).max(1) as f64
}

/// Follows pointers through `mib` MiB in random order for `time`; returns nanoseconds per load.
pub fn chase(mib: usize, time: Duration) -> f64 {
    let lines = random_cycle((mib << 20) / size_of::<CacheLine>());
    let (mut index, mut loads) = (0, 0u64);
    let start = Instant::now();
    loop {
        for _ in 0..BATCH {
            index = lines[index].next;
        }
        loads += u64::from(BATCH);
        let took = start.elapsed();
        if took >= time {
            black_box(index);
            return took.as_nanos() as f64 / loads as f64;
        }
    }
}

/// Returns lines each of which contains the index of the next one, in one random cycle through all (Sattolo's algorithm).
fn random_cycle(count: usize) -> Vec<CacheLine> {
    let mut lines: Vec<CacheLine> = (0..count.max(1)).map(|next| CacheLine { next }).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for index in (1..lines.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let other = (state % index as u64) as usize;
        let next = lines[index].next;
        lines[index].next = std::mem::replace(&mut lines[other].next, next);
    }
    lines
}

/// Reads `mib` MiB repeatedly from begin to end for `time`, then writes them likewise; returns bytes per second of each.
pub fn stream(mib: usize, time: Duration) -> (f64, f64) {
    let mut words = vec![1u64; (mib << 20) / size_of::<u64>()];
    let bytes = size_of_val(words.as_slice()) as f64;
    let read = rate(time, bytes, || {
        black_box(words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
    });
    let mut value = 1;
    let written = rate(time, bytes, || {
        value += 1;
        black_box(&mut words).fill(value);
    });
    (read, written)
}

/// Returns the bytes per second of a pass over this many bytes, repeated for at least `time`.
fn rate(time: Duration, bytes: f64, mut pass: impl FnMut()) -> f64 {
    let (start, mut passes) = (Instant::now(), 0.0);
    loop {
        pass();
        passes += 1.0;
        let took = start.elapsed();
        if took >= time {
            return passes * bytes / took.as_secs_f64();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chase_visits_every_line() {
        for count in [1, 2, 3, 1000] {
            let lines = random_cycle(count);
            let (mut index, mut steps) = (0, 0);
            loop {
                index = lines[index].next;
                steps += 1;
                if index == 0 {
                    break;
                }
            }
            assert_eq!(steps, count, "one cycle through all of them");
        }
    }

    #[test]
    fn loops_return_positive_figures() {
        let (read, written) = stream(1, Duration::from_millis(5));
        for figure in [touch(1), chase(1, Duration::from_millis(5)), read, written] {
            assert!(figure.is_finite() && figure > 0.0, "{figure}");
        }
    }
}
