//! Lets the guest's clock follow the node's. The host sends the node's time at a moment of the guest's monotonic clock, which no
//! correction changes, so that a late request sets the right time all the same. Small deviations are slewed and large ones are
//! stepped, as by other time daemons.

use nacelle_base::{Classify, FailureKind};
use nacelle_proto::agent::ClockReading;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime, clock_settime};
use std::io;

/// The deviation from which on the clock is stepped, in nanoseconds. Slewing a smaller one takes at most 256 seconds.
const STEP: i64 = 128_000_000;
/// The greatest age of a reference in nanoseconds.
const MAX_AGE: i64 = 60_000_000_000;

/// Why the clock was not corrected.
#[derive(Debug, thiserror::Error)]
pub enum ClockError {
    /// The clock is the node's.
    #[error("cannot correct the clock: it is the node's, because the pod has no guest")]
    NodeClock,
    /// The reference is not of a moment in the last minute.
    #[error(
        "cannot correct the clock: reference.monotonic_nanos is {got}, and 0 to {now}, at most a minute ago, is expected"
    )]
    Moment {
        /// The moment.
        got: i64,
        /// The guest's monotonic clock.
        now: i64,
    },
    /// The time is invalid.
    #[error("cannot correct the clock: reference.unix_nanos is {got}, and a time after 1970 is expected")]
    Time {
        /// The time in nanoseconds since 1970.
        got: i64,
    },
    /// A system call failed.
    #[error("cannot {what} the clock")]
    Call {
        /// The action: "read".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for ClockError {
    fn kind(&self) -> FailureKind {
        match self {
            ClockError::NodeClock => FailureKind::Unsupported,
            ClockError::Moment { .. } | ClockError::Time { .. } => FailureKind::Invalid,
            ClockError::Call { .. } => FailureKind::Internal,
        }
    }
}

/// How the clock reaches the node's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Correction {
    /// Runs faster or slower until this many microseconds are made up for.
    Slew {
        /// Positive if the clock is behind.
        micros: i64,
    },
    /// Jumps.
    Step {
        /// The time now, in nanoseconds since 1970.
        to: i64,
        /// The deviation in nanoseconds; positive if the clock was behind.
        by: i64,
    },
}

/// Corrects the guest's clock if there is a reference, and returns the clock. Fails without `has_guest`: the clock is the node's.
pub fn follow(reference: Option<ClockReading>, has_guest: bool) -> Result<ClockReading, ClockError> {
    if !has_guest {
        return Err(ClockError::NodeClock);
    }
    let now = read()?;
    let Some(reference) = reference else { return Ok(now) };
    match correction(reference, now)? {
        Correction::Slew { micros } => {
            crate::sys::slew_clock(micros).map_err(|source| ClockError::Call { what: "slew", source })?;
        }
        Correction::Step { to, by } => {
            set(to).map_err(|source| ClockError::Call { what: "set", source })?;
            tracing::info!(
                seconds = by / 1_000_000_000,
                nanos = by % 1_000_000_000,
                "the clock was set to the node's time"
            );
        }
    }
    read()
}

/// Returns the correction that a reference demands; `now` is the clock to correct.
fn correction(reference: ClockReading, now: ClockReading) -> Result<Correction, ClockError> {
    let (got, monotonic) = (reference.monotonic_nanos, now.monotonic_nanos);
    let age = monotonic.checked_sub(got).filter(|age| got >= 0 && (0..=MAX_AGE).contains(age));
    let age = age.ok_or(ClockError::Moment { got, now: monotonic })?;
    let got = reference.unix_nanos;
    let time = Some(got).filter(|got| *got > 0).and_then(|got| got.checked_add(age)).ok_or(ClockError::Time { got })?;
    let by = time.saturating_sub(now.unix_nanos);
    match by.unsigned_abs() < STEP.unsigned_abs() {
        true => Ok(Correction::Slew { micros: by / 1000 }),
        false => Ok(Correction::Step { to: time, by }),
    }
}

/// Reads both clocks.
fn read() -> Result<ClockReading, ClockError> {
    let nanos = |clock| {
        let time = clock_gettime(clock).map_err(|error| ClockError::Call { what: "read", source: error.into() })?;
        Ok(time.tv_sec().saturating_mul(1_000_000_000).saturating_add(time.tv_nsec()))
    };
    Ok(ClockReading { monotonic_nanos: nanos(ClockId::CLOCK_MONOTONIC)?, unix_nanos: nanos(ClockId::CLOCK_REALTIME)? })
}

/// Sets the clock to nanoseconds since 1970, and ends what is left of an earlier slew.
pub fn set(nanos: i64) -> io::Result<()> {
    crate::sys::slew_clock(0)?;
    let time = TimeSpec::new(nanos / 1_000_000_000, nanos % 1_000_000_000);
    Ok(clock_settime(ClockId::CLOCK_REALTIME, time)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    fn reading(monotonic_nanos: i64, unix_nanos: i64) -> ClockReading {
        ClockReading { monotonic_nanos, unix_nanos }
    }

    #[test]
    fn a_large_deviation_is_stepped_and_a_small_one_slewed() {
        let now = reading(100 * SECOND, 5000 * SECOND);
        let of = |unix| correction(reading(90 * SECOND, unix), now).unwrap();
        // The reference is ten seconds old.
        assert_eq!(of(4990 * SECOND), Correction::Slew { micros: 0 });
        assert_eq!(of(4990 * SECOND + 3_000_000), Correction::Slew { micros: 3000 });
        assert_eq!(of(4990 * SECOND - 127_000_000), Correction::Slew { micros: -127_000 });
        assert_eq!(of(8590 * SECOND), Correction::Step { to: 8600 * SECOND, by: 3600 * SECOND });
        assert_eq!(of(1390 * SECOND), Correction::Step { to: 1400 * SECOND, by: -3600 * SECOND });
        assert_eq!(of(4990 * SECOND + STEP), Correction::Step { to: 5000 * SECOND + STEP, by: STEP });
    }

    #[test]
    fn a_reference_outside_of_its_bounds_is_refused() {
        let now = reading(100 * SECOND, 5000 * SECOND);
        let of = |monotonic, unix| correction(reading(monotonic, unix), now).unwrap_err();
        for monotonic in [i64::MIN, -1, 39 * SECOND, 101 * SECOND, i64::MAX] {
            assert!(matches!(of(monotonic, SECOND), ClockError::Moment { .. }), "{monotonic}");
        }
        for unix in [i64::MIN, -1, 0, i64::MAX] {
            assert!(matches!(of(90 * SECOND, unix), ClockError::Time { .. }), "{unix}");
        }
        assert!(correction(reading(100 * SECOND, 1), reading(100 * SECOND, i64::MIN)).is_ok());
    }

    #[test]
    fn the_clock_of_the_node_is_never_set() {
        let refused = follow(Some(reading(1, 1)), false).unwrap_err();
        assert_eq!(refused.kind(), FailureKind::Unsupported);
        assert!(follow(None, false).is_err());
        let now = follow(None, true).unwrap();
        assert!(now.monotonic_nanos > 0 && now.unix_nanos > now.monotonic_nanos);
    }
}
