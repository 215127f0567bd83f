//! Decides by the run strategy (see KubeVirt's documentation of run strategies) whether and when a VM runs again after it has
//! ended. The functions are pure.

use nacelle_model::machine::RunStrategy;
use std::time::Duration;

/// The time after which a run does not count as a crash.
const SOUND: Duration = Duration::from_secs(120);
/// The first and the longest pause before a restart of a VM that crashes.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));

/// The requested target state, in addition to the run strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// There is no request.
    None,
    /// The VM must run.
    On,
    /// The VM must be stopped.
    Off,
    /// The VM must end and run again.
    Again,
    /// The VM and its container must end.
    End,
}

/// The action after the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The VM runs again after this time.
    Again(Duration),
    /// The VM is stopped until a user starts it.
    Off,
    /// The container ends.
    End,
}

/// The history of the runs of one VM.
#[derive(Debug)]
pub struct Runs {
    strategy: Option<RunStrategy>,
    crashes: u32,
}

impl Runs {
    /// Returns the runs of a VM with this strategy; with `None`, the container ends with the VM.
    pub fn new(strategy: Option<RunStrategy>) -> Runs {
        Runs { strategy, crashes: 0 }
    }

    /// Returns whether the VM runs at first.
    pub fn begins(&self) -> bool {
        !matches!(self.strategy, Some(RunStrategy::Manual | RunStrategy::Halted))
    }

    /// Returns the action after a run of this duration and exit code, during which `order` was requested.
    pub fn next(&mut self, code: u32, lasted: Duration, order: Order) -> Next {
        match order {
            Order::End => return Next::End,
            Order::Off if self.strategy.is_some() => return Next::Off,
            Order::Again => {
                self.crashes = 0;
                return Next::Again(Duration::ZERO);
            }
            Order::Off | Order::None | Order::On => {}
        }
        match self.strategy {
            None | Some(RunStrategy::Once) => Next::End,
            Some(RunStrategy::Manual | RunStrategy::Halted) => Next::Off,
            Some(RunStrategy::RerunOnFailure) if code == 0 => Next::Off,
            Some(RunStrategy::RerunOnFailure | RunStrategy::Always) => Next::Again(self.pause(lasted)),
        }
    }

    fn pause(&mut self, lasted: Duration) -> Duration {
        if lasted >= SOUND {
            self.crashes = 0;
            return Duration::ZERO;
        }
        let pause = BACK_OFF.0.saturating_mul(1 << self.crashes.min(16));
        self.crashes += 1;
        // The first crash may be an accident, so there is no pause.
        if self.crashes == 1 { Duration::ZERO } else { pause.min(BACK_OFF.1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_secs(1);
    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn each_strategy_has_its_next() {
        let next = |strategy, code, order| Runs::new(strategy).next(code, LONG, order);
        let again = Next::Again(Duration::ZERO);
        use RunStrategy::{Always, Halted, Manual, Once, RerunOnFailure};
        for (strategy, clean, crashed) in [
            (None, Next::End, Next::End),
            (Some(Always), again, again),
            (Some(RerunOnFailure), Next::Off, again),
            (Some(Once), Next::End, Next::End),
            (Some(Manual), Next::Off, Next::Off),
            (Some(Halted), Next::Off, Next::Off),
        ] {
            assert_eq!(next(strategy, 0, Order::None), clean, "{strategy:?}");
            assert_eq!(next(strategy, 134, Order::None), crashed, "{strategy:?}");
            assert_eq!(next(strategy, 0, Order::End), Next::End, "{strategy:?}");
            assert_eq!(next(strategy, 0, Order::Again), again, "{strategy:?}");
            let off = if strategy.is_some() { Next::Off } else { Next::End };
            assert_eq!(next(strategy, 0, Order::Off), off, "{strategy:?}");
        }
        assert!(!Runs::new(Some(Halted)).begins() && Runs::new(Some(Always)).begins() && Runs::new(None).begins());
    }

    #[test]
    fn one_that_crashes_waits_longer_each_time() {
        let mut runs = Runs::new(Some(RunStrategy::Always));
        let mut pause = || match runs.next(134, SHORT, Order::None) {
            Next::Again(pause) => pause.as_secs(),
            other => panic!("{other:?}"),
        };
        assert_eq!([pause(), pause(), pause(), pause()], [0, 4, 8, 16]);
        for _ in 0..40 {
            pause();
        }
        assert_eq!(pause(), 300);
        assert_eq!(runs.next(0, LONG, Order::None), Next::Again(Duration::ZERO));
        assert_eq!(runs.crashes, 0);
    }
}
