//! Decides by the run strategy (see KubeVirt's documentation of run strategies) whether and when a VM runs again after it has
//! ended. The functions are pure.

use nacelle_model::machine::RunStrategy;
use std::time::Duration;

/// The time after which a run does not count as a crash.
const HEALTHY_RUN: Duration = Duration::from_secs(120);
/// The first and the longest pause before a restart of a VM that crashes.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));

/// The requested target state, in addition to the run strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// There is no request.
    None,
    /// The VM must run.
    Start,
    /// The VM must be stopped.
    Stop,
    /// The VM must end and run again.
    Restart,
    /// The VM and its container must end.
    End,
}

/// The action after the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRun {
    /// The VM runs again after this time.
    Restart(Duration),
    /// The VM is stopped until a user starts it.
    StayOff,
    /// The container ends.
    EndContainer,
}

/// The history of the runs of one VM.
#[derive(Debug)]
pub struct RestartPolicy {
    strategy: Option<RunStrategy>,
    crashes: u32,
}

impl RestartPolicy {
    /// Returns the runs of a VM with this strategy; with `None`, the container ends with the VM.
    pub fn new(strategy: Option<RunStrategy>) -> RestartPolicy {
        RestartPolicy { strategy, crashes: 0 }
    }

    /// Returns whether the VM runs at first.
    pub fn starts_immediately(&self) -> bool {
        !matches!(self.strategy, Some(RunStrategy::Manual | RunStrategy::Halted))
    }

    /// Returns the action after a run of this duration and exit code, during which `request` was requested.
    pub fn after_run(&mut self, exit_code: u32, duration: Duration, request: PowerRequest) -> AfterRun {
        match request {
            PowerRequest::End => return AfterRun::EndContainer,
            PowerRequest::Stop if self.strategy.is_some() => return AfterRun::StayOff,
            PowerRequest::Restart => {
                self.crashes = 0;
                return AfterRun::Restart(Duration::ZERO);
            }
            PowerRequest::Stop | PowerRequest::None | PowerRequest::Start => {}
        }
        match self.strategy {
            None | Some(RunStrategy::Once) => AfterRun::EndContainer,
            Some(RunStrategy::Manual | RunStrategy::Halted) => AfterRun::StayOff,
            Some(RunStrategy::RerunOnFailure) if exit_code == 0 => AfterRun::StayOff,
            Some(RunStrategy::RerunOnFailure | RunStrategy::Always) => AfterRun::Restart(self.restart_delay(duration)),
        }
    }

    fn restart_delay(&mut self, duration: Duration) -> Duration {
        if duration >= HEALTHY_RUN {
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
    fn each_run_strategy_has_its_action_after_a_run() {
        let next = |strategy, exit_code, request| RestartPolicy::new(strategy).after_run(exit_code, LONG, request);
        let again = AfterRun::Restart(Duration::ZERO);
        use RunStrategy::{Always, Halted, Manual, Once, RerunOnFailure};
        for (strategy, clean, crashed) in [
            (None, AfterRun::EndContainer, AfterRun::EndContainer),
            (Some(Always), again, again),
            (Some(RerunOnFailure), AfterRun::StayOff, again),
            (Some(Once), AfterRun::EndContainer, AfterRun::EndContainer),
            (Some(Manual), AfterRun::StayOff, AfterRun::StayOff),
            (Some(Halted), AfterRun::StayOff, AfterRun::StayOff),
        ] {
            assert_eq!(next(strategy, 0, PowerRequest::None), clean, "{strategy:?}");
            assert_eq!(next(strategy, 134, PowerRequest::None), crashed, "{strategy:?}");
            assert_eq!(next(strategy, 0, PowerRequest::End), AfterRun::EndContainer, "{strategy:?}");
            assert_eq!(next(strategy, 0, PowerRequest::Restart), again, "{strategy:?}");
            let off = if strategy.is_some() { AfterRun::StayOff } else { AfterRun::EndContainer };
            assert_eq!(next(strategy, 0, PowerRequest::Stop), off, "{strategy:?}");
        }
        assert!(
            !RestartPolicy::new(Some(Halted)).starts_immediately()
                && RestartPolicy::new(Some(Always)).starts_immediately()
                && RestartPolicy::new(None).starts_immediately()
        );
    }

    #[test]
    fn the_restart_delay_grows_with_each_crash() {
        let mut runs = RestartPolicy::new(Some(RunStrategy::Always));
        let mut pause = || match runs.after_run(134, SHORT, PowerRequest::None) {
            AfterRun::Restart(pause) => pause.as_secs(),
            other => panic!("{other:?}"),
        };
        assert_eq!([pause(), pause(), pause(), pause()], [0, 4, 8, 16]);
        for _ in 0..40 {
            pause();
        }
        assert_eq!(pause(), 300);
        assert_eq!(runs.after_run(0, LONG, PowerRequest::None), AfterRun::Restart(Duration::ZERO));
        assert_eq!(runs.crashes, 0);
    }
}
