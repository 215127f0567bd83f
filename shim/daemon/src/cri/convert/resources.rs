//! Converts CRI's LinuxContainerResources, of containers and of pods, into `Resources`.
//!
//! No other module interprets these numbers: 0 is "not set" (in a change: "unchanged"), and every notation of "no limit" becomes
//! [`UNLIMITED`]. Where there is no limit, kubelet sends the contents of its cgroup's file: -1 for cgroup v2, and the largest
//! multiple of a page, 9223372036854771712, for cgroup v1.

use super::{FieldError, bad, not_yet, pairs};
use nacelle_base::cpulist;
use nacelle_model::resources::{NO_HUGEPAGE_LIMIT, PodResources, Resources, UNLIMITED};
use nacelle_proto::cri;

/// A limit from here on, in bytes or in microseconds of quota, exceeds every node and counts as "no limit".
const ENDLESS: i64 = i64::MAX / 2;

/// Returns the paths of the limits' fields below a given field of the request.
macro_rules! fields {
    ($below:literal) => {
        [
            concat!($below, ".cpu_period"),
            concat!($below, ".cpu_shares"),
            concat!($below, ".oom_score_adj"),
            concat!($below, ".cpuset_cpus"),
            concat!($below, ".cpuset_mems"),
            concat!($below, ".hugepage_limits.page_size"),
            concat!($below, ".unified"),
        ]
    };
}
pub(super) use fields;

/// Converts a change of a container's limits; unset limits stay.
pub fn resources_change(linux: Option<&cri::LinuxContainerResources>) -> Result<Resources, FieldError> {
    resources(linux.ok_or(FieldError::Missing { field: "linux" })?, fields!("linux"))
}

/// Converts a change of a pod's resources; unset limits stay.
pub fn pod_resources_change(request: &cri::UpdatePodSandboxResourcesRequest) -> Result<PodResources, FieldError> {
    for part in request.resources.iter().chain(&request.overhead) {
        if let Some(list) = [&part.cpuset_cpus, &part.cpuset_mems].into_iter().find(|list| !list.is_empty()) {
            let instead = "a pod runs where its containers may; set them for those";
            return not_yet("resources.cpuset_cpus, cpuset_mems", list, instead);
        }
    }
    pod_resources((request.resources.as_ref(), fields!("resources")), (request.overhead.as_ref(), fields!("overhead")))
}

/// One part of a pod's resources, and the paths of its fields.
type Part<'a> = (Option<&'a cri::LinuxContainerResources>, [&'static str; 7]);

/// Converts a pod's resources: those of all its containers together, and the pod's overhead.
pub(super) fn pod_resources(containers: Part<'_>, overhead: Part<'_>) -> Result<PodResources, FieldError> {
    let part = |(requested, fields): Part<'_>| {
        requested.map(|requested| resources(requested, fields)).transpose().map(Option::unwrap_or_default)
    };
    Ok(PodResources { containers: part(containers)?, overhead: part(overhead)? })
}

