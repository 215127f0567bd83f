//! Owns: the network of a pod as the guest shall have it: plain data, no netlink, no CNI.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// One interface of the pod, as the CNI result and the interface in the netns say it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name in netns and guest: "eth0".
    pub name: String,
    /// The MAC that peers have learned and that the guest must use.
    pub mac: Mac,
    /// The MTU in bytes.
    pub mtu: u32,
    /// Addresses with their prefix length.
    pub addresses: Vec<IpNet>,
    /// Permanent entries of its neighbour table (ARP, neighbour discovery).
    pub neighbours: Vec<Neighbour>,
}

/// A neighbour whose Ethernet address is not to be asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its address.
    pub ip: IpAddr,
    /// Its Ethernet address.
    pub mac: Mac,
}

/// One route of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The network that is reached.
    pub destination: IpNet,
    /// The router, or none for a network on the link.
    pub gateway: Option<IpAddr>,
    /// The interface, by its name.
    pub interface: String,
    /// The metric (priority), if one was set.
    pub metric: Option<u32>,
    /// The preferred source address, if one was set.
    pub source: Option<IpAddr>,
    /// The MTU of what goes this way, if one was set.
    pub mtu: Option<u32>,
}

/// What the guest's network shall be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNetwork {
    /// The interfaces, the default one first.
    pub interfaces: Vec<Interface>,
    /// The routes, in the order in which they must be added.
    pub routes: Vec<Route>,
}

impl PodNetwork {
    /// The pod's addresses: those of the default interface, IPv4 before IPv6 as CNI gave them. The others are of networks of which
    /// the cluster knows nothing.
    pub fn ips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.interfaces.first().into_iter().flat_map(|interface| interface.addresses.iter().map(|net| net.addr()))
    }
}
