//! Owns: reading from the namespace what the guest must have: links, addresses, routes.
//!
//! Read are the main routing tables and what was set there by somebody: not the routes that the kernel makes
//! of addresses (the guest's kernel makes the same), nor what router advertisements brought (the guest gets
//! its own). Policy rules, further tables, preferred sources and static neighbours are not carried over.

use crate::netlink::{Address, Family, Link, Netlink};
use crate::{NetError, NetNs, run_in};
use ipnet::IpNet;
use nacelle_base::net::{Interface, PodNetwork, Route};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteType,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What the guest must have to take the place of these interfaces, in this order (the default one first).
///
/// Routes on the link come before routes through a gateway. An address whose prefix is not on the link (the
/// ptp plugin) comes with the host's prefix length, so that the guest's kernel makes no route of it.
pub fn inspect(netns: &NetNs, interfaces: &[String]) -> Result<PodNetwork, NetError> {
    let mut netlink = run_in(netns, Netlink::open)??;
    let links = interfaces.iter().map(|name| netlink.link(name)).collect::<Result<Vec<_>, _>>()?;
    let addresses = netlink.addresses()?;
    let mut routes = Vec::new();
    for family in [Family::Inet, Family::Inet6] {
        for message in netlink.routes(family)? {
            routes.extend(read(&message, &links)?);
        }
    }
    let interfaces = links.iter().map(|link| interface(link, &addresses, &routes)).collect::<Result<_, _>>()?;
    Ok(PodNetwork { interfaces, routes: for_the_guest(routes) })
}

/// A route of the main table over one of the links.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    route: Route,
    /// Made by the kernel for an address.
    by_kernel: bool,
    /// The gateway counts as on the link though no other route says so.
    onlink: bool,
}

fn interface(link: &Link, addresses: &[Address], routes: &[Found]) -> Result<Interface, NetError> {
    let mac = link.mac.ok_or_else(|| NetError::NotEthernet { name: link.name.clone() })?;
    let on_link = |net: &IpNet| {
        let of_it = |found: &Found| found.route.interface == link.name && found.route.destination == net.trunc();
        routes.iter().any(|found| found.by_kernel && of_it(found))
    };
    let own = addresses.iter().filter(|address| address.index == link.index).map(|address| address.net);
    let addresses = own.map(|net| if on_link(&net) { net } else { IpNet::from(net.addr()) }).collect();
    Ok(Interface { name: link.name.clone(), mac, mtu: link.mtu, addresses })
}

/// Nothing for a route that does not concern the guest; an error for one that it should have and cannot.
fn read(message: &RouteMessage, links: &[Link]) -> Result<Option<Found>, NetError> {
    let header = &message.header;
    let mut gateway = None;
    let mut destination = match header.address_family {
        Family::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let mut table = u32::from(header.table);
    let (mut metric, mut interface, mut refused) = (None, None, None);
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
            RouteAttribute::Via(_) => refused = Some("its gateway is of another address family"),
            RouteAttribute::Encap(_) => refused = Some("it is encapsulated"),
            _ => (),
        }
    }
    let (Some(link), Ok(destination)) = (interface, IpNet::new(destination, header.destination_prefix_length)) else {
        return Ok(None);
    };
    let learned = matches!(header.protocol, RouteProtocol::Ra | RouteProtocol::IcmpRedirect);
    if table != u32::from(RouteHeader::RT_TABLE_MAIN) || header.kind != RouteType::Unicast || learned {
        return Ok(None);
    }
    if let Some(why) = refused {
        return Err(NetError::Route { destination: destination.to_string(), why });
    }
    Ok(Some(Found {
        route: Route { destination, gateway, interface: link.name.clone(), metric },
        by_kernel: header.protocol == RouteProtocol::Kernel,
        onlink: header.flags.contains(RouteFlags::Onlink),
    }))
}

fn for_the_guest(found: Vec<Found>) -> Vec<Route> {
    let mut on_link = Vec::new();
    let mut by_gateway = Vec::new();
    for Found { route, onlink, .. } in found.into_iter().filter(|found| !found.by_kernel) {
        let Some(gateway) = route.gateway else {
            on_link.push(route);
            continue;
        };
        if onlink {
            on_link.push(Route { destination: gateway.into(), gateway: None, ..route.clone() });
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
