//! Owns: whether the node has the processors and the memory nodes that containers ask for, and on which of them the machine
//! of a pod runs: those of all its containers together, because they share its virtual processors.
//! May use: /sys of the node, for reading.

use super::error::LifecycleError;
use nacelle_base::cpulist::numbers;
use nacelle_model::resources::Resources;
use std::collections::BTreeSet;
use std::fs;

/// The processors that are on.
const PROCESSORS: &str = "/sys/devices/system/cpu/online";
/// The memory nodes that have memory.
const MEMORY: &str = "/sys/devices/system/node/has_memory";

/// Checks that they are there. A machine's memory lies where it lies: a container of one may ask for all nodes only.
pub(super) fn check(asked: &Resources, guest: bool) -> Result<(), LifecycleError> {
    for (field, list, file) in
        [("cpuset_cpus", &asked.cpuset_cpus, PROCESSORS), ("cpuset_mems", &asked.cpuset_mems, MEMORY)]
    {
        if list.is_empty() {
            continue;
        }
        // A kernel without NUMA has one node and does not say so.
        let there = fs::read_to_string(file).unwrap_or_else(|_missing| "0".to_owned());
        let there = there.trim_end();
        let (wanted, known) = (numbers(list).unwrap_or_default(), numbers(there).unwrap_or_default());
        if !wanted.is_subset(&known) {
            return Err(LifecycleError::NotOnline { field, asked: list.clone(), online: there.to_owned() });
        }
        if guest && file == MEMORY && wanted != known {
            return Err(LifecycleError::MemoryNodes { asked: list.clone(), online: there.to_owned() });
        }
    }
    Ok(())
}

/// The processors of containers that have these limits. Those that name none run wherever the others do.
pub(super) fn together<'a>(lists: impl Iterator<Item = &'a str>) -> BTreeSet<u32> {
    lists.filter_map(numbers).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, Kind};

    fn asked(cpus: &str, mems: &str) -> Resources {
        Resources { cpuset_cpus: cpus.into(), cpuset_mems: mems.into(), ..Default::default() }
    }

    #[test]
    fn what_the_node_has_not_is_refused_by_name() {
        for guest in [false, true] {
            check(&asked("", ""), guest).unwrap();
            let error = check(&asked("1023", ""), guest).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
            assert!(error.to_string().contains("cpuset_cpus is \"1023\""), "{error}");
            let error = check(&asked("", "0-1023"), guest).unwrap_err();
            assert!(error.to_string().contains("cpuset_mems is \"0-1023\""), "{error}");
        }
        let online = fs::read_to_string(PROCESSORS).unwrap();
        let first = numbers(online.trim_end()).unwrap().first().unwrap().to_string();
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
