//! Owns: what the daemon says of a pod to CNI, and the DNS part of what CNI says back.

use ipnet::IpNet;
use nacelle_base::PodId;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A pod, as the plugins are told of it.
#[derive(Clone, Debug)]
pub struct PodRef {
    /// The id of the PodSandbox: CNI_CONTAINERID.
    pub id: PodId,
    /// K8S_POD_NAME.
    pub name: String,
    /// K8S_POD_NAMESPACE.
    pub namespace: String,
    /// K8S_POD_UID.
    pub uid: String,
    /// hostPorts; those with `host_port` 0 ask for none and are passed over.
    pub port_mappings: Vec<PortMapping>,
    /// Limits, if the pod asks for some.
    pub bandwidth: Option<Bandwidth>,
    /// DNS of the pod, for plugins that want to know (capability `dns`).
    pub dns: Option<Dns>,
    /// The node's pod CIDRs as UpdateRuntimeConfig told them (capability `ipRanges`); empty if unknown.
    pub pod_cidrs: Vec<IpNet>,
}

/// A port of the node that leads to a port of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    /// The port on the node; 0: none.
    pub host_port: u16,
    /// The port in the pod.
    pub container_port: u16,
    /// The protocol.
    pub protocol: Protocol,
    /// The address of the node to listen on; none: all.
    pub host_ip: Option<IpAddr>,
}

/// The protocol of a port.
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

/// Limits of a pod's traffic, in bits per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bandwidth {
    /// To the pod.
    pub ingress_bps: Option<u64>,
    /// From the pod.
    pub egress_bps: Option<u64>,
}

/// A resolver configuration: as CNI answered it, or as the pod shall have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    /// Name servers, the first one first.
    pub servers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// Resolver options: "ndots:5".
    pub options: Vec<String>,
}
