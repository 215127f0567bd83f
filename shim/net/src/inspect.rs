//! Reads from the namespace what the guest must have: links, addresses, routes, permanent neighbours.
//!
//! It reads the main routing tables and only what a process configured: not the routes that the kernel derives from addresses
//! (the guest's kernel derives the same), nor those from router advertisements (the guest receives its own). Settings that were
//! configured but that no guest gets are named in a warning (`unsupported_settings`).

use crate::netlink::{Address, Family, Link, Netlink};
use crate::{NetError, NetNs, run_in};
use ipnet::IpNet;
use nacelle_base::net::{Interface, Neighbour, PodNetwork, Route};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteProtocol, RouteType,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// The largest MTU of a tap: 65535 minus the Ethernet header.
pub(crate) const MAX_MTU: u32 = 65521;
/// The smallest MTU of an interface with IPv4 (RFC 791), and of one that has IPv6 addresses (RFC 8200).
const MIN_MTU: (u32, u32) = (68, 1280);
/// The maximum number of routes, and of neighbours, of a pod.
const MAX_ENTRIES: usize = 1024;
/// The routing table of a host's own addresses (RT_TABLE_LOCAL).
const LOCAL_TABLE: u32 = 255;
/// Transmit queue lengths in packets that cause no warning: 0 is what plugins send for a veth pair without a configured length, 1000 is the
/// kernel's default.
const USUAL_QUEUE_LENGTHS: [u32; 2] = [0, 1000];
/// The largest segment that a guest's card sends or receives as one, in bytes.
const SEGMENT: u32 = 65536;

/// Returns what the guest must have to take the place of these interfaces, in this order (the default one first).
///
/// Routes on the link come before routes through a gateway. An address whose prefix is not on the link (the ptp plugin) gets the
/// host's prefix length, so that the guest's kernel derives no route from it.
pub fn inspect(netns: &NetNs, interfaces: &[String]) -> Result<PodNetwork, NetError> {
    let mut netlink = run_in(netns, Netlink::open)??;
    let links = interfaces.iter().map(|name| netlink.link(name)).collect::<Result<Vec<_>, _>>()?;
    let addresses = netlink.addresses()?;
    let (mut routes, mut neighbours, mut other) = (Vec::new(), Vec::new(), Vec::new());
    for family in [Family::Inet, Family::Inet6] {
        for message in netlink.routes(family)? {
            match parse_route(&message, &links)? {
                GuestRoute::Route(found) => routes.push(found),
                GuestRoute::Unsupported(what) => other.push(what),
                GuestRoute::Nothing => {}
            }
        }
        neighbours.extend(netlink.neighbours(family)?);
        other.extend(netlink.rules(family)?.iter().map(|priority| format!("policy rule {priority} ({family:?})")));
    }
    for (what, count) in [("routes", routes.len()), ("permanent neighbours", neighbours.len())] {
        if count > MAX_ENTRIES {
            return Err(NetError::TooMany { what, count, limit: MAX_ENTRIES });
        }
    }
    let carried = |address: &&Address| address.global && links.iter().any(|link| link.index == address.index);
    let own: Vec<Address> = addresses.iter().filter(carried).cloned().collect();
    let made = |link: &Link| build_interface(link, &own, &routes, &neighbours);
    let interfaces = links.iter().map(made).collect::<Result<Vec<_>, _>>()?;
    other.extend(run_in(netns, || {
        links.iter().flat_map(|link| unsupported_settings(link, &addresses)).collect::<Vec<_>>()
    })?);
    let routes = order_guest_routes(routes, &own, &mut other);
    other.sort();
    if !other.is_empty() {
        let (netns, what) = (netns.path().display(), summarize(&other));
        tracing::warn!(%netns, what, "the guest does not get some settings of the CNI plugins");
    }
    Ok(PodNetwork { interfaces, routes })
}

