//! Owns: what the pod process gives up before the first guest byte. docs/security.md says what is left, and why.
//! May use: `base`. Knows no pod, no engine, no device.
//!
//! [`thread`] is the first call of every thread that serves a guest; it does nothing until the process is armed.

pub mod cgroup;
mod enter;
mod kinds;
mod seccomp;
mod sys;
mod table;
mod walls;

pub use enter::{JailError, Plan, close_inherited, enter};
pub use kinds::{Mode, Profile, ThreadKind};
pub use seccomp::{SeccompError, arm, thread};
pub use table::{Allow, Only, forbidden, table};
pub use walls::{Access, Place, WallError};
