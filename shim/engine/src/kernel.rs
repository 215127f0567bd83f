//! Owns: which kernels a machine of an engine starts, as far as their files tell before there is one.

use nacelle_base::machine::EngineKind;
pub use nacelle_vmm::machine::KernelError;
use std::fs::File;

/// Refuses a file that no machine of this engine with this memory starts. Reads headers only.
pub fn check_kernel(file: &File, memory_mib: u32, engine: EngineKind) -> Result<(), KernelError> {
    // QEMU enters ELF images by PVH alone.
    nacelle_vmm::machine::check_kernel(file, memory_mib, engine == EngineKind::Qemu)
}
