//! Manages the containers of the pod. Each operation has a file: create, start, signal, exec, guest shell, abandon, update, resize, remove,
//! hold, restore.
//!
//! Every operation may be repeated: a request for what is done already succeeds without effect. `pod` has the table of
//! containers and processes. This layer does not know gRPC.

mod abandon;
pub mod anonymous_volumes;
mod cpu_limit;
mod create;
pub mod devices;
mod error;
mod exec;
mod freeze;
mod guest_shell;
mod hold;
mod host_ids;
pub mod image_volumes;
pub mod limits;
mod lock;
pub mod mapped_mounts;
mod options;
mod pid_namespace;
mod pod;
mod prepare;
mod process;
mod reap;
mod reclaim;
mod record;
mod remove;
mod resize;
mod restore;
pub mod root;
mod signal;
mod spawn;
pub mod spec;
mod start;
mod trace;
mod update;
pub mod user;

pub use error::AgentError;
pub use hold::HoldError;
pub use host_ids::HostIds;
pub use options::{CreateOptions, ExecOptions};
pub use pod::AgentPod;
pub use process::ContainerProcess;
pub use record::GuestContainer;
pub use restore::AdoptionError;
