//! Drops the rights of the pod process before the guest runs: mount namespace, limits, capabilities, seccomp filters. It
//! knows no pods, engines or devices, and depends only on `base` inside Nacelle. docs/contributor/jail.md lists what
//! remains accessible, and why.
//!
//! Every thread that serves a guest must be started with [`spawn`], which gives it the filter of its kind; before [`install_process_filter`]
//! it just starts a thread.

pub mod cgroup;
pub mod disk_limits;
mod enter;
mod kinds;
mod mount_namespace;
mod oom;
mod privileges;
mod scope;
mod seccomp;
mod spawn;
mod sys;
mod table;
mod worker;

pub use enter::{JailError, JailPlan, ResourceLimits, close_inherited, confine, enter};
pub use kinds::{Mode, Profile, SocketUse, ThreadKind};
pub use mount_namespace::{Access, MountNamespaceError, VisiblePath, check_idmapped_mounts};
pub use oom::{drop_oom_protection, set_oom_score};
pub use scope::{NetworkAccess, create_child_pid_namespace};
pub use seccomp::{SeccompError, filter_thread, install_process_filter, install_single_thread_filter};
pub use spawn::spawn;
pub use table::{
    ArgumentRule, SyscallRule, allowed_calls, forbidden_calls, forbidden_when_single_threaded, worker_calls,
};
pub use worker::{WorkerJail, WorkerJailError, confine_worker};
