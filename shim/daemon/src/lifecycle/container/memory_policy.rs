//! Computes the memory policy of a VM's cgroup from the limits of its containers. The guest has no swap, and its kernel reclaims
//! nothing for the node: what kubelet decides about swap (LimitedSwap, NoSwap) and about protected memory (MemoryQoS) concerns the
//! memory of the VM.

use nacelle_model::resources::{Resources, UNLIMITED};
use nacelle_pod::MemoryPolicy;

/// Returns the sums over containers with these limits; `None` without a container. One container that may swap without a limit,
/// or of which no limit is known, leaves the VM without one.
pub(crate) fn together(limits: impl Iterator<Item = Resources>) -> Option<MemoryPolicy> {
    limits.map(|limits| of_one(&limits)).reduce(|sum, one| MemoryPolicy {
        swap_max: sum.swap_max.saturating_add(one.swap_max),
        low: sum.low.saturating_add(one.low),
        min: sum.min.saturating_add(one.min),
    })
}

fn of_one(limits: &Resources) -> MemoryPolicy {
    let file = |name: &str| match limits.unified.get(name)?.trim() {
        "max" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    let from_both = || match limits.swap_limit()? {
        UNLIMITED => None,
        bytes => u64::try_from(bytes).ok(),
    };
    MemoryPolicy {
        swap_max: file("memory.swap.max").or_else(from_both).unwrap_or(u64::MAX),
        low: file("memory.low").unwrap_or(0),
        min: file("memory.min").unwrap_or(0),
    }
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
        let policy = |swap_max, low, min| MemoryPolicy { swap_max, low, min };
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
            // What is no number is the kernel's to refuse in the guest.
            (vec![unified(&[("memory.swap.max", "x"), ("memory.low", "-1")])], anything),
        ] {
            assert_eq!(together(containers.clone().into_iter()), Some(expected), "{containers:?}");
        }
        assert_eq!(together(std::iter::empty()), None);
    }
}
