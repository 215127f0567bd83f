//! Computes the memory policy of a VM's cgroup from the limits of its containers. The guest has no swap, and its kernel reclaims
//! nothing for the node: what kubelet decides about swap (LimitedSwap, NoSwap), about protected memory (MemoryQoS) and about the order
//! in which the OOM killer ends containers (QoS classes) concerns the memory of the VM.

use nacelle_model::resources::{Resources, UNLIMITED};
use nacelle_pod::MemoryPolicy;

/// The lowest OOM score adjustment of a VM. With -1000 the kernel could not even end a VM that exceeds its own limit.
const MIN_VM_SCORE: i32 = -999;

/// Returns the sums over containers with these limits, and their lowest OOM score adjustment, because the VM's end is the end of all
/// of them; `None` without a container. One container that may swap without a limit, or of which no limit is known, leaves the VM
/// without one.
pub(crate) fn add_up(limits: impl Iterator<Item = Resources>) -> Option<MemoryPolicy> {
    limits.map(|limits| read_policy(&limits)).reduce(|sum, one| MemoryPolicy {
        swap_max: sum.swap_max.saturating_add(one.swap_max),
        low: sum.low.saturating_add(one.low),
        min: sum.min.saturating_add(one.min),
        oom_score_adj: sum.oom_score_adj.min(one.oom_score_adj),
    })
}

fn read_policy(limits: &Resources) -> MemoryPolicy {
    // A value that only the kernel can read counts as 0: no swap, and no protection.
    let file = |name: &str| limits.unified.get(name).map(|value| parse_bytes(value.trim()).unwrap_or(0));
    let from_both = || match limits.swap_limit()? {
        UNLIMITED => None,
        bytes => u64::try_from(bytes).ok(),
    };
    MemoryPolicy {
        swap_max: file("memory.swap.max").or_else(from_both).unwrap_or(u64::MAX),
        low: file("memory.low").unwrap_or(0),
        min: file("memory.min").unwrap_or(0),
        oom_score_adj: i32::try_from(limits.oom_score_adj).unwrap_or(0).max(MIN_VM_SCORE),
    }
}

/// Parses a number of bytes as the kernel does for files of a cgroup: "max", or a number with a unit (lib/cmdline.c, `memparse`).
/// Octal numbers are not read.
fn parse_bytes(text: &str) -> Option<u64> {
    if text == "max" {
        return Some(u64::MAX);
    }
    let units = ['K', 'M', 'G', 'T', 'P', 'E'];
    let unit = units.iter().zip(1..).find(|(unit, _)| text.ends_with([**unit, unit.to_ascii_lowercase()]));
    let (number, shift) = match (unit, text.strip_prefix("0x")) {
        // The last digit of a hexadecimal number may be the name of a unit.
        (_, Some(digits)) => return u64::from_str_radix(digits, 16).ok(),
        (Some((_, exponent)), None) => (text.get(..text.len() - 1)?, exponent * 10),
        (None, None) => (text, 0),
    };
    if number.len() > 1 && number.starts_with('0') || !number.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    number.parse::<u64>().ok()?.checked_mul(1_u64 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_may_swap_and_keep_what_its_containers_may_together() {
        let unified = |files: &[(&str, &str)]| Resources {
            unified: files.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect(),
            ..Resources::default()
        };
        let both =
            |memory_limit, memory_swap_limit| Resources { memory_limit, memory_swap_limit, ..Resources::default() };
        let policy = |swap_max, low, min| MemoryPolicy { swap_max, low, min, oom_score_adj: 0 };
        let anything = policy(u64::MAX, 0, 0);
        for (containers, expected) in [
            (vec![Resources::default()], anything),
            // kubelet with NoSwap, and with LimitedSwap.
            (vec![unified(&[("memory.swap.max", "0")]); 2], policy(0, 0, 0)),
            (vec![unified(&[("memory.swap.max", "5")]), unified(&[("memory.swap.max", "7\n")])], policy(12, 0, 0)),
            (vec![unified(&[("memory.swap.max", "5")]), unified(&[("memory.swap.max", "max")])], anything),
            (vec![unified(&[("memory.swap.max", "5")]), Resources::default()], anything),
            // Clients that send the limit of memory and swap together.
            (vec![both(10, 15), both(10, 10)], policy(5, 0, 0)),
            (vec![both(10, -1)], anything),
            (vec![both(0, 15)], anything),
            // The file decides.
            (
                vec![Resources { unified: unified(&[("memory.swap.max", "1")]).unified, ..both(10, 15) }],
                policy(1, 0, 0),
            ),
            // MemoryQoS.
            (
                vec![
                    unified(&[("memory.min", "3"), ("memory.low", "4")]),
                    unified(&[("memory.min", "5"), ("memory.high", "1")]),
                ],
                policy(u64::MAX, 4, 8),
            ),
            (vec![unified(&[("memory.min", "max")]), unified(&[("memory.min", "5")])], policy(u64::MAX, 0, u64::MAX)),
            (vec![unified(&[("memory.swap.max", "x"), ("memory.low", "-1")])], policy(0, 0, 0)),
            (
                vec![unified(&[("memory.swap.max", "1M"), ("memory.low", "2k"), ("memory.min", "0x10")])],
                policy(1 << 20, 2048, 16),
            ),
        ] {
            assert_eq!(add_up(containers.clone().into_iter()), Some(expected), "{containers:?}");
        }
        let score = |oom_score_adj| Resources { oom_score_adj, ..Resources::default() };
        for (scores, expected) in
            [(vec![-997, 2], -997), (vec![1000, 1000], 1000), (vec![5, 900], 5), (vec![0], 0), (vec![-1000], -999)]
        {
            let policy = add_up(scores.into_iter().map(score));
            assert_eq!(policy, Some(MemoryPolicy { oom_score_adj: expected, ..anything }));
        }
        assert_eq!(add_up(std::iter::empty()), None);
        for unreadable in ["", "K", "010", "+1", "1 K", "1KK", "0x", "16E", "-1", "é"] {
            assert_eq!(parse_bytes(unreadable), None, "{unreadable}");
        }
        assert_eq!(parse_bytes("15E"), Some(15 << 60));
    }
}
