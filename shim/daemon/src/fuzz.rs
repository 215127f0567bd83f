//! Defines the fuzz harnesses for files of the node that other programs write: CDI specifications and seccomp profiles. ci/fuzz calls
//! them; the tests run the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic, or by a cost that does not follow
//! from the input.

use crate::cdi;
use nacelle_base::Chain;
use nacelle_base::allocations::AllocationLimit;
use nacelle_model::seccomp::SeccompProfile;

/// The cost of a CDI specification: two bytes can become an element of a list of unknown content, which is kept until all fields of its
/// object are known. The edits are a copy.
const CDI_LIMIT: AllocationLimit = AllocationLimit { base: 16 << 10, per_byte: 400, base_count: 60, count_per_byte: 4 };
/// The cost of a profile: three bytes can become a system call. The filter is JSON in memory.
const SECCOMP_LIMIT: AllocationLimit =
    AllocationLimit { base: 16 << 10, per_byte: 400, base_count: 60, count_per_byte: 4 };
/// The maximum length of an error's message in bytes, which quotes the file in part.
const MAX_MESSAGE: usize = 1 << 10;

/// Reads a CDI specification, and applies its devices to a container. No edit is made twice.
pub fn cdi(data: &[u8]) {
    let Ok(edits) = CDI_LIMIT.enforce(data.len(), || cdi::find_edits_in(data)) else { return };
    match edits {
        Ok(edits) => {
            let count = edits.env.len() + edits.devices.len() + edits.mounts.len() + edits.groups.len();
            assert!(2 * count <= data.len(), "{edits:?}");
            assert!(edits.devices.iter().all(|(_, _, permissions)| !permissions.is_empty()), "{edits:?}");
        }
        Err(error) => {
            let message = Chain(&error).to_string();
            assert!(message.len() <= MAX_MESSAGE + 8 * data.len(), "{message}");
        }
    }
}

/// Reads a seccomp profile. It is the same when it is written and read again, and has a filter for every container.
pub fn seccomp(data: &[u8]) {
    let Ok(profile) = SECCOMP_LIMIT.enforce(data.len(), || SeccompProfile::parse(data)) else { return };
    let written = serde_json::to_vec(&profile).expect("it is JSON");
    assert_eq!(SeccompProfile::parse(&written).expect("it was accepted before"), profile);
    for (capabilities, kernel) in [(vec![], "6.12.1"), (vec!["CAP_SYS_ADMIN".to_owned()], "x")] {
        let filter = SECCOMP_LIMIT.enforce(data.len(), || profile.resolve(&capabilities, kernel));
        assert!(filter.get("defaultAction").is_some(), "{filter}");
    }
}

/// A fuzz harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 2] = [("cdi", cdi), ("seccomp", seccomp)];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::allocations::CountingAllocator;
    use nacelle_base::corpus::{read_corpus, run_corpora, run_mutated_corpora};

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    #[test]
    fn the_mutated_corpus() {
        run_mutated_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS, 512);
    }

    #[test]
    fn the_corpus_has_files_that_are_accepted() {
        let inputs = |name| read_corpus(env!("CARGO_MANIFEST_DIR"), name);
        let edits = |data: &Vec<u8>| cdi::find_edits_in(data).ok()?.ok();
        assert!(inputs("cdi").iter().filter_map(edits).any(|edits| !edits.mounts.is_empty()));
        assert!(inputs("seccomp").iter().any(|data| SeccompProfile::parse(data).is_ok()));
    }
}
