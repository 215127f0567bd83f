//! Owns: the speed of the host's time-stamp counter, which is what an emulated guest reads as its own.
//! Told to the guest (`tsc_early_khz=`), it needs no calibration against an emulated timer: on a busy host that takes
//! a third of a second, and often fails, and then the guest's clock has ticks of 4 ms.
#![allow(unsafe_code)] // reason: the instruction RDTSC.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long it is measured.
const WINDOW: Duration = Duration::from_millis(2);
/// What a processor of this time can have, in kHz. Anything else is a failed measurement.
const PLAUSIBLE: std::ops::RangeInclusive<u128> = 400_000..=10_000_000;

/// Kernel parameters for an emulated machine: its TSC's speed, and no local APIC timer, which would be calibrated too
/// (the PIT does its work).
pub(super) fn parameters() -> &'static [String] {
    static WORDS: OnceLock<Vec<String>> = OnceLock::new();
    WORDS.get_or_init(|| match emulated_tsc() {
        Some(word) => vec!["nolapic_timer".to_owned(), word],
        None => Vec::new(),
    })
}

/// The kernel parameter for the speed of an emulated guest's TSC; none where this machine's counter does not run like a clock.
pub fn emulated_tsc() -> Option<String> {
    measure().map(|khz| format!("tsc_early_khz={khz}"))
}

/// The counter at a moment: of several readings the one that took least time.
fn reading() -> (Instant, u64) {
    let one = || {
        let before = Instant::now();
        // SAFETY: RDTSC exists on every x86-64 processor and changes nothing but the result registers.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        (before.elapsed(), before, ticks)
    };
    let (_, at, ticks) = (0..8).map(|_| one()).min_by_key(|(took, ..)| *took).unwrap_or_else(one);
    (at, ticks)
}

fn measure() -> Option<u32> {
    let (began, first) = reading();
    while began.elapsed() < WINDOW {
        std::hint::spin_loop();
    }
    let (ended, second) = reading();
    let ticks = u128::from(second.checked_sub(first)?);
    let khz = ticks * 1_000_000 / (ended - began).as_nanos().max(1);
    PLAUSIBLE.contains(&khz).then(|| u32::try_from(khz).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        // One of them may be wrong when the node is busy or the machine itself has been stopped for a while.
        let mut pairs = (0..50).map(|_| measure().zip(measure()));
        if pairs.clone().all(|pair| pair.is_none()) {
            println!("skipped: this machine's time-stamp counter does not run like a clock");
            return;
        }
        assert!(pairs.any(|pair| pair.is_some_and(|(one, two)| one.abs_diff(two) < one / 50)));
    }
}
