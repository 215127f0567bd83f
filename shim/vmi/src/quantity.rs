//! Parses quantities of Kubernetes (`512Mi`, `1500m`, `2e3`) strictly, and keeps them as they were written.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};
use serde::{Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;

/// The longest text that is looked at.
const MAX_TEXT: usize = 64;
/// Parts of one: the finest that a quantity can say.
const NANO: i128 = 1_000_000_000;
/// More than this many whole units is refused: Kubernetes stops at the same number.
const MAX_UNITS: i128 = i64::MAX as i128;

/// A number with a unit. Two are equal if they are written alike; compare `bytes` or `milli` for their sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantity {
    text: String,
    nano: i128,
}

/// Why a text is no quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// It is not written as one.
    #[error(
        "must be a quantity: a number with one of the suffixes n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or an exponent"
    )]
    Syntax,
    /// It is outside what can be counted.
    #[error("must be a quantity of less than 2^63 and no finer than 1n")]
    Range,
}

impl Quantity {
    /// Reads one.
    pub fn parse(text: &str) -> Result<Quantity, QuantityError> {
        if text.is_empty() || text.len() > MAX_TEXT {
            return Err(QuantityError::Syntax);
        }
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, text.get(1..).unwrap_or_default()),
            Some(b'+') => (false, text.get(1..).unwrap_or_default()),
            _ => (false, text),
        };
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at_checked(digits).ok_or(QuantityError::Syntax)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(QuantityError::Syntax);
        }
        let scale = scale(suffix)?;
        let mut mantissa: i128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            let more = mantissa.checked_mul(10).and_then(|m| m.checked_add(i128::from(digit.saturating_sub(b'0'))));
            mantissa = more.ok_or(QuantityError::Range)?;
        }
        let nano = scaled(mantissa, fraction.len(), scale)?;
        let nano = if negative { -nano } else { nano };
        Ok(Quantity { text: text.to_owned(), nano })
    }

    /// A number of whole units.
    pub fn units(number: u64) -> Quantity {
        Quantity { text: number.to_string(), nano: i128::from(number) * NANO }
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whole units, if it says whole ones of zero or more.
    pub fn bytes(&self) -> Option<u64> {
        (self.nano % NANO == 0).then(|| u64::try_from(self.nano / NANO).ok()).flatten()
    }

    /// Thousandths, rounded up, if it is zero or more.
    pub fn milli(&self) -> Option<u64> {
        let milli = NANO / 1000;
        u64::try_from(self.nano).is_ok().then(|| u64::try_from((self.nano + milli - 1) / milli).ok()).flatten()
    }

    /// Whether it is more than zero.
    pub fn positive(&self) -> bool {
        self.nano > 0
    }
}

/// A suffix as a fraction: units are multiplied by the first and divided by the second.
fn scale(suffix: &str) -> Result<(i128, i128), QuantityError> {
    let ten = |power: u32| 10_i128.pow(power);
    Ok(match suffix {
        "n" => (1, NANO),
        "u" => (1, ten(6)),
        "m" => (1, 1000),
        "" => (1, 1),
        "k" => (1000, 1),
        "M" => (ten(6), 1),
        "G" => (ten(9), 1),
        "T" => (ten(12), 1),
        "P" => (ten(15), 1),
        "E" => (ten(18), 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        other => {
            let exponent = other.strip_prefix(['e', 'E']).ok_or(QuantityError::Syntax)?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return Err(QuantityError::Syntax);
            }
            match exponent.parse::<i32>() {
                Ok(power @ 0..=18) => (ten(power.unsigned_abs()), 1),
                Ok(power @ -9..=-1) => (1, ten(power.unsigned_abs())),
                _ => return Err(QuantityError::Range),
            }
        }
    })
}

fn scaled(mantissa: i128, decimals: usize, (up, down): (i128, i128)) -> Result<i128, QuantityError> {
    let decimals = u32::try_from(decimals).ok().filter(|decimals| *decimals <= 18).ok_or(QuantityError::Range)?;
    let down = down.checked_mul(10_i128.pow(decimals)).ok_or(QuantityError::Range)?;
    // The common factors are removed first, to avoid an overflow.
    let shared = gcd(up, down);
    let (up, down) = (up / shared, down / shared);
    let nano_up = gcd(NANO, down);
    let (nano, down) = (NANO / nano_up, down / nano_up);
    let shared = gcd(mantissa, down);
    let (mantissa, down) = (mantissa / shared.max(1), down / shared.max(1));
    if down != 1 {
        return Err(QuantityError::Range);
    }
    let value = mantissa.checked_mul(up).and_then(|value| value.checked_mul(nano)).ok_or(QuantityError::Range)?;
    if value / NANO > MAX_UNITS { Err(QuantityError::Range) } else { Ok(value) }
}

fn gcd(mut a: i128, mut b: i128) -> i128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Quantity, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Quantity;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Quantity, E> {
                Quantity::parse(text).map_err(|error| E::custom(error))
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Quantity, E> {
                self.visit_str(&number.to_string())
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Quantity, E> {
                match u64::try_from(number) {
                    Ok(number) => self.visit_u64(number),
                    Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
                }
            }
        }
        deserializer.deserialize_any(Text)
    }
}

impl JsonSchema for Quantity {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "format": "quantity",
            "anyOf": [{ "type": "integer" }, { "type": "string" }],
            "x-kubernetes-int-or-string": true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kubernetes_writes_is_read() {
        for (text, milli) in [
            ("0", 0),
            ("1", 1000),
            ("1500m", 1500),
            ("1.5", 1500),
            (".5", 500),
            ("2.", 2000),
            ("+3", 3000),
            ("2e3", 2_000_000),
            ("2E3", 2_000_000),
            ("25e-1", 2500),
            ("1Ki", 1_024_000),
            ("1.5Gi", 1_610_612_736_000),
            ("128974848000m", 128_974_848_000),
            ("1n", 1),
        ] {
            assert_eq!(Quantity::parse(text).map(|q| q.milli()), Ok(Some(milli)), "{text}");
        }
        assert_eq!(Quantity::parse("1Gi").unwrap().bytes(), Some(1 << 30));
        assert_eq!(Quantity::parse("1500m").unwrap().bytes(), None);
        assert_eq!(Quantity::parse("-1").unwrap().milli(), None);
        assert!(!Quantity::parse("-1").unwrap().positive());
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in
            ["", " 1", "1 Gi", "1GB", "Gi", ".", "1.2.3", "1ki", "0x10", "1e", "1e+", "--1", "١", "1Gi\n", "1_000"]
        {
            assert_eq!(Quantity::parse(text), Err(QuantityError::Syntax), "{text:?}");
        }
        for text in ["9223372036854775808", "9Ei", "1e19", "1e999999999999", "0.1n", "1e-10", &"9".repeat(60)] {
            assert_eq!(Quantity::parse(text), Err(QuantityError::Range), "{text:?}");
        }
        assert_eq!(Quantity::parse(&"9".repeat(65)), Err(QuantityError::Syntax));
    }

    proptest::proptest! {
        #[test]
        fn no_text_breaks_it(text in "[-+.0-9eEnumkKMGTPi]{0,70}") {
            if let Ok(quantity) = Quantity::parse(&text) {
                proptest::prop_assert_eq!(quantity.text(), &text);
            }
        }

        #[test]
        fn whole_numbers_come_back(number in 0..=i64::MAX as u64) {
            proptest::prop_assert_eq!(Quantity::parse(&number.to_string()).unwrap().bytes(), Some(number));
        }
    }
}
