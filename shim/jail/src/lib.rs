//! Owns: what the pod process gives up before the first guest byte. docs/contributor/jail.md says what is left, and why.
//! May use: `base`. Knows no pod, no engine, no device.
//!
//! Every thread that serves a guest is started by [`spawn`]; until the process is armed that is std's.

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
