//! Provides the basic types and helpers that every crate of Nacelle shares. It depends on no other crate of Nacelle, and
//! knows neither CRI nor engines nor guests.

#[cfg(feature = "fuzz")]
pub mod allocations;
pub mod copied_in;
#[cfg(feature = "testing")]
pub mod corpus;
pub mod cpulist;
pub mod descriptors;
pub mod disk_limits;
pub mod draft;
pub mod error;
mod file_error;
pub mod files;
pub mod guest_log;
pub mod id;
pub mod jailed;
pub mod json;
pub mod lock;
pub mod machine;
pub mod mounts;
pub mod net;
pub mod pidfd;
pub mod random;
mod removal;
pub mod retry;
pub mod share;
pub mod sockets;
#[cfg(feature = "task")]
pub mod task;
#[cfg(feature = "testing")]
pub mod test_program;
pub mod timeline;
pub mod undo;
pub mod user_namespace;
pub mod writeback;
#[cfg(feature = "yaml")]
pub mod yaml;

pub use error::{Chain, Classify, FailureKind};
pub use id::{ContainerId, IdError, PodId};
