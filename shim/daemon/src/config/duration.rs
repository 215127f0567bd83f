//! Parses and formats durations with units, such as `"500ms"`, `"30s"` and `"1h30m"`. A number without a unit is rejected. The
//! public functions `serialize` and `deserialize` are for `#[serde(with = "duration")]`.

use serde::de::{Deserializer, Error, Visitor};
use serde::ser::Serializer;
use std::fmt;
use std::time::Duration;

/// The units with their lengths in milliseconds, the longest first.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

const EXPECTED: &str = "expected numbers with the units h, m, s or ms, such as \"30s\" or \"1h30m\"";

/// Parses one or more pairs of a whole number and a unit, the longest unit first.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let mut rest = text;
    let mut units = UNITS.iter();
    let mut milliseconds: u64 = 0;
    while !rest.is_empty() || text.is_empty() {
        let (number, tail) = split(rest, |c| c.is_ascii_digit());
        let (unit, tail) = split(tail, |c| c.is_ascii_alphabetic());
        if number.is_empty() {
            return Err(format!("invalid duration {text:?}: {EXPECTED}"));
        }
        if unit.is_empty() {
            return Err(format!("duration {text:?} has no unit after {number}: {EXPECTED}"));
        }
        // The iterator is behind the last unit used: a unit that is repeated or longer is not found.
        let Some((_, length)) = units.find(|(name, _)| *name == unit) else {
            let known = UNITS.iter().any(|(name, _)| *name == unit);
            let reason = if known { "is repeated or follows a shorter unit" } else { "is not known" };
            return Err(format!("invalid duration {text:?}: unit {unit:?} {reason}; {EXPECTED}"));
        };
        milliseconds = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(*length))
            .and_then(|part| milliseconds.checked_add(part))
            .ok_or_else(|| format!("duration {text:?} is too long"))?;
        rest = tail;
    }
    Ok(Duration::from_millis(milliseconds))
}

/// Splits `text` after its longest prefix whose characters all match.
fn split(text: &str, matches: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !matches(c)).unwrap_or(text.len()))
}

/// Formats a duration so that [`parse`] returns the same duration. Fractions of a millisecond are dropped.
pub(super) fn format(duration: Duration) -> String {
    let mut rest = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let mut text = String::new();
    for (unit, length) in UNITS {
        if rest >= length {
            text += &format!("{}{unit}", rest / length);
            rest %= length;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// Serializes a duration as text with units.
pub(super) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format(*duration))
}

/// Deserializes a duration from text with units.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    deserializer.deserialize_any(DurationVisitor)
}

struct DurationVisitor;

impl Visitor<'_> for DurationVisitor {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration with a unit, such as \"30s\"")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        parse(text).map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Duration, E> {
        Err(E::custom(format!("duration {number} has no unit: write \"{number}s\" for seconds")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_with_units_are_parsed() {
        for (text, milliseconds) in [
            ("0s", 0),
            ("500ms", 500),
            ("30s", 30_000),
            ("90m", 5_400_000),
            ("4h", 14_400_000),
            ("1h30m", 5_400_000),
            ("1h1m1s1ms", 3_661_001),
            ("18446744073709551615ms", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_rejected_with_the_reason() {
        for (text, reason) in [
            ("", "invalid duration \"\": expected numbers"),
            ("30", "has no unit after 30"),
            ("1h30", "has no unit after 30"),
            ("s", "invalid duration"),
            ("-1s", "invalid duration"),
            ("1.5h", "has no unit after 1"),
            (" 1s", "invalid duration"),
            ("1 s", "has no unit after 1"),
            ("1s ", "invalid duration"),
            ("1d", "unit \"d\" is not known"),
            ("1S", "unit \"S\" is not known"),
            ("1µs", "has no unit after 1"),
            ("1s1s", "unit \"s\" is repeated or follows a shorter unit"),
            ("30m1h", "unit \"h\" is repeated or follows a shorter unit"),
            ("99999999999999999999s", "is too long"),
            ("18446744073709551615s", "is too long"),
            ("1s18446744073709551615ms", "is too long"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_formatted_duration_is_parsed_to_the_same_duration() {
        for (milliseconds, text) in
            [(0, "0s"), (1, "1ms"), (1500, "1s500ms"), (60_000, "1m"), (180_000, "3m"), (14_400_000, "4h")]
        {
            let duration = Duration::from_millis(milliseconds);
            assert_eq!(format(duration), text);
            assert_eq!(parse(text), Ok(duration));
        }
    }

    proptest::proptest! {
        #[test]
        fn every_duration_survives_formatting(milliseconds: u64) {
            let duration = Duration::from_millis(milliseconds);
            proptest::prop_assert_eq!(parse(&format(duration)), Ok(duration));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text: String) {
            let _ = parse(&text);
        }
    }
}
