//! Creates the directory in which the QEMU of a machine pod finds PCI devices of the node; the pod's processes see it as
//! /dev/vfio. The daemon creates there only the device nodes that the pod's container may have.

use crate::error::PodError;
use nacelle_base::files::at;
use nacelle_model::machine::VFIO_DIR;
use std::fs::{DirBuilder, Permissions, set_permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

/// The path at which the pod's processes see the directory. QEMU supports no other path.
pub const MOUNT_POINT: &str = "/dev/vfio";
/// What VFIO maps for a device besides the VM's memory, in MiB: firmware and video memory.
const OVERHEAD_MIB: u64 = 128;

/// Creates the directory. It stays root's, and the user of the pod's processes may read it: on the node, the directories above it are
/// closed to all users but root.
pub(crate) fn create(dir: &Path) -> Result<(), PodError> {
    let directory = dir.join(VFIO_DIR);
    let created = DirBuilder::new().mode(0o700).recursive(true).create(&directory);
    // Separately, because of the umask.
    let opened = created.and_then(|()| set_permissions(&directory, Permissions::from_mode(0o755)));
    Ok(opened.map_err(at("create", &directory))?)
}

/// Returns the limit of locked memory in bytes that devices of a VM with this memory need.
pub(crate) fn locked_bytes(memory_mib: u32) -> u64 {
    (u64::from(memory_mib) + OVERHEAD_MIB) << 20
}
