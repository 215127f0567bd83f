//! Owns: the entry point of libFuzzer: runs the harness that FUZZ_TARGET names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nacelle_vmm::fuzz::{TARGETS, Target};
use std::sync::LazyLock;

static CHOSEN: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(target, _)| *target == name);
    found.unwrap_or_else(|| panic!("FUZZ_TARGET is none of {:?}", TARGETS.map(|(target, _)| target))).1
});

fuzz_target!(|data: &[u8]| CHOSEN(data));
