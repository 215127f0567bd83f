//! Owns: the process beside a pod process that has the pod's volumes of the node and answers the guest's requests for
//! files (`nacelle-fs`), and the daemon's hand, which puts volumes into that process's mount namespace and takes them out.
//! May use: `base`, `jail`, `proto` (the pieces of a pushed volume), virtiofsd. Knows no pod and no engine. docs/contributor/devices/fs.md is the map.

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
