//! Implements machine pods and persistent VMs: converts the annotations and volumes of a machine pod into the document that the
//! keeper runs, stores the identity and the disks of VMs that outlive their pods, serves the `nacelle vm` commands, and applies
//! changed annotations and secrets to running VMs.
//!
//! The crate starts no pod and knows no CRI type. What it needs of the daemon is the trait [`PodRuntime`], which the daemon
//! implements; nothing that starts a container pod depends on this crate's service or controllers.

pub mod controllers;
pub mod machine_pod;
pub mod multus;
pub mod runtime;
mod settings;
mod status;
pub mod supported;
mod transfer;
mod vm_service;
pub mod vms;

pub use runtime::PodRuntime;
pub use settings::MachineSettings;
pub use vm_service::VmService;
