//! Owns: machine pods: pods whose container is a machine of its own making. What their annotations say becomes a machine here, and
//! what their container says becomes its disks.
//! May use: `vmi` (what people write), `keeper` (what the machine's process is told), the image store, files of volumes.

mod build;
mod clock;
mod container;
mod cpu;
mod credentials;
mod document;
#[cfg(test)]
mod examples;
mod files;
mod honoured;
mod kernel;
mod networks;
mod passed;
mod serving;
mod volumes;

pub use build::{Refused, build, not_honoured, reason, refused_value};
pub use container::check_container;
pub use cpu::cpu_model;
pub use credentials::credentials;
pub use document::{SourceError, document};
pub use files::{annotation_of, annotations_mount, cloud_init_of, files_of};
pub use honoured::known as honours;
pub use passed::{Passed, PassedError};
pub use volumes::{Place, VolumeError, check_volumes, folder, images_under, open, place, shared, unused};

use nacelle_model::machine::INTERFACE;
use nacelle_model::machine_pod::{MachinePod, RequestedDiskSource};
use nacelle_model::record::VmRecord;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// Gives a machine that outlives its pods what is the same in all its runs: where nothing else is said, its identity and the
/// addresses of its cards; and for cloud-init what tells it from a new machine. What it keeps is in `folder`.
pub fn identify(machine: &mut MachinePod, vm: &VmRecord, folder: PathBuf) {
    if machine.identity.uuid.is_empty() {
        machine.identity.uuid.clone_from(&vm.uuid);
    }
    // The pod's own interface has the machine's address, or the first one where it has none of that; those of the others follow from
    // who it is, so that copies and exports need not say them.
    let own = machine.cards.iter().position(|card| card.interface == INTERFACE).unwrap_or(0);
    for (n, card) in machine.cards.iter_mut().enumerate() {
        card.mac.get_or_insert_with(|| if n == own { vm.mac } else { further_mac(&vm.uuid, &card.interface) });
    }
    for disk in &mut machine.disks {
        if let RequestedDiskSource::CloudInit(data) | RequestedDiskSource::CloudInitOf { data, .. } = &mut disk.source {
            data.instance.clone_from(&vm.uuid);
        }
    }
    machine.keep = Some(folder);
}

/// The address of a further card of this machine: a station's own, administered here.
fn further_mac(uuid: &str, interface: &str) -> [u8; 6] {
    let digest: [u8; 32] = Sha256::digest(format!("{uuid}/{interface}")).into();
    let [a, b, c, d, e, f, ..] = digest;
    [(a & 0xfc) | 2, b, c, d, e, f]
}
