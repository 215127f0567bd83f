//! Defines what the boot hands over to the server.

use nacelle_proto::agent::BootConfig;

use crate::huge_pages::HugePages;
use crate::image::GuestDisks;
use crate::listener::HostSocket;
use crate::memory::HotplugMemory;
use crate::processors::OnlineCpus;
use crate::userns::UserNs;
use crate::zygote::Zygote;

/// A pod that has reported itself ready, in a VM or on the node.
pub struct BootedAgent {
    /// The configuration that the host has sent.
    pub config: BootConfig,
    /// The image, scratch and volume disks.
    pub disks: GuestDisks,
    /// The VM's vCPUs.
    pub processors: OnlineCpus,
    /// The VM's memory.
    pub memory: HotplugMemory,
    /// The huge pages that the VM's kernel reserves.
    pub huge_pages: HugePages,
    /// Whether the agent's PID namespace is the node's.
    pub node_pid: bool,
    /// Whether the agent runs in a guest.
    pub has_guest: bool,
    /// The containers' user namespace; `None` if it is the agent's.
    pub users: Option<UserNs>,
    /// Listens for the gRPC service.
    pub rpc: HostSocket,
    /// Listens for the streams.
    pub streams: HostSocket,
    /// The process that makes the containers' processes.
    pub zygote: Zygote,
}
