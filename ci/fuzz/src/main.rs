//! Provides the entry point of libFuzzer, which runs the harness that FUZZ_TARGET names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static CHOSEN: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let guests = nacelle_vmm::fuzz::TARGETS.iter().chain(&nacelle_pod::fuzz::TARGETS).chain(&nacelle_keeper::fuzz::TARGETS);
    let found = guests.chain(&nacelle_stream::fuzz::TARGETS).chain(&nacelle_vmi::fuzz::TARGETS).chain(&nacelle_net::fuzz::TARGETS).chain(&nacelle_image::fuzz::TARGETS).find(|(target, _)| *target == name);
    found.unwrap_or_else(|| panic!("FUZZ_TARGET is {name:?}, which is no harness")).1
});

fuzz_target!(|data: &[u8]| CHOSEN(data));
