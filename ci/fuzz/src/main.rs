//! Owns: the entry point of libFuzzer: runs the harness that FUZZ_TARGET names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nacelle_vmm::fuzz::Target;
use std::sync::LazyLock;

static CHOSEN: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let mut all = nacelle_vmm::fuzz::TARGETS.iter().chain(&nacelle_stream::fuzz::TARGETS);
    let found = all.find(|(target, _)| *target == name);
    found.unwrap_or_else(|| panic!("FUZZ_TARGET is {name:?}, which is no harness")).1
});

fuzz_target!(|data: &[u8]| CHOSEN(data));
