//! Starts, resizes and tears down PodSandboxes: effects that run as tasks of their own and send their results to the pod's actor.

pub(crate) mod boot;
mod cgroup;
pub(crate) mod kernel;
pub(crate) mod network;
pub(crate) mod resize;
pub(crate) mod size;
pub(super) mod spec;
pub(crate) mod teardown;
