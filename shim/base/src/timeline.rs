//! Records the duration of each step of a pod's and a container's start.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The maximum number of steps of one timeline.
pub const MAX_STEPS: usize = 64;

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineStep {
    /// The name of the step: "network namespace", "kernel".
    pub what: String,
    /// The beginning in nanoseconds since 1970.
    pub at: i64,
    /// The duration in microseconds.
    pub micros: u64,
    /// The step failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

/// A list of completed steps; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Timeline(Arc<Mutex<Vec<TimelineStep>>>);

impl Timeline {
    /// Returns a timeline that begins with these steps.
    pub fn from_steps(steps: Vec<TimelineStep>) -> Timeline {
        Timeline(Arc::new(Mutex::new(steps)))
    }

    /// Awaits the future and records its duration. The step counts as failed if this future is dropped before its end.
    pub async fn measure<T, E>(&self, what: &'static str, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let mut running = self.begin(what);
        let result = work.await;
        running.failed = result.is_err();
        result
    }

    /// Begins a step that ends when the returned value is dropped, successfully if `done` was called.
    pub fn begin(&self, what: &'static str) -> RunningStep {
        RunningStep { timeline: self.clone(), what, at: unix_nanos(), since: Instant::now(), failed: true }
    }

    /// Adds measured steps; those beyond `MAX_STEPS` are dropped.
    pub fn add(&self, steps: impl IntoIterator<Item = TimelineStep>) {
        let mut recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let remaining = MAX_STEPS.saturating_sub(recorded.len());
        recorded.extend(steps.into_iter().take(remaining));
    }

    /// Returns the steps in the order of their beginnings.
    pub fn steps(&self) -> Vec<TimelineStep> {
        let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        steps.sort_by_key(|step| step.at);
        steps
    }
}

/// Prints the steps on one line: "network namespace 1.2 ms, machine 30.4 ms (failed)".
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, step) in self.steps().iter().enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            let failed = if step.failed { " (failed)" } else { "" };
            write!(f, "{comma}{} {}{failed}", step.what, MicrosAsMillis(step.micros))?;
        }
        Ok(())
    }
}

/// Microseconds, printed as milliseconds: "1.2 ms".
pub struct MicrosAsMillis(pub u64);

impl fmt::Display for MicrosAsMillis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} ms", self.0 / 1000, self.0 % 1000 / 100)
    }
}

/// A step in progress.
pub struct RunningStep {
    timeline: Timeline,
    what: &'static str,
    at: i64,
    since: Instant,
    failed: bool,
}

impl RunningStep {
    /// Ends the step successfully.
    pub fn done(mut self) {
        self.failed = false;
    }
}

impl Drop for RunningStep {
    fn drop(&mut self) {
        let micros = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let step = TimelineStep { what: self.what.to_owned(), at: self.at, micros, failed: self.failed };
        self.timeline.add([step]);
    }
}

/// Returns the current time in nanoseconds since the Unix epoch, 0 if the clock is before it.
pub fn unix_nanos() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(what: &str, at: i64) -> TimelineStep {
        TimelineStep { what: what.into(), at, micros: 1_250, failed: false }
    }

    #[test]
    fn steps_are_kept_in_the_order_in_which_they_began() {
        let timeline = Timeline::default();
        timeline.add([step("second", 2), step("first", 1)]);
        assert_eq!(timeline.to_string(), "first 1.2 ms, second 1.2 ms");
        assert_eq!(Timeline::from_steps(timeline.steps()).steps(), timeline.steps());
    }

    #[test]
    fn a_step_that_is_dropped_before_its_end_has_failed() {
        let timeline = Timeline::default();
        drop(timeline.begin("given up"));
        timeline.begin("good").done();
        let failed: Vec<_> = timeline.steps().into_iter().map(|step| step.failed).collect();
        assert_eq!(failed, [true, false]);
        assert!(timeline.to_string().starts_with("given up 0.0 ms (failed), good"), "{timeline}");
    }

    #[test]
    fn steps_beyond_the_maximum_are_dropped() {
        let timeline = Timeline::default();
        timeline.add((0..).map(|n| step("x", n)).take(10_000));
        timeline.begin("one more").done();
        assert_eq!(timeline.steps().len(), MAX_STEPS);
    }
}
