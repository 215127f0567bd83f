//! Owns: what the pod process gives up before the first guest byte. docs/security.md says what is left, and why.
//! May use: `base`. Knows no pod, no engine, no device.
//!
//! [`thread`] is the first call of every thread that serves a guest; it does nothing until the process is armed.

mod kinds;
mod seccomp;
mod table;

pub use kinds::{Mode, Profile, ThreadKind};
pub use seccomp::{SeccompError, arm, thread};
pub use table::{Allow, Only, forbidden, table};