/// Returns an error unless the namespace has this interface and it is an Ethernet interface.
pub(crate) fn check_ethernet(netns: &NetNs, name: &str) -> Result<(), NetError> {
    let link = run_in(netns, Netlink::open)??.link(name)?;
    link.mac.map(drop).ok_or(NetError::NotEthernet { name: link.name })
}

/// Returns the addresses of these interfaces, for a pod without a guest, which uses the namespace as it is.
pub(crate) fn inspect_addresses(netns: &NetNs, interfaces: &[String]) -> Result<PodNetwork, NetError> {
    let mut netlink = run_in(netns, Netlink::open)??;
    let all = netlink.addresses()?;
    let made = |name: &String| {
        let link = netlink.link(name)?;
        let own = all.iter().filter(|address| address.global && address.index == link.index);
        let addresses = own.map(|address| address.net).collect();
        Ok(Interface {
            name: link.name,
            mac: link.mac.unwrap_or_default(),
            mtu: link.mtu,
            addresses,
            neighbours: Vec::new(),
        })
    };
    let interfaces = interfaces.iter().map(made).collect::<Result<_, NetError>>()?;
    Ok(PodNetwork { interfaces, routes: Vec::new() })
}

/// The meaning of a namespace's route for the guest.
enum GuestRoute {
    Route(RouteEntry),
    /// The route concerns the guest, but cannot be configured there.
    Unsupported(String),
    Nothing,
}

/// Joins the first of these names, and the number of the others.
fn summarize(names: &[String]) -> String {
    const SHOWN: usize = 10;
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Returns what is configured on this link but no guest gets. Runs on a thread in the link's namespace.
fn unsupported_settings(link: &Link, addresses: &[Address]) -> Vec<String> {
    let name = &link.name;
    let of_link = addresses.iter().filter(|address| address.index == link.index && !address.global);
    let mut all: Vec<String> = of_link.map(|address| format!("address {} of link scope", address.net)).collect();
    if let Some(length) = link.queue_length.filter(|length| !USUAL_QUEUE_LENGTHS.contains(length)) {
        all.push(format!("transmit queue of {length} packets of {name}"));
    }
    for (what, size) in [("gso_max_size", link.gso_max_size), ("gro_max_size", link.gro_max_size)] {
        if let Some(size) = size.filter(|size| *size != SEGMENT) {
            all.push(format!("{what} {size} of {name}"));
        }
    }
    for family in ["ipv4", "ipv6"] {
        all.extend(sysctls(family, name));
    }
    all
}

/// Returns the sysctls of the interface that differ from those of a new interface in this namespace, except those that plugins
/// set for the namespace's own announcements and those that the kernel sets.
fn sysctls(family: &str, name: &str) -> Vec<String> {
    const NAMESPACE_ONLY: [&str; 4] = ["arp_notify", "ndisc_notify", "accept_dad", "stable_secret"];
    let directory = |of: &str| Path::new("/proc/sys/net").join(family).join("conf").join(of);
    let value = |of: &str, key: &std::ffi::OsStr| std::fs::read_to_string(directory(of).join(key)).ok();
    let keys = std::fs::read_dir(directory(name)).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut all = Vec::new();
    for key in keys {
        let text = key.to_string_lossy();
        // The kernel sets this one from the link's MTU.
        if text == "mtu" || NAMESPACE_ONLY.contains(&text.as_ref()) {
            continue;
        }
        if let (Some(own), Some(usual)) = (value(name, &key), value("default", &key))
            && own != usual
        {
            let own: String = own.trim().chars().take(40).collect();
            all.push(format!("sysctl net.{family}.conf.{name}.{text}={own}"));
        }
    }
    all
}

/// A route of the main table over one of the links.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RouteEntry {
    route: Route,
    /// The kernel derived the route from an address.
    by_kernel: bool,
    /// The gateway counts as on the link although no other route covers it.
    onlink: bool,
    /// The route has metrics in addition to its MTU.
    metrics: bool,
}

