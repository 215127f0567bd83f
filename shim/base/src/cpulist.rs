//! Parses lists of CPUs and of NUMA nodes in the list format of cpuset(7): "0-3,7". The lists come from clients, so their
//! length and the numbers in them are bounded.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::BTreeSet;

/// The first number that is too large for a CPU.
const END: u32 = 1024;
/// The maximum length of a list in bytes. A longer list must repeat some numbers.
const MAX_LENGTH: usize = 8192;

/// Returns the numbers of a list, or `None` if the text is not a list. An empty text is a list without numbers.
pub fn numbers(list: &str) -> Option<BTreeSet<u32>> {
    let mut all = BTreeSet::new();
    if list.is_empty() {
        return Some(all);
    }
    if list.len() > MAX_LENGTH {
        return None;
    }
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

fn number(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| plain && *number < END)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_are_read_and_nothing_else_is() {
        for (list, found) in
            [("", &[][..]), ("0", &[0]), ("0-2,7", &[0, 1, 2, 7]), ("5,1-1,5", &[1, 5]), ("1023", &[1023])]
        {
            assert_eq!(numbers(list), Some(found.iter().copied().collect()), "{list}");
        }
        for bad in [
            ",",
            "0,",
            "1-",
            "-1",
            "3-1",
            "+1",
            " 1",
            "1 ",
            "1\n",
            "0x1",
            "1024",
            "0-99999999999",
            "a",
            "0-3:1/2",
            "1--2",
        ] {
            assert_eq!(numbers(bad), None, "{bad:?}");
        }
        assert_eq!(numbers(&"1,".repeat(MAX_LENGTH)), None);
    }

    proptest! {
        #[test]
        fn whatever_is_asked_for_numbers_stay_in_bounds(list in "[0-9,\\-+ ]{0,40}") {
            if let Some(found) = numbers(&list) {
                prop_assert!(found.iter().all(|number| *number < END));
                let written = found.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
                prop_assert_eq!(numbers(&written), Some(found));
            }
        }

        #[test]
        fn ranges_hold_what_lies_between(first in 0..END, more in 0..END) {
            let last = (first + more).min(END - 1);
            prop_assert_eq!(numbers(&format!("{first}-{last}")), Some((first..=last).collect()));
        }
    }
}
