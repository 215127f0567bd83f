//! Implements machine pods and persistent VMs: converts the annotations and volumes of a machine pod into the document that the
//! keeper runs, and stores the identity and the disks of VMs that outlive their pods.
//!
//! The crate starts no process and knows no CRI type. It reads images, volumes and the directories of persistent VMs.

pub mod honoured;
pub mod machine_pod;
pub mod multus;
mod settings;
pub mod vms;

pub use settings::MachineSettings;