fn build_interface(
    link: &Link,
    addresses: &[Address],
    routes: &[RouteEntry],
    neighbours: &[(u32, Neighbour)],
) -> Result<Interface, NetError> {
    let mac = link.mac.ok_or_else(|| NetError::NotEthernet { name: link.name.clone() })?;
    // Zero and multicast addresses are no valid station addresses; kernels reject them.
    if mac == [0; 6] || mac[0] & 1 != 0 {
        return Err(NetError::BadMac { name: link.name.clone(), mac });
    }
    let on_link = |net: &IpNet| {
        let of_it = |found: &RouteEntry| found.route.interface == link.name && found.route.destination == net.trunc();
        routes.iter().any(|found| found.by_kernel && of_it(found))
    };
    let own = addresses.iter().filter(|address| address.index == link.index).map(|address| address.net);
    let addresses: Vec<_> = own.map(|net| if on_link(&net) { net } else { IpNet::from(net.addr()) }).collect();
    let neighbours = neighbours.iter().filter(|(index, _)| *index == link.index).map(|(_, one)| one.clone()).collect();
    let mtu = guest_mtu(link, addresses.iter().any(|net| net.addr().is_ipv6()))?;
    Ok(Interface { name: link.name.clone(), mac, mtu, addresses, neighbours })
}

/// Returns the MTU of the guest's card: the interface's, limited to the maximum of a tap.
fn guest_mtu(link: &Link, ipv6: bool) -> Result<u32, NetError> {
    let least = if ipv6 { MIN_MTU.1 } else { MIN_MTU.0 };
    if link.mtu < least {
        return Err(NetError::SmallMtu { name: link.name.clone(), mtu: link.mtu, least });
    }
    if link.mtu > MAX_MTU {
        let (name, mtu) = (&link.name, link.mtu);
        tracing::warn!(
            name,
            mtu,
            guest_mtu = MAX_MTU,
            "the guest's MTU is smaller than that of the CNI interface: no tap has a larger one"
        );
    }
    Ok(link.mtu.min(MAX_MTU))
}

/// Reads a route. Returns an error for a unicast route of the main table that cannot be configured in the guest; other such routes
/// are [`GuestRoute::Unsupported`].
fn parse_route(message: &RouteMessage, links: &[Link]) -> Result<GuestRoute, NetError> {
    let header = &message.header;
    let mut gateway = None;
    let mut destination = match header.address_family {
        Family::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let mut table = u32::from(header.table);
    let (mut metric, mut interface, mut refused) = (None, None, None);
    let (mut source, mut mtu, mut metrics) = (None, None, false);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(to) => destination = ip(to).unwrap_or(destination),
            RouteAttribute::Gateway(through) => gateway = ip(through),
            RouteAttribute::Oif(index) => interface = links.iter().find(|link| link.index == *index),
            RouteAttribute::Priority(number) => metric = Some(*number),
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::MultiPath(hops) => {
                interface = links.iter().find(|link| hops.iter().any(|hop| hop.interface_index == link.index));
                refused = Some("it has several next hops");
            }
            RouteAttribute::PrefSource(address) => source = ip(address),
            RouteAttribute::Metrics(all) => {
                for one in all {
                    match one {
                        RouteMetric::Mtu(bytes) => mtu = Some(*bytes),
                        _ => metrics = true,
                    }
                }
            }
            RouteAttribute::Via(_) => refused = Some("its gateway is of another address family"),
            RouteAttribute::Encap(_) => refused = Some("it is encapsulated"),
            _ => (),
        }
    }
    let learned = matches!(header.protocol, RouteProtocol::Ra | RouteProtocol::IcmpRedirect);
    let Ok(destination) = IpNet::new(destination, header.destination_prefix_length) else {
        return Ok(GuestRoute::Nothing);
    };
    let main = table == u32::from(RouteHeader::RT_TABLE_MAIN);
    let of_kernel = table == LOCAL_TABLE || header.protocol == RouteProtocol::Kernel;
    // Routes that the kernel adds for IPv6: loopback, link-local, multicast.
    if learned || (!main && of_kernel) {
        return Ok(GuestRoute::Nothing);
    }
    if matches!(header.kind, RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw) {
        return Ok(if of_kernel {
            GuestRoute::Nothing
        } else {
            GuestRoute::Unsupported(format!("{:?} route to {destination}", header.kind))
        });
    }
    let Some(link) = interface else { return Ok(GuestRoute::Nothing) };
    if header.kind != RouteType::Unicast {
        return Ok(GuestRoute::Nothing);
    }
    if !main {
        return Ok(GuestRoute::Unsupported(format!("route to {destination} in table {table}")));
    }
    if let Some(why) = refused {
        return Err(NetError::Route { destination: destination.to_string(), why });
    }
    Ok(GuestRoute::Route(RouteEntry {
        route: Route { destination, gateway, interface: link.name.clone(), metric, source, mtu },
        by_kernel: header.protocol == RouteProtocol::Kernel,
        onlink: header.flags.contains(RouteFlags::Onlink),
        metrics,
    }))
}

