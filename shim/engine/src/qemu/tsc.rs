//! Measures the frequency of the host's time-stamp counter, which an emulated guest reads as its own. With the parameter
//! `tsc_early_khz=` the guest need not calibrate it against an emulated timer, which on a busy host takes a third of a
//! second and often fails; then the guest's clock has a resolution of 4 ms only.
#![allow(unsafe_code)] // reason: the instruction RDTSC.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The duration of one measurement.
const WINDOW: Duration = Duration::from_millis(2);
/// The plausible frequencies in kHz. Any other result is a failed measurement.
const PLAUSIBLE: std::ops::RangeInclusive<u128> = 400_000..=10_000_000;

/// Returns the kernel parameters for an emulated VM: its TSC's frequency, and no local APIC timer, which would need
/// calibration too (the PIT replaces it).
pub(super) fn kernel_parameters() -> &'static [String] {
    static PARAMETERS: OnceLock<Vec<String>> = OnceLock::new();
    PARAMETERS.get_or_init(|| match emulated_tsc_parameter() {
        Some(parameter) => vec!["nolapic_timer".to_owned(), parameter],
        None => Vec::new(),
    })
}

/// Returns the kernel parameter with the frequency of an emulated guest's TSC; `None` if this host's counter is not constant.
pub fn emulated_tsc_parameter() -> Option<String> {
    measure_khz().map(|khz| format!("tsc_early_khz={khz}"))
}

/// Returns the counter and its time: of several readings the one that took the least time.
fn read_counter() -> (Instant, u64) {
    let one = || {
        let before = Instant::now();
        // SAFETY: RDTSC exists on every x86-64 processor and changes nothing but the result registers.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        (before.elapsed(), before, ticks)
    };
    let (_, at, ticks) = (0..8).map(|_| one()).min_by_key(|(took, ..)| *took).unwrap_or_else(one);
    (at, ticks)
}

fn measure_khz() -> Option<u32> {
    let (began, first) = read_counter();
    while began.elapsed() < WINDOW {
        std::hint::spin_loop();
    }
    let (ended, second) = read_counter();
    let ticks = u128::from(second.checked_sub(first)?);
    let khz = ticks * 1_000_000 / (ended - began).as_nanos().max(1);
    PLAUSIBLE.contains(&khz).then(|| u32::try_from(khz).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        // A measurement may be wrong when the node is busy, or was itself paused for a while.
        let mut pairs = (0..50).map(|_| measure_khz().zip(measure_khz()));
        if pairs.clone().all(|pair| pair.is_none()) {
            println!("skipped: this machine's time-stamp counter does not run like a clock");
            return;
        }
        assert!(pairs.any(|pair| pair.is_some_and(|(one, two)| one.abs_diff(two) < one / 50)));
    }
}
