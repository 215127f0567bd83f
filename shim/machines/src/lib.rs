//! Machine pods and persistent VMs: what annotations and volumes of a machine pod ask for becomes the document that the keeper runs, and a
//! VM that outlives its pods keeps its identity and its disks here.
//!
//! The crate starts no process and knows no CRI type. It reads images, volumes and the directories of persistent VMs.

pub mod honoured;
pub mod machine_pod;
pub mod multus;
mod settings;
pub mod vms;

pub use settings::MachineSettings;
