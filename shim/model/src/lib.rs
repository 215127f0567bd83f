//! Defines pods, containers, VMs and what they are made of as plain, validated data, together with their state tables and the
//! records that the store keeps of them.
//!
//! Nothing here performs I/O, reads a clock or knows a CRI type: the daemon converts and checks requests before they become these types,
//! and reading a stored record returns the same types.

pub mod capability;
pub mod checkpoint;
pub mod container;
pub mod device;
pub mod digest;
pub mod empty_dir;
pub mod machine;
pub mod machine_pod;
pub mod mount;
pub mod namespace;
pub mod network;
pub mod pod;
pub mod process;
pub mod record;
pub mod resources;
pub mod seccomp;
pub mod security;
pub mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::collections::BTreeMap;

/// A map of strings to strings, as labels, annotations and sysctls are.
pub type StringMap = BTreeMap<String, String>;
