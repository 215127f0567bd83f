//! Checks that the node has the CPUs and memory nodes that containers request, and computes the CPUs of a pod's VM: those of all
//! its containers together, because they share its vCPUs. It only reads /sys of the node.

use crate::lifecycle::context::error::LifecycleError;
use nacelle_base::cpulist;
use nacelle_model::resources::Resources;
use std::collections::BTreeSet;
use std::fs;

/// The list of online CPUs.
const PROCESSORS: &str = "/sys/devices/system/cpu/online";
/// The list of memory nodes that have memory.
const MEMORY: &str = "/sys/devices/system/node/has_memory";

/// Checks that the requested CPUs and memory nodes exist. The memory of a VM cannot be moved: a container with a guest may
/// request all memory nodes only.
pub(crate) fn check(asked: &Resources, guest: bool) -> Result<(), LifecycleError> {
    for (field, list, file) in
        [("cpuset_cpus", &asked.cpuset_cpus, PROCESSORS), ("cpuset_mems", &asked.cpuset_mems, MEMORY)]
    {
        if list.is_empty() {
            continue;
        }
        // A kernel without NUMA has one node and no such file.
        let there = fs::read_to_string(file).unwrap_or_else(|_missing| "0".to_owned());
        let there = there.trim_end();
        let (wanted, known) = (cpulist::parse(list).unwrap_or_default(), cpulist::parse(there).unwrap_or_default());
        if !wanted.is_subset(&known) {
            return Err(LifecycleError::NotOnline { field, asked: list.clone(), online: there.to_owned() });
        }
        if guest && file == MEMORY && wanted != known {
            return Err(LifecycleError::MemoryNodes { asked: list.clone(), online: there.to_owned() });
        }
    }
    Ok(())
}

/// Returns the CPUs of containers with these CPU lists. A container without a list runs on the CPUs of the others.
pub(crate) fn together<'a>(lists: impl Iterator<Item = &'a str>) -> BTreeSet<u32> {
    lists.filter_map(cpulist::parse).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    fn asked(cpus: &str, mems: &str) -> Resources {
        Resources { cpuset_cpus: cpus.into(), cpuset_mems: mems.into(), ..Default::default() }
    }

    #[test]
    fn what_the_node_has_not_is_refused_by_name() {
        for guest in [false, true] {
            check(&asked("", ""), guest).unwrap();
            let error = check(&asked("1023", ""), guest).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid);
            assert!(error.to_string().contains("cpuset_cpus is \"1023\""), "{error}");
            let error = check(&asked("", "0-1023"), guest).unwrap_err();
            assert!(error.to_string().contains("cpuset_mems is \"0-1023\""), "{error}");
        }
        let online = fs::read_to_string(PROCESSORS).unwrap();
        let first = cpulist::parse(online.trim_end()).unwrap().first().unwrap().to_string();
        check(&asked(&first, ""), true).unwrap();
        let nodes = fs::read_to_string(MEMORY).unwrap_or_else(|_missing| "0".to_owned());
        check(&asked("", nodes.trim_end()), true).unwrap();
    }

    #[test]
    fn a_machine_runs_where_any_of_its_containers_may() {
        assert_eq!(together(["0-1", "", "1,4"].into_iter()), [0, 1, 4].into());
        assert_eq!(together([""].into_iter()), BTreeSet::new());
    }
}
