//! Defines the error of the boot. The host receives its text if the guest cannot be configured.

use std::io;
use std::path::PathBuf;

use super::ports::HANDSHAKE_PORT;
use crate::frame::AgentFrameError;
use crate::memory::MemoryResizeError;

/// Reasons the guest cannot be configured.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum BootError {
    #[error("cannot create the directory {path}")]
    Directory { path: String, source: nix::Error },
    #[error("cannot mount {kind} at {path}")]
    Mount { kind: &'static str, path: String, source: nix::Error },
    #[error("cannot switch to a root file system of its own")]
    SwitchRoot { source: nix::Error },
    #[error("cannot unmount {path}")]
    Unmount { path: &'static str, source: nix::Error },
    #[error("cannot bind the driver to the device {name}")]
    Bind { name: String, source: io::Error },
    #[error("cannot use all memory of the VM")]
    Memory { source: MemoryResizeError },
    #[error("cannot leave the node's namespaces")]
    Namespaces { source: nix::Error },
    #[error("cannot create the device {path}")]
    Device { path: String, source: nix::Error },
    #[error("cannot reach the host on vsock port {HANDSHAKE_PORT}")]
    Connect { source: nix::Error },
    #[error("cannot listen on vsock port {port}")]
    Listen { port: u32, source: nix::Error },
    #[error("the handshake with the host failed")]
    Handshake { source: AgentFrameError },
    #[error("cannot set the clock")]
    Clock { source: io::Error },
    #[error("cannot seed the random pool")]
    Entropy { source: io::Error },
    #[error("cannot set the host name {name:?}")]
    Hostname { name: String, source: nix::Error },
    #[error(
        "{name:?} is no sysctl that a pod may set: net.*, kernel.shm*, kernel.msg*, kernel.sem, kernel.domainname, \
         fs.mqueue.* and user.* are"
    )]
    SysctlName { name: String },
    #[error("cannot set the sysctl {name} to {value:?}")]
    Sysctl { name: String, value: String, source: io::Error },
    #[error("{text:?} is not a valid {what}")]
    Address { what: &'static str, text: String },
    #[error("the VM has no network device for {name}: it has only {have}")]
    NoNic { name: String, have: usize },
    #[error("cannot {what}")]
    Network { what: String, source: io::Error },
    #[error("cannot write {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot {what} the pod's user namespace")]
    UserNamespace { what: &'static str, source: io::Error },
    #[error("cannot start the zygote")]
    Zygote { source: io::Error },
    #[error("cannot give the agent's cgroup a device program; the guest's kernel needs CONFIG_CGROUP_BPF")]
    DeviceProgram { source: io::Error },
    #[error("cannot set a resource limit")]
    Limit { source: io::Error },
}
