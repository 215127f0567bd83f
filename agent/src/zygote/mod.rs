//! Makes processes by the zygote: a process that the agent forks before it has a second thread, and that forks one child for each request.
//!
//! Only such a child makes processes, because fork and libcontainer must not run in a process with several threads. `client` is
//! the agent's side, `child` the loop of the zygote; both use the types of `message` and the functions of `wire`. What a child makes is
//! orphaned to the agent, which reaps it.

mod child;
mod client;
mod create;
mod error;
mod exec;
mod exec_message;
mod executor;
mod guest_root;
mod late_mounts;
mod message;
mod pause;
mod process;
#[cfg(test)]
mod tests;
mod wire;

pub use client::Zygote;
pub use error::ZygoteError;
pub use message::{CreateCommand, ExecCommand, ExecTarget, Refusal, RefusalKind, ZygoteRequest};
pub use process::NewProcess;
