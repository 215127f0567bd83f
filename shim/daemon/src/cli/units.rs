//! Formats sizes, durations and times for people and for programs.

use std::time::{SystemTime, UNIX_EPOCH};

/// The binary units above a byte.
const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// The text of a value that is not known.
pub(super) const UNKNOWN: &str = "-";

/// Formats a size with a binary unit: "512 B", "1.5 MiB".
pub(super) fn format_bytes(bytes: u64) -> String {
    // Tenths of the unit. The quotient of two is below 1024 * 10, so no precision is lost where it matters.
    let mut tenths = u128::from(bytes) * 10;
    let mut unit = "B";
    for next in UNITS {
        if tenths < 10_240 {
            break;
        }
        tenths /= 1024;
        unit = next;
    }
    match unit {
        "B" => format!("{bytes} B"),
        _ => format!("{}.{} {unit}", tenths / 10, tenths % 10),
    }
}

/// Formats seconds: "0.12 s", "3m 5s", "2h 3m", "4d 5h".
pub(super) fn format_seconds(seconds: f64) -> String {
    if seconds < 60.0 {
        return format!("{seconds:.2} s");
    }
    // The cast saturates.
    let whole = seconds as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes}m {}s", whole % 60),
        (0, hours) => format!("{hours}h {minutes}m"),
        (days, hours) => format!("{days}d {hours}h"),
    }
}

/// Formats a point in time, in nanoseconds since 1970, by RFC 3339 in whole seconds; `None` for 0, which means unknown.
pub(super) fn format_time(nanos: i64) -> Option<String> {
    let text = nacelle_pod::rfc3339(nanos);
    let (seconds, _) = text.split_once('.')?;
    (nanos != 0).then(|| format!("{seconds}Z"))
}

/// Formats a point in time, in seconds since 1970, by RFC 3339.
pub(super) fn format_unix_seconds(seconds: u64) -> Option<String> {
    format_time(i64::try_from(seconds).ok()?.checked_mul(1_000_000_000)?)
}

/// Formats the time since a point in time, in nanoseconds since 1970: "3m 5s".
pub(super) fn format_age(nanos: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    match nanos {
        0 => UNKNOWN.to_owned(),
        nanos => format_seconds((now - nanos as f64 / 1e9).max(0.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_largest_fitting_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1023.9 KiB"),
            (36 << 20, "36.0 MiB"),
            (10 << 30, "10.0 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }

    #[test]
    fn durations_have_two_units() {
        for (seconds, text) in [
            (0.0, "0.00 s"),
            (1.234, "1.23 s"),
            (60.0, "1m 0s"),
            (3599.9, "59m 59s"),
            (7380.0, "2h 3m"),
            (363_600.0, "4d 5h"),
        ] {
            assert_eq!(format_seconds(seconds), text);
        }
    }

    #[test]
    fn times_are_rfc_3339() {
        assert_eq!(format_time(1_735_689_599_000_000_005).as_deref(), Some("2024-12-31T23:59:59Z"));
        assert_eq!(format_time(0), None);
        assert_eq!(format_unix_seconds(1_735_689_599).as_deref(), Some("2024-12-31T23:59:59Z"));
        assert_eq!(format_unix_seconds(u64::MAX), None);
        assert_eq!(format_age(0), UNKNOWN);
    }
}
