//! Prepares a VM that is to be a template, before its agent greets the host: then it is saved.

use crate::memory::{MEMINFO, read_available, read_meminfo};
use std::io;
use std::path::Path;

/// The kernel parameter of a template, which the engine adds: the kernel makes it a variable of init's environment.
const PARAMETER: &str = "nacelle_template";
/// The memory in bytes of the largest VM whose free memory is cleared.
const MAX_MEMORY: u64 = 512 << 20;
/// How much memory is allocated at a time, in bytes.
const CHUNK: usize = 1 << 20;
/// The available memory in bytes that stays untouched. Less, and the kernel would find nothing to kill but init.
const RESERVED: u64 = 24 << 20;

/// Returns whether this VM is booted to be saved as a template.
pub(super) fn is_template() -> bool {
    std::env::var_os(PARAMETER).is_some()
}

/// Fills free memory with zeros. What the kernel has freed (the archive of the initial file system, its own initialization) would be saved
/// otherwise, and a clone that allocates it would copy each of its pages before it overwrites them. A large VM is left as it is, because
/// all memory that it writes becomes memory of the node meanwhile.
pub(super) fn clear_free_memory() -> io::Result<()> {
    if read_meminfo(Path::new(MEMINFO), "MemTotal")? > MAX_MEMORY {
        return Ok(());
    }
    let mut chunks = Vec::new();
    // Available memory is without what the kernel keeps for itself, which grows with all memory.
    while read_available(Path::new(MEMINFO))? > RESERVED {
        let mut chunk = std::hint::black_box(vec![0_u8; CHUNK]);
        // Memory is taken when it is written.
        chunk.fill(0);
        chunks.push(std::hint::black_box(chunk));
    }
    tracing::info!(mib = chunks.len(), "cleared free memory");
    Ok(())
}
