//! Defines what the boot hands over to the server.

use nacelle_proto::agent::BootConfig;

use crate::huge_pages::HugePages;
use crate::image::Disks;
use crate::listener::Socket;
use crate::memory::Memory;
use crate::processors::Processors;
use crate::userns::UserNs;
use crate::zygote::Zygote;

/// A pod that has reported itself ready, in a VM or on the node.
pub struct Ready {
    /// The configuration that the host has sent.
    pub config: BootConfig,
    /// The image, scratch and volume disks.
    pub disks: Disks,
    /// The VM's vCPUs.
    pub processors: Processors,
    /// The VM's memory.
    pub memory: Memory,
    /// The huge pages that the VM's kernel reserves.
    pub huge_pages: HugePages,
    /// Whether the agent's PID namespace is the node's.
    pub node_pid: bool,
    /// The containers' user namespace; `None` if it is the agent's.
    pub users: Option<UserNs>,
    /// Listens for the gRPC service.
    pub rpc: Socket,
    /// Listens for the streams.
    pub streams: Socket,
    /// The process that makes the containers' processes.
    pub zygote: Zygote,
}
