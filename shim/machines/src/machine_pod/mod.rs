//! Implements machine pods, whose container is a machine: converts their annotations into the machine, and the volumes of their
//! container into its disks. It uses `vmi` (the users' specification), `keeper` (the document of the keeper), the image store and
//! files in volumes.

mod build;
mod clock;
mod container;
mod cpu;
mod credentials;
mod document;
#[cfg(test)]
mod examples;
mod files;
mod kernel;
mod networks;
mod passthrough;
mod rejection;
mod serving;
mod supported;
mod volume_error;
mod volumes;

pub use build::{build, first_unsupported_value, unsupported_fields};
pub use container::check_container;
pub use cpu::cpu_model;
pub use credentials::{credential_directories, read_credentials};
pub use document::{SourceError, build_document};
pub use files::{annotations_mount, cloud_init_disk_source, files_disk_source, read_annotation};
pub use passthrough::{PassthroughDevices, PassthroughError};
pub use rejection::{SpecRejection, unsupported_reason};
pub use supported::is_supported as supports_field;
pub use volume_error::VolumeError;
pub use volumes::{
    DiskVolume, backing_images, check_unused, check_volumes, filesystem_mount, find_disk_volume, open_disk_file,
    resolve_directory,
};

use nacelle_model::machine::INTERFACE;
use nacelle_model::machine_pod::{MachinePod, RequestedDiskSource};
use nacelle_model::record::VmRecord;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// Gives a persistent VM the properties that are the same in all its runs, unless the specification sets them: its UUID, the MAC
/// addresses of its interfaces, and cloud-init's instance id. `directory` is the directory of its disks.
pub fn set_identity(machine: &mut MachinePod, vm: &VmRecord, directory: PathBuf) {
    if machine.identity.uuid.is_empty() {
        machine.identity.uuid.clone_from(&vm.uuid);
    }
    // The pod's own interface, or the first one if the machine lacks that, has the VM's MAC address. Those of the others are
    // derived from the UUID, so that copies and exports need not store them.
    let primary = machine.cards.iter().position(|card| card.interface == INTERFACE).unwrap_or(0);
    for (n, card) in machine.cards.iter_mut().enumerate() {
        card.mac.get_or_insert_with(|| if n == primary { vm.mac } else { derive_mac(&vm.uuid, &card.interface) });
    }
    for disk in &mut machine.disks {
        if let RequestedDiskSource::CloudInit(data) | RequestedDiskSource::CloudInitOf { data, .. } = &mut disk.source {
            data.instance.clone_from(&vm.uuid);
        }
    }
    machine.keep = Some(directory);
}

/// Returns the MAC address of a further interface of this machine: unicast and locally administered.
fn derive_mac(uuid: &str, interface: &str) -> [u8; 6] {
    let digest: [u8; 32] = Sha256::digest(format!("{uuid}/{interface}")).into();
    let [a, b, c, d, e, f, ..] = digest;
    [(a & 0xfc) | 2, b, c, d, e, f]
}
