//! Defines the network settings of a pod: DNS configuration and port mappings.

use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A port of the node that leads to a port of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    /// The port on the node; 0 when the pod asks for none.
    pub host_port: u16,
    /// The port in the pod.
    pub container_port: u16,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The address of the node to listen on; `None` means all addresses.
    pub host_ip: Option<IpAddr>,
}

/// The transport protocol of a port mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// The limits of a pod's traffic, in bits per second; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// The limit of traffic to the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_bps: Option<u64>,
    /// The limit of traffic from the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_bps: Option<u64>,
}

impl Bandwidth {
    /// Returns whether there is no limit.
    pub fn is_unlimited(&self) -> bool {
        *self == Bandwidth::default()
    }
}

/// A resolver configuration, from the CRI request or from the result of a CNI plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsConfig {
    /// Name servers in the order in which the resolver asks them.
    pub servers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// Resolver options, for example "ndots:5".
    pub options: Vec<String>,
}
