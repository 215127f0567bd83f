//! Defines the network of a pod as the guest must configure it: plain data, without netlink and CNI.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// One interface of the pod, as the CNI result and the interface in the network namespace describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// The interface's name in the network namespace and in the guest: "eth0".
    pub name: String,
    /// The MAC that peers have learned and that the guest must use.
    pub mac: Mac,
    /// The MTU in bytes.
    pub mtu: u32,
    /// Addresses with their prefix length.
    pub addresses: Vec<IpNet>,
    /// Permanent entries of the interface's neighbour table (ARP, neighbour discovery).
    pub neighbours: Vec<Neighbour>,
}

/// A neighbour whose Ethernet address the guest must not resolve by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// The IP address.
    pub ip: IpAddr,
    /// The Ethernet address.
    pub mac: Mac,
}

/// One route of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination network.
    pub destination: IpNet,
    /// The router; `None` for a network on the link.
    pub gateway: Option<IpAddr>,
    /// The name of the interface.
    pub interface: String,
    /// The metric (priority), if one was set.
    pub metric: Option<u32>,
    /// The preferred source address, if one was set.
    pub source: Option<IpAddr>,
    /// The MTU of the route, if one was set.
    pub mtu: Option<u32>,
}

/// The network that the guest must configure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNetwork {
    /// The interfaces, the default one first.
    pub interfaces: Vec<Interface>,
    /// The routes, in the order in which they must be added.
    pub routes: Vec<Route>,
}

impl PodNetwork {
    /// Returns the pod's addresses: those of the default interface, IPv4 before IPv6 as in the CNI result. The cluster does
    /// not know the networks of the other interfaces.
    pub fn ips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.interfaces.first().into_iter().flat_map(|interface| interface.addresses.iter().map(|net| net.addr()))
    }
}
