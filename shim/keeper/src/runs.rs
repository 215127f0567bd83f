//! Owns: when a machine runs again after it has ended, by its run strategy. Pure.
//! Source: KubeVirt's documentation of run strategies.

use nacelle_model::machine::RunStrategy;
use std::time::Duration;

/// One that ran for so long has not crashed.
const SOUND: Duration = Duration::from_secs(120);
/// The first wait before one that crashes runs again, and the longest.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));

/// What somebody wants of it, beside its strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Nothing.
    None,
    /// It shall run.
    On,
    /// It shall be off.
    Off,
    /// It shall end and run again.
    Again,
    /// It shall end, and the container with it.
    End,
}

/// What comes after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It runs again after this time.
    Again(Duration),
    /// It is off, until somebody wants it to run.
    Off,
    /// The container ends.
    End,
}

/// The runs of one machine.
#[derive(Debug)]
pub struct Runs {
    strategy: Option<RunStrategy>,
    crashes: u32,
}

impl Runs {
    /// Of a machine with this strategy; none: its end is its container's.
    pub fn new(strategy: Option<RunStrategy>) -> Runs {
        Runs { strategy, crashes: 0 }
    }

    /// Whether it runs at first.
    pub fn begins(&self) -> bool {
        !matches!(self.strategy, Some(RunStrategy::Manual | RunStrategy::Halted))
    }

    /// What comes after a run that has lasted so long and ended with this code, with this order given meanwhile.
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
        // The first time nothing is known of it yet.
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
