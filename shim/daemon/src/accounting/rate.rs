//! Computes the growth rate of a counter between two measurements that are at least one second apart.

use std::time::Duration;

/// The shortest interval over which a rate is computed.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// The previous value of a counter, and its last rate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    base: Option<(Duration, u64)>,
    last: Option<u64>,
}

impl Rate {
    /// Adds a measurement at a time of any monotonic clock, and returns the growth per second since an earlier one.
    pub fn update(&mut self, at: Duration, count: u64) -> Option<u64> {
        let next = match self.base {
            // The counter was reset.
            Some((_, before)) if count < before => None,
            None => None,
            Some((then, _)) if at.saturating_sub(then) < MIN_INTERVAL => return self.last,
            Some((then, before)) => {
                let grown = u128::from(count - before).saturating_mul(Duration::from_secs(1).as_nanos());
                let per_second = grown / at.saturating_sub(then).as_nanos().max(1);
                Some(u64::try_from(per_second).unwrap_or(u64::MAX))
            }
        };
        (self.base, self.last) = (Some((at, count)), next);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn growth_is_per_second_since_the_time_before() {
        let mut rate = Rate::default();
        let mut at = |millis, count| rate.update(Duration::from_millis(millis), count);
        assert_eq!(at(1000, 500), None);
        assert_eq!(at(3000, 2500), Some(1000));
        // A measurement too soon after the last one returns the same rate and keeps the interval open.
        assert_eq!(at(3400, 9999), Some(1000));
        assert_eq!(at(4000, 12_500), Some(10_000));
        // A counter that was reset has no rate yet.
        assert_eq!(at(6000, 10), None);
        assert_eq!(at(8000, 10), Some(0));
        // A clock that runs backwards.
        assert_eq!(at(10, 20), Some(0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn no_figures_make_it_panic(steps in prop::collection::vec((any::<u64>(), any::<u64>()), 0..6)) {
            let mut rate = Rate::default();
            for (at, count) in steps {
                rate.update(Duration::from_nanos(at), count);
            }
        }
    }
}
