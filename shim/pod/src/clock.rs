//! Lets the guest's clock follow the node's: compares the two every minute, and at once when the node's clock was set, and sends the
//! agent a correction where they differ. The pod process only measures; the agent sets the clock.

use crate::agent::Agent;
use crate::error::PodError;
use crate::guest_values::Bounded;
use nacelle_base::Chain;
use nacelle_base::retry::retry_interrupted;
use nacelle_proto::agent::ClockReading;
use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;

/// The interval between two comparisons.
const INTERVAL: Duration = Duration::from_secs(60);
/// The shortest pause between two comparisons, however often the node's clock is set.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// The deviation that is not corrected, beyond the uncertainty of the measurement, in nanoseconds.
const TOLERANCE: u64 = 5_000_000;

/// Reports that the node's clock was set, or that the node has resumed from suspension.
pub struct ClockSteps(OwnedFd);

impl ClockSteps {
    /// Begins to watch the clock. Created before the jail, in which the process cannot create timers.
    pub fn watch() -> nix::Result<ClockSteps> {
        let timer = TimerFd::new(ClockId::CLOCK_REALTIME, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?;
        // It never expires; the kernel cancels it whenever the clock is set (timerfd_create(2)).
        let flags = TimerSetTimeFlags::TFD_TIMER_ABSTIME | TimerSetTimeFlags::TFD_TIMER_CANCEL_ON_SET;
        timer.set(Expiration::OneShot(TimeSpec::new(i64::MAX, 0)), flags)?;
        Ok(ClockSteps(timer.into()))
    }
}

/// Follows the node's clock until the VM has ended or the agent turns out not to support it. Without `steps`, the guest follows a
/// step of the node's clock at the next comparison.
pub async fn follow(agent: Agent, steps: Option<ClockSteps>) {
    let mut steps = steps.and_then(|ClockSteps(timer)| {
        let registered = crate::sys::readable(timer);
        registered.inspect_err(|error| tracing::warn!("cannot watch the node's clock: {error}")).ok()
    });
    loop {
        match compare(&agent).await {
            Ok(()) => {}
            Err(PodError::Died { .. } | PodError::Ending) => return,
            Err(error) if nacelle_base::Classify::kind(&error) == nacelle_base::FailureKind::Unsupported => return,
            Err(error) => tracing::warn!("cannot compare the guest's clock with the node's: {}", Chain(&error)),
        }
        tokio::time::sleep(MIN_PAUSE).await;
        tokio::select! {
            () = tokio::time::sleep(INTERVAL - MIN_PAUSE) => {}
            () = wait_for_step(steps.as_mut()) => tracing::info!("the node's clock was set"),
        }
    }
}

/// Completes when the node's clock was set since the last call; never without a timer.
async fn wait_for_step(timer: Option<&mut AsyncFd<OwnedFd>>) {
    let Some(timer) = timer else { return std::future::pending().await };
    loop {
        let Ok(mut ready) = timer.readable().await else { return std::future::pending().await };
        let mut expirations = [0; 8];
        let read = ready.try_io(|timer| Ok(retry_interrupted(|| nix::unistd::read(timer, &mut expirations))?));
        match read {
            // Nothing was read.
            Err(_would_block) => {}
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::ECANCELED as i32) => return,
            Ok(Err(error)) => {
                tracing::warn!("cannot watch the node's clock: {error}");
                return std::future::pending().await;
            }
            Ok(Ok(_)) => return std::future::pending().await,
        }
    }
}

/// Compares the clocks once, and corrects the guest's.
async fn compare(agent: &Agent) -> Result<(), PodError> {
    let (sent_at, begun) = (crate::now_nanos(), Instant::now());
    let guest = agent.follow_clock(None).await?;
    if let Some(reference) = reference(sent_at, begun.elapsed(), &guest) {
        agent.follow_clock(Some(reference)).await?;
    }
    Ok(())
}

/// Returns the node's time at the moment of the guest's reading, or `None` if the guest's clock is right as far as can be measured.
/// The request was sent at `sent_at`, in nanoseconds since 1970, and answered after `round_trip`; the guest has read its clock in
/// between.
fn reference(sent_at: i64, round_trip: Duration, guest: &Bounded<ClockReading>) -> Option<ClockReading> {
    let uncertainty = u64::try_from(round_trip.as_nanos() / 2).unwrap_or(u64::MAX);
    let unix_nanos = sent_at.saturating_add(i64::try_from(uncertainty).unwrap_or(i64::MAX));
    let deviation = guest.unix_nanos.abs_diff(unix_nanos);
    let reference = ClockReading { monotonic_nanos: guest.monotonic_nanos, unix_nanos };
    (deviation > uncertainty.saturating_add(TOLERANCE)).then_some(reference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_values::FromGuest;
    use proptest::prelude::*;

    const MILLI: i64 = 1_000_000;

    fn reading(monotonic_nanos: i64, unix_nanos: i64) -> ClockReading {
        ClockReading { monotonic_nanos, unix_nanos }
    }

    fn guest(monotonic_nanos: i64, unix_nanos: i64) -> Bounded<ClockReading> {
        FromGuest::new(reading(monotonic_nanos, unix_nanos)).bound()
    }

    #[test]
    fn a_clock_that_differs_by_more_than_the_measurement_is_corrected() {
        let round_trip = Duration::from_millis(20);
        let at = |unix| reference(1000 * MILLI, round_trip, &guest(7, unix));
        // The reading was ten milliseconds after the request, give or take ten.
        for right in [1010 * MILLI, 996 * MILLI, 1024 * MILLI] {
            assert_eq!(at(right), None, "{right}");
        }
        for wrong in [994 * MILLI, 1026 * MILLI, 0, i64::MIN, i64::MAX, 3_600_000 * MILLI] {
            assert_eq!(at(wrong), Some(reading(7, 1010 * MILLI)), "{wrong}");
        }
        assert_eq!(reference(0, Duration::MAX, &guest(7, i64::MIN)), None);
    }

    proptest! {
        #[test]
        fn no_reading_makes_it_panic(monotonic: i64, unix: i64, sent: i64, millis: u64) {
            let _ = reference(sent, Duration::from_millis(millis), &guest(monotonic, unix));
        }
    }

    #[tokio::test]
    async fn an_undisturbed_clock_reports_no_step() {
        let ClockSteps(timer) = ClockSteps::watch().unwrap();
        let mut timer = crate::sys::readable(timer).unwrap();
        let waited = tokio::time::timeout(Duration::from_millis(50), wait_for_step(Some(&mut timer))).await;
        assert!(waited.is_err());
    }
}
