//! Reads sizes: a number in the unit of the key, or text with a unit, such as `"256Mi"`. The public functions are for
//! `#[serde(deserialize_with)]`.

use nacelle_base::disk_limits::DiskLimits;
use nacelle_vmi::Quantity;
use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use std::fmt;

/// The bytes of a MiB.
const MIB: u64 = 1 << 20;

/// Reads a size in MiB.
pub(super) fn mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    MibSize::deserialize(deserializer).map(|size| size.0)
}

/// Reads a size in MiB that may be absent.
pub(super) fn optional_mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<MibSize>::deserialize(deserializer)?.map(|size| size.0))
}

/// Reads a size in bytes.
pub(super) fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    ByteSize::deserialize(deserializer).map(|size| size.0)
}

/// Reads limits of a disk.
pub(super) fn disk_limits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DiskLimits>, D::Error> {
    Ok(Option::<DiskLimitSettings>::deserialize(deserializer)?.map(|limits| DiskLimits {
        read_bytes_per_second: limits.read_bytes_per_second.map(|size| size.0),
        write_bytes_per_second: limits.write_bytes_per_second.map(|size| size.0),
        reads_per_second: limits.reads_per_second,
        writes_per_second: limits.writes_per_second,
    }))
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct DiskLimitSettings {
    read_bytes_per_second: Option<ByteSize>,
    write_bytes_per_second: Option<ByteSize>,
    reads_per_second: Option<u64>,
    writes_per_second: Option<u64>,
}

/// A number of bytes.
#[derive(Clone, Copy, Debug)]
struct ByteSize(u64);

/// A number of MiB.
#[derive(Clone, Copy, Debug)]
struct MibSize(u64);

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        deserializer.deserialize_any(SizeVisitor { unit: 1, name: "bytes" }).map(ByteSize)
    }
}

impl<'de> Deserialize<'de> for MibSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<MibSize, D::Error> {
        deserializer.deserialize_any(SizeVisitor { unit: MIB, name: "MiB" }).map(MibSize)
    }
}

/// Returns a size in units of `unit` bytes, which have this name.
struct SizeVisitor {
    unit: u64,
    name: &'static str,
}

impl SizeVisitor {
    fn parse(&self, text: &str) -> Result<u64, String> {
        let expected = "expected a number and a unit, such as \"256Mi\" or \"1.5Gi\"";
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!("size {text:?} has no unit: {expected}; a number without quotes is in {}", self.name));
        }
        let bytes = Quantity::parse(text).ok().and_then(|size| size.bytes());
        let bytes = bytes.ok_or_else(|| format!("invalid size {text:?}: {expected}"))?;
        match bytes % self.unit {
            0 => Ok(bytes / self.unit),
            _ => Err(format!("invalid size {text:?}: whole {} are expected", self.name)),
        }
    }
}

impl Visitor<'_> for SizeVisitor {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a number of {} or a size with a unit, such as \"256Mi\"", self.name)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
        self.parse(text).map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<u64, E> {
        u64::try_from(number).map_err(|_negative| E::custom(format!("size {number} is negative")))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let (mib, bytes) = (SizeVisitor { unit: MIB, name: "MiB" }, SizeVisitor { unit: 1, name: "bytes" });
        for (text, size) in [("256Mi", 256), ("1.5Gi", 1536), ("1048576k", 1000), ("0Mi", 0)] {
            assert_eq!(mib.parse(text), Ok(size), "{text}");
        }
        for (text, size) in [("64Gi", 64 << 30), ("200M", 200_000_000), ("1e3", 1000)] {
            assert_eq!(bytes.parse(text), Ok(size), "{text}");
        }
        for (text, reason) in [
            ("256", "has no unit"),
            ("", "has no unit"),
            ("256MB", "expected a number and a unit"),
            ("-1Mi", "expected a number and a unit"),
            ("1k", "whole MiB are expected"),
        ] {
            let error = mib.parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text: String) {
            let _ = SizeVisitor { unit: MIB, name: "MiB" }.parse(&text);
        }
    }
}
