//! Runs fuzz harnesses with the inputs of their stored corpora and with changed ones, for the tests of the crates that have
//! harnesses. Only with the feature `testing`.

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;
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

/// Calls harnesses `cases` times with an input of their corpora in which some bytes were replaced, and with a part of it.
///
/// # Panics
///
/// As [`run_corpora`]; the message has the smallest change that makes a harness panic.
pub fn run_mutated_corpora(crate_dir: &str, targets: &[(&str, Harness)], cases: u32) {
    let corpora: Vec<_> = targets.iter().map(|(name, target)| (read_corpus(crate_dir, name), target)).collect();
    let flaws = proptest::collection::vec((any::<Index>(), any::<u8>()), 1..6);
    let changes = (any::<Index>(), any::<Index>(), flaws, any::<Index>());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let run = TestRunner::new(config).run(&changes, |(target, input, flaws, end)| {
        let (inputs, target) = target.get(&corpora);
        let mut data = input.get(inputs).clone();
        for (at, byte) in flaws {
            let at = at.index(data.len().max(1));
            data.get_mut(at).into_iter().for_each(|place| *place = byte);
        }
        target(&data);
        data.truncate(end.index(data.len() + 1));
        target(&data);
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
}