/// Checks and converts limits.
pub(super) fn resources(
    requested: &cri::LinuxContainerResources,
    fields: [&'static str; 7],
) -> Result<Resources, FieldError> {
    let [period, shares, oom_score_adj, cpus, mems, pages, unified] = fields;
    for (field, value, range) in [
        (period, requested.cpu_period, 0..=1_000_000),
        (shares, requested.cpu_shares, 0..=262_144),
        (oom_score_adj, requested.oom_score_adj, -1000..=1000),
    ] {
        if !range.contains(&value) {
            return bad(field, value, format!("{} to {} are allowed", range.start(), range.end()));
        }
    }
    for (field, list) in [(cpus, &requested.cpuset_cpus), (mems, &requested.cpuset_mems)] {
        if cpulist::parse(list).is_none() {
            return bad(field, list, "a list of numbers from 0 to 1023 is needed, as in 0-3,7");
        }
    }
    let plain = |key: &str| !key.is_empty() && !key.starts_with('.') && !key.contains(['/', '\0']);
    let size = |text: &str| {
        let digits = ["KB", "MB", "GB"].iter().find_map(|unit| text.strip_suffix(unit));
        digits.is_some_and(|digits| (1..=4).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit()))
    };
    if let Some(limit) = requested.hugepage_limits.iter().find(|limit| !size(&limit.page_size)) {
        return bad(pages, &limit.page_size, "a size of huge pages is needed, as 2MB");
    }
    if let Some(key) = requested.unified.keys().find(|key| !plain(key)) {
        return bad(unified, key, "the name of a file of cgroup v2 is needed");
    }
    Ok(Resources {
        cpu_period: requested.cpu_period,
        cpu_quota: limit(requested.cpu_quota),
        cpu_shares: requested.cpu_shares,
        memory_limit: limit(requested.memory_limit_in_bytes),
        memory_swap_limit: limit(requested.memory_swap_limit_in_bytes),
        oom_score_adj: requested.oom_score_adj,
        // kubelet sends every huge page size of its node, with a limit of 0 for the sizes that the container does not use.
        hugepages: requested
            .hugepage_limits
            .iter()
            .map(|limit| (limit.page_size.clone(), pages_limit(limit.limit)))
            .collect(),
        unified: pairs(&requested.unified),
        cpuset_cpus: requested.cpuset_cpus.clone(),
        cpuset_mems: requested.cpuset_mems.clone(),
    })
}

/// Converts a limit of which 0 means "not set".
fn limit(value: i64) -> i64 {
    if (0..ENDLESS).contains(&value) { value } else { UNLIMITED }
}

/// Converts a limit of huge pages, of which 0 means "no pages".
fn pages_limit(bytes: u64) -> u64 {
    if bytes >= ENDLESS.unsigned_abs() { NO_HUGEPAGE_LIMIT } else { bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The contents of memory.limit_in_bytes of cgroup v1 without a limit.
    const NONE_IN_V1: i64 = 9_223_372_036_854_771_712;

    fn converted(requested: &cri::LinuxContainerResources) -> Resources {
        resources_change(Some(requested)).unwrap()
    }

    #[test]
    fn every_way_to_say_no_limit_is_one() {
        for value in [-1, -2, i64::MIN, NONE_IN_V1, i64::MAX, i64::MAX / 2] {
            let requested = cri::LinuxContainerResources {
                cpu_quota: value,
                memory_limit_in_bytes: value,
                memory_swap_limit_in_bytes: value,
                hugepage_limits: vec![cri::HugepageLimit { page_size: "2MB".into(), limit: value.unsigned_abs() }],
                ..Default::default()
            };
            let taken = converted(&requested);
            assert_eq!((taken.cpu_quota, taken.memory_limit, taken.memory_swap_limit), (-1, -1, -1), "{value}");
            let pod = cri::UpdatePodSandboxResourcesRequest {
                resources: Some(requested.clone()),
                overhead: Some(requested),
                ..Default::default()
            };
            assert_eq!(
                pod_resources_change(&pod).unwrap(),
                PodResources { containers: taken.clone(), overhead: taken }
            );
        }
        for endless in [NONE_IN_V1.unsigned_abs(), u64::MAX] {
            let pages = vec![cri::HugepageLimit { page_size: "2MB".into(), limit: endless }];
            let taken = converted(&cri::LinuxContainerResources { hugepage_limits: pages, ..Default::default() });
            assert_eq!(taken.hugepages, [("2MB".to_owned(), u64::MAX)]);
        }
        // kubelet sends cpu.weight 1 as 2 shares; 0 and a period of 0 mean "not set".
        let small = cri::LinuxContainerResources { cpu_shares: 2, ..Default::default() };
        assert_eq!((converted(&small).cpu_shares, converted(&small).cpu_quota), (2, 0));
    }

    proptest! {
        #[test]
        fn a_limit_stays_what_it_is_or_is_none(value in any::<i64>()) {
            let taken = limit(value);
            prop_assert!(taken == value || taken == UNLIMITED);
            prop_assert_eq!(taken == value, (-1..i64::MAX / 2).contains(&value));
        }
    }
}
