//! Defines the log macros for events that a guest or a front end can cause. They limit the rate of each call site, so that a
//! hostile guest cannot flood the log. `cargo xtask rules` requires them in the crates that serve guests.

use std::sync::Mutex;
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(60);
const PER_WINDOW: u32 = 10;

/// The rate limit of one call site of the log macro.
#[derive(Debug)]
pub struct Limit(Mutex<Option<Window>>);

#[derive(Debug)]
struct Window {
    began: Instant,
    logged: u32,
    dropped: u64,
}

impl Limit {
    /// Returns the limit of a call site that has not logged yet.
    #[allow(clippy::new_without_default, reason = "made by the macro only, in a static")]
    pub const fn new() -> Limit {
        Limit(Mutex::new(None))
    }

    /// Returns the number of messages dropped since the last logged one, or `None` if the call site must not log now.
    pub fn allow(&self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match window.as_mut() {
            Some(window) if now.saturating_duration_since(window.began) < WINDOW => {
                if window.logged < PER_WINDOW {
                    window.logged += 1;
                    Some(std::mem::take(&mut window.dropped))
                } else {
                    window.dropped = window.dropped.saturating_add(1);
                    None
                }
            }
            _ => {
                let dropped = window.as_ref().map_or(0, |window| window.dropped);
                *window = Some(Window { began: now, logged: 1, dropped: 0 });
                Some(dropped)
            }
        }
    }
}

/// `tracing::warn!` in code that serves a guest, limited to 10 messages per minute and call site. The field `dropped` counts the
/// messages suppressed before this one.
#[macro_export]
macro_rules! guest_warn {
    ($($message:tt)+) => { $crate::guest_event!(warn, $($message)+) };
}

/// `tracing::error!` in code that serves a guest, limited like [`guest_warn!`](crate::guest_warn).
#[macro_export]
macro_rules! guest_error {
    ($($message:tt)+) => { $crate::guest_event!(error, $($message)+) };
}

/// An event of this level; for `guest_warn` and `guest_error`.
#[doc(hidden)]
#[macro_export]
macro_rules! guest_event {
    ($level:ident, $($message:tt)+) => {{
        static LIMIT: $crate::guest_log::Limit = $crate::guest_log::Limit::new();
        if let Some(dropped) = LIMIT.allow() {
            ::tracing::$level!(dropped, $($message)+);
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let limit = Limit::new();
        let start = Instant::now();
        let logged = (0..1000).filter(|_| limit.allow_at(start).is_some()).count();
        assert_eq!(logged, 10);
        assert_eq!(limit.allow_at(start + WINDOW), Some(990));
        assert_eq!(limit.allow_at(start + WINDOW), Some(0));
    }
}
