//! Converts a change of limits into values for the files of a cgroup v2, as OCI runtimes write them for a new container.

use nacelle_model::resources::{NO_HUGEPAGE_LIMIT, Resources, UNLIMITED};

/// The contents of a limit's file without a limit.
const NO_LIMIT: &str = "max";
/// The kernel's default period of cpu.max in µs.
const DEFAULT_PERIOD: i64 = 100_000;

/// Returns the files that a change affects, and their new values. `after` holds the limits after the change.
pub fn limits(after: &Resources, change: &Resources) -> Vec<(String, String)> {
    let mut limits = Vec::new();
    let mut set = |file: &str, value: String| limits.push((file.to_owned(), value));
    if change.cpu_shares > 0 {
        set("cpu.weight", cpu_weight(change.cpu_shares).to_string());
    }
    if change.cpu_quota != 0 || change.cpu_period > 0 {
        let quota = if after.cpu_quota > 0 { after.cpu_quota.to_string() } else { NO_LIMIT.to_owned() };
        set("cpu.max", format!("{quota} {}", if after.cpu_period > 0 { after.cpu_period } else { DEFAULT_PERIOD }));
    }
    if change.memory_limit != 0 {
        set("memory.max", if change.memory_limit > 0 { change.memory_limit.to_string() } else { NO_LIMIT.to_owned() });
    }
    if change.memory_swap_limit != 0 || change.memory_limit != 0 {
        match after.swap_limit() {
            Some(UNLIMITED) => set("memory.swap.max", NO_LIMIT.to_owned()),
            Some(swap) => set("memory.swap.max", swap.to_string()),
            // The limit of both together has no meaning without one of memory.
            None if change.memory_limit < 0 && after.memory_swap_limit != 0 => {
                set("memory.swap.max", NO_LIMIT.to_owned())
            }
            None => {}
        }
    }
    for (file, list) in [("cpuset.cpus", &change.cpuset_cpus), ("cpuset.mems", &change.cpuset_mems)] {
        if !list.is_empty() {
            set(file, list.clone());
        }
    }
    for (size, limit) in &change.hugepages {
        // Limits both reserved pages (since Linux 5.7) and used ones, as for a new container.
        for which in ["max", "rsvd.max"] {
            let value = if *limit == NO_HUGEPAGE_LIMIT { NO_LIMIT.to_owned() } else { limit.to_string() };
            set(&format!("hugetlb.{size}.{which}"), value);
        }
    }
    change.unified.iter().for_each(|(file, value)| set(file, value.clone()));
    limits
}

/// Converts cgroup v1 shares (2 to 262144, default 1024) into a weight (1 to 10000, default 100): the curve through these three
/// points that the OCI runtimes agree on, and that the guest uses for a new container.
fn cpu_weight(shares: i64) -> u64 {
    match shares {
        ..=2 => 1,
        262_144.. => 10_000,
        shares => {
            let log = f64::from(i32::try_from(shares).unwrap_or(i32::MAX)).log2();
            let exponent = (log * log + 125.0 * log) / 612.0 - 7.0 / 34.0;
            // The value lies between 1 and 10000.
            10f64.powf(exponent).ceil() as u64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(before: Resources, change: Resources) -> Vec<String> {
        let limits = limits(&before.changed_by(&change), &change);
        limits.iter().map(|(file, value)| format!("{file}={value}")).collect()
    }

    #[test]
    fn shares_become_weights() {
        for (shares, expected) in
            [(1, 1), (2, 1), (1024, 100), (262_143, 10_000), (262_144, 10_000), (i64::MAX, 10_000)]
        {
            assert_eq!(cpu_weight(shares), expected, "{shares}");
        }
        assert!((3..2000).all(|shares| cpu_weight(shares) <= cpu_weight(shares + 1)));
    }

    #[test]
    fn the_limit_of_swap_follows_both_limits() {
        let memory =
            |memory_limit, memory_swap_limit| Resources { memory_limit, memory_swap_limit, ..Resources::default() };
        for (before, change, expected) in [
            (memory(0, 0), memory(10, 10), &["memory.max=10", "memory.swap.max=0"][..]),
            (memory(10, 10), memory(0, 15), &["memory.swap.max=5"]),
            (memory(10, 15), memory(12, 0), &["memory.max=12", "memory.swap.max=3"]),
            (memory(10, 15), memory(20, 0), &["memory.max=20", "memory.swap.max=0"]),
            (memory(10, 15), memory(0, -1), &["memory.swap.max=max"]),
            (memory(10, 15), memory(-1, 0), &["memory.max=max", "memory.swap.max=max"]),
            (memory(10, 0), memory(12, 0), &["memory.max=12"]),
            (memory(0, 0), memory(0, 15), &[]),
        ] {
            assert_eq!(written(before.clone(), change.clone()), expected, "{before:?} {change:?}");
            let in_guest = written(before.in_guest(), change.in_guest());
            assert!(in_guest.iter().all(|limit| !limit.contains("swap")), "{in_guest:?}");
        }
    }

    #[test]
    fn only_what_changes_is_written_and_quota_and_period_go_together() {
        let none = Resources::default;
        assert!(written(none(), none()).is_empty());
        assert_eq!(written(none(), Resources { cpu_quota: 5000, ..none() }), ["cpu.max=5000 100000"]);
        let before = || Resources { cpu_quota: 5000, cpu_period: 20_000, memory_limit: 9, ..none() };
        assert_eq!(written(before(), Resources { cpu_period: 50_000, ..none() }), ["cpu.max=5000 50000"]);
        assert_eq!(written(before(), Resources { cpu_quota: -1, ..none() }), ["cpu.max=max 20000"]);
        assert_eq!(written(before(), Resources { memory_limit: -1, ..none() }), ["memory.max=max"]);
        assert_eq!(before().changed_by(&Resources { memory_limit: -1, ..none() }).memory_limit, -1);
        let pages = Resources { hugepages: vec![("2MB".into(), NO_HUGEPAGE_LIMIT)], ..none() };
        assert_eq!(written(before(), pages), ["hugetlb.2MB.max=max", "hugetlb.2MB.rsvd.max=max"]);
        let all = Resources {
            cpu_shares: 1024,
            memory_limit: 77,
            hugepages: vec![("2MB".into(), 4)],
            unified: [("memory.high".to_owned(), "50".to_owned())].into(),
            cpuset_cpus: "2-3".into(),
            ..none()
        };
        assert_eq!(before().changed_by(&all).changed_by(&none()).cpuset_cpus, "2-3");
        assert!(!written(before(), all.in_guest()).contains(&"cpuset.cpus=2-3".to_owned()));
        assert_eq!(
            written(before(), all.clone()),
            [
                "cpu.weight=100",
                "memory.max=77",
                "cpuset.cpus=2-3",
                "hugetlb.2MB.max=4",
                "hugetlb.2MB.rsvd.max=4",
                "memory.high=50"
            ]
        );
        let after = before().changed_by(&all);
        assert_eq!((after.cpu_quota, after.memory_limit, after.cpu_shares), (5000, 77, 1024));
    }
}
