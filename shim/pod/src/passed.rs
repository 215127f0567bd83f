//! Owns: where a machine of the pod's own making finds PCI devices of the node: a folder of the pod's, which its processes see as the
//! node's /dev/vfio. The daemon puts there what the pod's container may have, and nothing else is in it.

use crate::error::PodError;
use nacelle_base::files::at;
use nacelle_model::machine::VFIO_DIR;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// Where the pod's processes see it. QEMU knows no other.
pub const SHOWN: &str = "/dev/vfio";
/// What is mapped for a device beside the machine's memory, in MiB: firmware, and the memory of a screen.
const BESIDE_MIB: u64 = 128;

/// Makes it.
pub(crate) fn make(dir: &Path) -> Result<(), PodError> {
    let folder = dir.join(VFIO_DIR);
    let made = DirBuilder::new().mode(0o700).recursive(true).create(&folder);
    Ok(made.map_err(at("create", &folder))?)
}

/// What devices may lock of the memory of a machine that has so much.
pub(crate) fn locked_bytes(memory_mib: u32) -> u64 {
    (u64::from(memory_mib) + BESIDE_MIB) << 20
}
