//! Defines the fuzz harnesses for files of the node that other programs write: CDI specifications and seccomp profiles. ci/fuzz calls
//! them; the tests run the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic, or by a cost that does not follow
//! from the input.

use crate::cdi::{self, SpecFormat};
use nacelle_base::Chain;
use nacelle_base::allocations::AllocationLimit;
use nacelle_model::device::DeviceRequest;
use nacelle_model::seccomp::SeccompProfile;

/// The cost of a CDI specification: two bytes can become an element of a list of unknown content, which is kept until all fields of its
/// object are known. The edits are a copy.
const CDI_LIMIT: AllocationLimit = AllocationLimit { base: 16 << 10, per_byte: 400, base_count: 60, count_per_byte: 4 };
/// The cost of a CDI specification in YAML: its parser's buffers, and an error's copies of the line.
const CDI_YAML_LIMIT: AllocationLimit =
    AllocationLimit { base: 64 << 10, per_byte: 400, base_count: 200, count_per_byte: 8 };
/// The cost of a profile: three bytes can become a system call. The filter is JSON in memory.
const SECCOMP_LIMIT: AllocationLimit =
    AllocationLimit { base: 16 << 10, per_byte: 400, base_count: 60, count_per_byte: 4 };
/// The maximum length of an error's message in bytes, which quotes the file in part.
const MAX_MESSAGE: usize = 1 << 10;

/// Reads a CDI specification in JSON, and applies its devices to a container.
pub fn cdi(data: &[u8]) {
    apply_cdi(data, SpecFormat::Json, CDI_LIMIT);
}

/// Reads a CDI specification in YAML, and applies its devices to a container.
pub fn cdi_yaml(data: &[u8]) {
    apply_cdi(data, SpecFormat::Yaml, CDI_YAML_LIMIT);
}

/// No edit is made twice, and the message of an error is short.
fn apply_cdi(data: &[u8], format: SpecFormat, limit: AllocationLimit) {
    match limit.enforce(data.len(), || cdi::find_edits_in(data, format)) {
        Ok(Ok(edits)) => {
            let count = edits.env.len() + edits.devices.len() + edits.mounts.len() + edits.groups.len();
            assert!(2 * count <= data.len(), "{edits:?}");
            let known = |device: &DeviceRequest| device.attributes.number.is_none_or(|(major, _)| major > 0);
            assert!(edits.devices.iter().all(known), "{edits:?}");
        }
        Ok(Err(error)) => {
            let message = Chain(&error).to_string();
            assert!(message.len() <= MAX_MESSAGE + 8 * data.len(), "{message}");
        }
        Err(error) => {
            let message = error.to_string();
            assert!(message.len() <= MAX_MESSAGE + 8 * data.len() && !message.contains('\n'), "{message}");
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
pub const TARGETS: [(&str, Target); 3] = [("cdi", cdi), ("cdi_yaml", cdi_yaml), ("seccomp", seccomp)];

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
        for (name, format) in [("cdi", SpecFormat::Json), ("cdi_yaml", SpecFormat::Yaml)] {
            let edits = |data: &Vec<u8>| cdi::find_edits_in(data, format).ok()?.ok();
            assert!(inputs(name).iter().filter_map(edits).any(|edits| !edits.mounts.is_empty()), "{name}");
        }
        assert!(inputs("seccomp").iter().any(|data| SeccompProfile::parse(data).is_ok()));
    }
}
