//! The containers of the pod and the operations on them, one per file: create, start, signal, exec, update, resize, remove.
//!
//! Every operation may be repeated: a request for what is done already succeeds without effect. `pod` has the table of
//! containers and processes; this layer knows nothing of gRPC.

mod create;
pub mod devices;
mod error;
mod exec;
pub mod limits;
mod lock;
mod options;
mod pid_namespace;
mod pod;
mod prepare;
mod process;
mod reap;
mod record;
mod remove;
mod resize;
pub mod root;
pub mod shown;
mod signal;
mod spawn;
pub mod spec;
mod start;
mod trace;
mod update;
pub mod user;
pub mod volumes;

pub use error::PodError;
pub use options::{CreateOptions, ExecOptions};
pub use pod::Pod;
pub use process::Process;
pub use record::Container;
