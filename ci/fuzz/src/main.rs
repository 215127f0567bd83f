//! Provides the entry point of libFuzzer, which runs the harness that FUZZ_TARGET names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nacelle_base::allocations::CountingAllocator;
use std::sync::LazyLock;

type Target = fn(&[u8]);

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

static CHOSEN: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let crates: [&[(&str, Target)]; 10] = [
        &nacelle_agent::fuzz::TARGETS,
        &nacelle_daemon::fuzz::TARGETS,
        &nacelle_fs::fuzz::TARGETS,
        &nacelle_image::fuzz::TARGETS,
        &nacelle_keeper::fuzz::TARGETS,
        &nacelle_net::fuzz::TARGETS,
        &nacelle_pod::fuzz::TARGETS,
        &nacelle_stream::fuzz::TARGETS,
        &nacelle_vmi::fuzz::TARGETS,
        &nacelle_vmm::fuzz::TARGETS,
    ];
    let found = crates.into_iter().flatten().find(|(target, _)| *target == name);
    found.unwrap_or_else(|| panic!("FUZZ_TARGET is {name:?}, which is no harness")).1
});

fuzz_target!(|data: &[u8]| CHOSEN(data));
