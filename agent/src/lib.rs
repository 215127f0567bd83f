//! Runs a pod inside its VM, as PID 1, or on the node, in a PID namespace. See docs/contributor/agent.md.

pub mod boot;
pub mod cgroup;
pub mod clock;
pub mod container;
pub mod copied_in;
pub mod empty_dirs;
pub mod frame;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod huge_pages;
pub mod image;
mod image_files;
pub mod listener;
pub mod log;
pub mod memory;
pub mod paths;
pub mod processors;
pub mod rootfs;
pub mod server;
pub mod sockets;
pub mod stats;
pub mod stdio;
pub mod sys;
pub mod userns;
pub mod zygote;
