//! Continues a pod from a checkpoint: opens its files before the jail, reads the state of the VM in the jail, and when the VM runs again
//! makes it the VM of this pod.
//!
//! What the files contain comes from a guest: in the worst case a pod process that its guest had taken over has written them.

mod files;
mod guest;
mod spec;

pub use files::{CheckpointFiles, copy_scratch};
pub use guest::{RestoredVm, adopt_guest};
pub use spec::{CheckpointBase, CheckpointImage, CheckpointedContainer};
