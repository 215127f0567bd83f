//! Converts the pod's network to the formats of cloud-init: its "Networking config Version 2" and OpenStack's network_data.json.
//! The functions are pure.

use nacelle_proto::agent::BootConfig;
use nacelle_proto::common::{Interface, Route};
use serde_json::{Map, Value, json};

/// Formats a hardware address.
pub fn format_mac(mac: &[u8]) -> String {
    mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

fn routes_of<'a>(network: &'a BootConfig, interface: &'a Interface) -> impl Iterator<Item = &'a Route> {
    network.routes.iter().filter(move |route| route.interface == interface.name)
}

/// Returns whether an address or a prefix is IPv6.
fn is_ipv6(address: &str) -> bool {
    address.contains(':')
}

/// Returns the configuration in version 2 (netplan's format).
pub fn network_config_v2(network: &BootConfig) -> Value {
    let dns = network.dns.clone().unwrap_or_default();
    let mut ethernets = Map::new();
    for interface in &network.interfaces {
        let route = |route: &Route| {
            let mut config = json!({ "to": route.destination });
            if route.gateway.is_empty() {
                config["scope"] = json!("link");
            } else {
                config["via"] = json!(route.gateway);
                config["on-link"] = json!(true);
            }
            if let Some(metric) = route.metric {
                config["metric"] = json!(metric);
            }
            if !route.source.is_empty() {
                config["from"] = json!(route.source);
            }
            if route.mtu > 0 {
                config["mtu"] = json!(route.mtu);
            }
            config
        };
        let mut ethernet = json!({
            "match": { "macaddress": format_mac(&interface.mac) },
            "set-name": interface.name,
            "addresses": interface.addresses,
            "routes": routes_of(network, interface).map(route).collect::<Vec<_>>(),
            "nameservers": { "addresses": dns.servers, "search": dns.searches },
        });
        if interface.mtu > 0 {
            ethernet["mtu"] = json!(interface.mtu);
        }
        ethernets.insert(interface.name.clone(), ethernet);
    }
    json!({ "version": 2, "ethernets": ethernets })
}

/// Returns the configuration in OpenStack's format.
pub fn openstack_network_data(network: &BootConfig) -> Value {
    let (mut links, mut networks) = (Vec::new(), Vec::new());
    for interface in &network.interfaces {
        links.push(json!({
            "id": interface.name,
            "name": interface.name,
            "type": "phy",
            "ethernet_mac_address": format_mac(&interface.mac),
            "mtu": interface.mtu,
        }));
        for (n, address) in interface.addresses.iter().enumerate() {
            let first = !interface.addresses.iter().take(n).any(|earlier| is_ipv6(earlier) == is_ipv6(address));
            let via_gateway = routes_of(network, interface)
                .filter(|route| first && is_ipv6(&route.destination) == is_ipv6(address) && !route.gateway.is_empty());
            networks.push(json!({
                "id": format!("{}-{n}", interface.name),
                "link": interface.name,
                "type": if is_ipv6(address) { "ipv6" } else { "ipv4" },
                "ip_address": address,
                "routes": via_gateway.map(|route| {
                    let (to, bits) = route.destination.split_once('/').unwrap_or((&route.destination, "32"));
                    json!({ "network": to, "netmask": bits, "gateway": route.gateway })
                }).collect::<Vec<_>>(),
            }));
        }
    }
    let dns = network.dns.clone().unwrap_or_default();
    let services: Vec<Value> = dns.servers.iter().map(|server| json!({ "type": "dns", "address": server })).collect();
    json!({ "links": links, "networks": networks, "services": services })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_proto::common::Dns;

    fn network() -> BootConfig {
        let route = |destination: &str, gateway: &str| Route {
            destination: destination.into(),
            gateway: gateway.into(),
            interface: "eth0".into(),
            ..Route::default()
        };
        BootConfig {
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: vec![2, 0, 0, 0, 0, 0xab],
                mtu: 1450,
                addresses: vec!["10.1.0.5/24".into(), "fd00::5/64".into()],
                ..Interface::default()
            }],
            routes: vec![route("0.0.0.0/0", "10.1.0.1"), route("10.9.0.0/16", ""), route("::/0", "fd00::1")],
            dns: Some(Dns { servers: vec!["10.96.0.10".into()], searches: vec!["svc".into()], options: vec![] }),
            ..Default::default()
        }
    }

    #[test]
    fn version_2_has_what_cni_gave() {
        let config = network_config_v2(&network());
        let ethernet = &config["ethernets"]["eth0"];
        assert_eq!(ethernet["match"]["macaddress"], "02:00:00:00:00:ab");
        assert_eq!(ethernet["addresses"], json!(["10.1.0.5/24", "fd00::5/64"]));
        assert_eq!(ethernet["routes"][0], json!({ "to": "0.0.0.0/0", "via": "10.1.0.1", "on-link": true }));
        assert_eq!(ethernet["routes"][1], json!({ "to": "10.9.0.0/16", "scope": "link" }));
        assert_eq!((&ethernet["mtu"], &ethernet["nameservers"]["addresses"][0]), (&json!(1450), &json!("10.96.0.10")));
    }

    #[test]
    fn openstack_has_a_network_for_each_address() {
        let config = openstack_network_data(&network());
        assert_eq!(config["networks"][0]["routes"][0]["gateway"], "10.1.0.1");
        assert_eq!(config["networks"][1]["type"], "ipv6");
        assert_eq!(
            config["networks"][1]["routes"][0],
            json!({ "network": "::", "netmask": "0", "gateway": "fd00::1" })
        );
        assert_eq!(config["services"][0]["address"], "10.96.0.10");
    }
}
