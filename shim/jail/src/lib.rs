//! Drops the rights of the pod process before the guest runs: mount namespace, limits, capabilities, seccomp filters. It
//! knows no pods, engines or devices, and depends only on `base` inside Nacelle. docs/contributor/jail.md lists what
//! remains accessible, and why.
//!
//! Every thread that serves a guest must be started with [`spawn`], which gives it the filter of its kind; before [`arm`]
//! it just starts a thread.

pub mod cgroup;
mod enter;
mod kinds;
mod seccomp;
mod spawn;
mod sys;
mod table;
mod walls;

pub use enter::{JailError, Plan, close_inherited, confine, enter};
pub use kinds::{Mode, Profile, ThreadKind};
pub use seccomp::{SeccompError, arm, arm_single, thread};
pub use spawn::spawn;
pub use table::{Allow, Only, alone, forbidden, table};
pub use walls::{Access, Place, WallError};
