//! Checks by a kernel's file headers whether an engine can start it.

use nacelle_base::machine::EngineKind;
pub use nacelle_vmm::machine::KernelError;
use std::fs::File;

/// Rejects a file that no VM of this engine with this memory can start. Reads headers only.
pub fn check_kernel(file: &File, memory_mib: u32, engine: EngineKind) -> Result<(), KernelError> {
    // QEMU starts ELF images only by PVH.
    nacelle_vmm::machine::check_kernel(file, memory_mib, engine == EngineKind::Qemu)
}
