//! Lists the fuzz harnesses of this crate, and defines the one for manifests. ci/fuzz calls them; the tests run the committed corpus
//! (`tests/corpus/TARGET/*`). A harness fails by a panic, by never ending, or by a cost that does not follow from the input.

use crate::manifest::{parse_config, parse_docker_archive, parse_layout_index, parse_manifest};
use crate::registry::fuzz::registry;
use crate::worker::fuzz::{decompress, index, layer, reports};
use nacelle_base::allocations::AllocationLimit;

/// The cost of a manifest: two bytes can become an element of a list that doubles.
const MANIFEST_LIMIT: AllocationLimit =
    AllocationLimit { base: 16 << 10, per_byte: 300, base_count: 40, count_per_byte: 2 };
/// The maximum number of characters in the message of an error.
const MAX_MESSAGE: usize = 4000;

/// Parses the bytes as each JSON document of registries and archives.
pub fn image_manifests(data: &[u8]) {
    let errors = MANIFEST_LIMIT.enforce(data.len(), || {
        [
            parse_manifest(data).err(),
            parse_config(data).err(),
            parse_layout_index(data).err(),
            parse_docker_archive(data).err(),
        ]
    });
    for error in errors.into_iter().flatten() {
        let message = nacelle_base::Chain(&error).to_string();
        assert!(message.chars().count() <= MAX_MESSAGE, "{message}");
    }
}

/// A fuzz harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 6] = [
    ("decompress", decompress),
    ("layer", layer),
    ("index", index),
    ("reports", reports),
    ("registry", registry),
    ("image_manifests", image_manifests),
];

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
        run_mutated_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS, 256);
    }

    #[test]
    fn the_corpus_has_documents_of_all_kinds() {
        let inputs = read_corpus(env!("CARGO_MANIFEST_DIR"), "image_manifests");
        assert!(inputs.iter().filter(|data| parse_manifest(data).is_ok()).count() >= 2);
        assert!(inputs.iter().any(|data| parse_config(data).is_ok()));
        assert!(inputs.iter().any(|data| parse_docker_archive(data).is_ok()));
        assert!(inputs.iter().any(|data| parse_layout_index(data).is_ok_and(|images| !images.is_empty())));
    }
}
