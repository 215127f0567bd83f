//! Checks that this node has the users of pod processes: in a user namespace only some ids exist.

use crate::config::JailSettings;
use std::io;
use std::path::PathBuf;

/// The user namespace of this process does not have all ids of the range.
#[derive(Debug, thiserror::Error)]
pub enum UserRangeError {
    /// The map of the ids cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The path of the map.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// An id of the range is not mapped.
    #[error(
        "the user namespace of the daemon does not map all ids of jail.first_user = {first} and jail.user_count = {count} ({map}); \
         choose a range that it maps, or set jail.user_count to 0"
    )]
    NotMapped {
        /// The first id of the range.
        first: u32,
        /// The number of ids.
        count: u32,
        /// The path of the map.
        map: &'static str,
    },
}

/// Checks the range against the maps of this process's user namespace (user_namespaces(7)).
pub fn check_user_range(jail: &JailSettings) -> Result<(), UserRangeError> {
    for map in ["/proc/self/uid_map", "/proc/self/gid_map"] {
        let text = std::fs::read_to_string(map).map_err(|source| UserRangeError::Read { path: map.into(), source })?;
        if !is_mapped(&text, jail.first_user, jail.user_count) {
            return Err(UserRangeError::NotMapped { first: jail.first_user, count: jail.user_count, map });
        }
    }
    Ok(())
}

/// Returns whether the lines of a map (first id inside, first id outside, count) contain all ids of a range.
fn is_mapped(map: &str, first: u32, count: u32) -> bool {
    let mut ranges: Vec<(u64, u64)> = map
        .lines()
        .filter_map(|line| {
            let mut numbers = line.split_whitespace().map(str::parse::<u64>);
            Some((numbers.next()?.ok()?, numbers.nth(1)?.ok()?))
        })
        .collect();
    ranges.sort_unstable();
    let (mut next, end) = (u64::from(first), u64::from(first) + u64::from(count));
    for (start, length) in ranges {
        if start <= next {
            next = next.max(start.saturating_add(length));
        }
    }
    next >= end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_mapped_as_a_whole() {
        let (all, some) = ("         0          0 4294967295\n", "0 1000 1\n1 100000 65536\n");
        assert!(is_mapped(all, 0x7000_0000, 65_536) && is_mapped(all, u32::MAX - 2, 1));
        assert!(!is_mapped(all, u32::MAX, 1));
        assert!(is_mapped(some, 0, 65_537) && is_mapped(some, 65_536, 1));
        assert!(!is_mapped(some, 65_536, 2) && !is_mapped(some, 0x7000_0000, 1) && !is_mapped("", 0, 1));
        assert!(is_mapped("5 0 5\n", 4, 0) && !is_mapped("5 0 5\n", 4, 2));
        assert!(is_mapped(some, 0x7000_0000, 0), "no range");
    }
}
