//! Determines how the volumes of a container reach it: shared, copied in, as sockets, memory or a disk of the VM. docs/contributor/volumes.md has
//! the rules.

pub(crate) mod copied_in;
pub(crate) mod device;
mod disk;
mod empty_dir;
mod host_path;
mod memory;
pub(crate) mod plan;
mod saved;
pub(crate) mod shared;
mod sockets;

pub(crate) use saved::volume_key;
