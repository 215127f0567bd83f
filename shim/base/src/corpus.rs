//! Runs fuzz harnesses with the inputs of their stored corpora, for the tests of the crates that have harnesses. Only with
//! the feature `testing`.

use std::path::Path;

/// A fuzz harness.
pub type Harness = fn(&[u8]);

/// Reads the inputs in `tests/corpus/NAME` of a crate; `crate_dir` is the crate's `CARGO_MANIFEST_DIR`.
///
/// # Panics
///
/// If the corpus is empty or a file in it cannot be read.
pub fn read_corpus(crate_dir: &str, name: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(crate_dir).join("tests/corpus").join(name);
    let entries = std::fs::read_dir(&directory);
    let inputs = entries.and_then(|entries| entries.map(|entry| std::fs::read(entry?.path())).collect());
    let inputs: Vec<_> = inputs.unwrap_or_else(|error| panic!("cannot read {}: {error}", directory.display()));
    assert!(!inputs.is_empty(), "{} is empty", directory.display());
    inputs
}

/// Calls each harness with all inputs of its corpus; see [`read_corpus`].
///
/// # Panics
///
/// As [`read_corpus`], or when a harness panics.
pub fn run_corpora(crate_dir: &str, targets: &[(&str, Harness)]) {
    for (name, target) in targets {
        read_corpus(crate_dir, name).iter().for_each(|input| target(input));
    }
}
