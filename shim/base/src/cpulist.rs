//! Parses lists of CPUs and of NUMA nodes in the list format of cpuset(7): "0-3,7". The lists come from clients, so their
//! length and the numbers in them are bounded.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::BTreeSet;

/// The first number that is too large for a CPU.
const NUMBER_LIMIT: u32 = 1024;
/// The maximum length of a list in bytes. A longer list must repeat some numbers.
const MAX_LIST_LENGTH: usize = 8192;

/// Returns the numbers of a list, or `None` if the text is not a list. An empty text is a list without numbers.
pub fn parse(list: &str) -> Option<BTreeSet<u32>> {
    let mut all = BTreeSet::new();
    if list.is_empty() {
        return Some(all);
    }
    if list.len() > MAX_LIST_LENGTH {
        return None;
    }
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (parse_number(first)?, parse_number(last)?);
        if first > last {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

fn parse_number(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| plain && *number < NUMBER_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn valid_lists_are_parsed_and_others_rejected() {
        for (list, found) in
            [("", &[][..]), ("0", &[0]), ("0-2,7", &[0, 1, 2, 7]), ("5,1-1,5", &[1, 5]), ("1023", &[1023])]
        {
            assert_eq!(parse(list), Some(found.iter().copied().collect()), "{list}");
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
            assert_eq!(parse(bad), None, "{bad:?}");
        }
        assert_eq!(parse(&"1,".repeat(MAX_LIST_LENGTH)), None);
    }

    proptest! {
        #[test]
        fn parsed_numbers_stay_in_bounds(list in "[0-9,\\-+ ]{0,40}") {
            if let Some(found) = parse(&list) {
                prop_assert!(found.iter().all(|number| *number < NUMBER_LIMIT));
                let written = found.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
                prop_assert_eq!(parse(&written), Some(found));
            }
        }

        #[test]
        fn ranges_contain_every_number_between_their_ends(first in 0..NUMBER_LIMIT, more in 0..NUMBER_LIMIT) {
            let last = (first + more).min(NUMBER_LIMIT - 1);
            prop_assert_eq!(parse(&format!("{first}-{last}")), Some((first..=last).collect()));
        }
    }
}
