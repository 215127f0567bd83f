//! Describes a pod's network for the pod process and for the guest.

use nacelle_base::net::{Neighbour, PodNetwork};
use nacelle_machines::multus;
use nacelle_model::machine::INTERFACE;
use nacelle_model::network::DnsConfig;
use nacelle_model::pod::{PodConfig, PodKind};
use nacelle_net::Attachment;
use nacelle_pod::spec::NetworkSpec;
use nacelle_proto::{common, pod as proto};
use std::net::IpAddr;
use std::path::PathBuf;

/// Returns the attachment of a pod with the node's network: nothing to set up, and the addresses of the node.
pub(crate) fn of_node() -> Attachment {
    Attachment { network: PodNetwork::default(), dns: DnsConfig::default(), ips: Vec::new() }
}

/// Returns the specification of the pod's network: a tap for each network interface of a machine pod's machine, or for each
/// interface of the containers' guest.
pub(crate) fn network(config: &PodConfig, netns: PathBuf) -> NetworkSpec {
    let first = INTERFACE.to_owned();
    let (interfaces, queues) = match &config.kind {
        PodKind::Host { .. } => (vec![first], Vec::new()),
        PodKind::Machine { machine, .. } => {
            let cards = machine.cards.iter().map(|card| (card.interface.clone(), card.queues));
            let (interfaces, queues): (Vec<String>, Vec<u32>) = cards.unzip();
            (if interfaces.is_empty() { vec![first] } else { interfaces }, queues)
        }
        PodKind::Containers { .. } => {
            let asked = multus::requested_networks(&config.annotations, &config.name.namespace);
            // An invalid annotation is left to the plugins, which may not read it at all.
            let further = asked.ok().flatten().into_iter().flatten().map(|asked| asked.interface);
            (std::iter::once(first).chain(further).collect(), Vec::new())
        }
    };
    NetworkSpec { netns, interfaces, queues }
}

/// Reduces a network to these interfaces, in this order, and to the routes through them.
pub(crate) fn keep_only(network: &mut PodNetwork, interfaces: &[String]) {
    network.interfaces.retain(|one| interfaces.contains(&one.name));
    network.interfaces.sort_by_key(|one| interfaces.iter().position(|name| *name == one.name));
    network.routes.retain(|route| interfaces.contains(&route.interface));
}

pub(crate) fn configuration(config: &PodConfig, attached: &Attachment, resolv_conf: &str) -> proto::ConfigureRequest {
    let interfaces = attached.network.interfaces.iter().map(|interface| common::Interface {
        name: interface.name.clone(),
        mac: interface.mac.to_vec(),
        mtu: interface.mtu,
        addresses: interface.addresses.iter().map(ToString::to_string).collect(),
        neighbours: interface.neighbours.iter().map(neighbour).collect(),
    });
    let routes = attached.network.routes.iter().map(|route| common::Route {
        destination: route.destination.to_string(),
        gateway: route.gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
        interface: route.interface.clone(),
        metric: route.metric,
        source: route.source.map(|source| source.to_string()).unwrap_or_default(),
        mtu: route.mtu.unwrap_or(0),
    });
    let dns = match &config.dns {
        Some(dns) => dns.clone(),
        None if attached.dns != DnsConfig::default() => attached.dns.clone(),
        // A pod with the node's network reaches what the node reaches.
        None => node_dns(resolv_conf, config.kind.node_namespaces().network),
    };
    proto::ConfigureRequest {
        interfaces: interfaces.collect(),
        routes: routes.collect(),
        dns: Some(common::Dns { servers: dns.servers, searches: dns.searches, options: dns.options }),
    }
}

fn neighbour(neighbour: &Neighbour) -> common::Neighbour {
    common::Neighbour { address: neighbour.ip.to_string(), mac: neighbour.mac.to_vec() }
}

/// Returns the node's own resolver configuration, for pods that bring none. Loopback servers are unreachable from a guest and are
/// left out, unless the pod is on the node's network.
fn node_dns(text: &str, on_node: bool) -> DnsConfig {
    let mut dns = DnsConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("nameserver") => dns.servers.extend(
                words
                    .next()
                    .filter(|server| server.parse::<IpAddr>().is_ok_and(|address| on_node || !address.is_loopback())),
            ),
            Some("search") => dns.searches = words.collect(),
            Some("options") => dns.options.extend(words),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_resolver_without_what_a_guest_cannot_reach() {
        let dns = node_dns(
            "# x\nnameserver 127.0.0.53\nnameserver 10.0.0.1\nnameserver bad\nsearch a b\noptions ndots:5\n",
            false,
        );
        assert_eq!(dns.servers, ["10.0.0.1"]);
        assert_eq!(node_dns("nameserver 127.0.0.53", true).servers, ["127.0.0.53"]);
        assert_eq!(dns.searches, ["a", "b"]);
        assert_eq!(dns.options, ["ndots:5"]);
    }
}