/// Returns the routes in an order in which the guest can add them. Routes that the kernel derived from an address are left out,
/// because the guest's kernel derives them too, except one to a peer, which the guest does not know.
fn order_guest_routes(found: Vec<RouteEntry>, addresses: &[Address], other: &mut Vec<String>) -> Vec<Route> {
    let by_address = |found: &RouteEntry| {
        let to = found.route.destination;
        let of_link = matches!(to, IpNet::V6(net) if net.addr().is_unicast_link_local() || net.addr().is_multicast());
        found.by_kernel && (of_link || addresses.iter().any(|address| address.net.trunc() == to))
    };
    let mut on_link = Vec::new();
    let mut by_gateway = Vec::new();
    for found in found.into_iter().filter(|found| !by_address(found)) {
        let RouteEntry { mut route, by_kernel, onlink, metrics } = found;
        if metrics {
            other.push(format!("metrics of the route to {}", route.destination));
        }
        // The kernel chooses the source of its own routes. A guest would reject a source that is not an address of its own.
        let known = |source: &IpAddr| addresses.iter().any(|address| address.net.addr() == *source);
        match route.source {
            Some(_) if by_kernel => route.source = None,
            Some(source) if !known(&source) => {
                other.push(format!("source {source} of the route to {}", route.destination));
                route.source = None;
            }
            _ => {}
        }
        let Some(gateway) = route.gateway else {
            on_link.push(route);
            continue;
        };
        if onlink {
            let interface = route.interface.clone();
            let metric = route.metric;
            on_link.push(Route {
                destination: gateway.into(),
                gateway: None,
                interface,
                metric,
                source: None,
                mtu: None,
            });
        }
        by_gateway.push(route);
    }
    let mut routes: Vec<Route> = Vec::with_capacity(on_link.len() + by_gateway.len());
    for route in on_link.into_iter().chain(by_gateway) {
        if !routes.contains(&route) {
            routes.push(route);
        }
    }
    routes
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some((*v4).into()),
        RouteAddress::Inet6(v6) => Some((*v6).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transmit_queue_that_a_plugin_has_not_configured_is_no_setting() {
        let settings = |queue_length| {
            // No such interface: it has no sysctls.
            let name = "nacelle-none".to_owned();
            let link =
                Link { name, index: 7, mac: None, mtu: 1500, queue_length, gso_max_size: None, gro_max_size: None };
            unsupported_settings(&link, &[])
        };
        for usual in [None, Some(0), Some(1000)] {
            assert_eq!(settings(usual), Vec::<String>::new(), "{usual:?}");
        }
        assert_eq!(settings(Some(500)), ["transmit queue of 500 packets of nacelle-none"]);
    }
}
