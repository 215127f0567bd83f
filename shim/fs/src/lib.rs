//! Implements the file-server process beside a pod process (`nacelle-fs`), which holds the pod's volumes of the node and
//! answers the guest's file requests, and the daemon's side, which mounts volumes into that process's mount namespace and
//! unmounts them. It knows no pods and no engines.
//!
//! docs/contributor/devices/fs.md describes the whole. Inside Nacelle the crate depends on `base`, `jail` and `proto` (for
//! the parts of a copied-in volume); the file system itself is virtiofsd's.

mod copied_in;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod mounts;
mod names;
mod process;
mod server;
mod sockets;
mod sys;
mod views;
mod virtqueue;
mod volume_reader;
mod volumes;

pub use error::ShareError;
pub use process::{FileServerChannels, FileServerConfig, FileServerProcess, ShareLayout, start_file_server};
pub use volumes::{Owners, Propagation, VolumeAccess, VolumeTarget, VolumeToMount, mount_volumes, unmount_volumes};
