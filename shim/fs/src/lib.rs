//! Implements the file-server process beside a pod process (`nacelle-fs`), which holds the pod's volumes of the node and
//! answers the guest's file requests, and the daemon's side, which mounts volumes into that process's mount namespace and
//! unmounts them. It knows no pods and no engines.
//!
//! docs/contributor/devices/fs.md describes the whole. Inside Nacelle the crate depends on `base`, `jail` and `proto` (for
//! the parts of a copied-in volume); the file system itself is virtiofsd's.

mod error;
mod mounts;
mod names;
mod pusher;
mod queue;
mod room;
mod server;
mod sys;
mod tree;
mod views;
mod volumes;

pub use error::ShareError;
pub use room::{Share, Shown, Ways, start};
pub use volumes::{Owners, Propagation, Taker, Volume, VolumeAccess, attach, detach};
