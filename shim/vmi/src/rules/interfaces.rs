//! Checks the rules of network interfaces and of their networks.

use crate::cause::{Causes, Rule};
use crate::names::{NameRules, SUBDOMAIN_RULE, check_names, is_dns_label, is_dns_subdomain};
use crate::spec::{InstanceSpec, Interface};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

const AT: &str = "spec.domain.devices.interfaces";
const NETWORKS: &str = "spec.networks";
/// The maximum number of interfaces of any board.
const MAX_INTERFACES: usize = 16;
const NAMES: NameRules = NameRules {
    required: Rule("interface-name-missing"),
    well_formed: Rule("interface-name"),
    unique: Rule("interface-name-twice"),
};
const NETWORK_NAMES: NameRules = NameRules {
    required: Rule("network-name-missing"),
    well_formed: Rule("network-name"),
    unique: Rule("network-name-twice"),
};

/// Checks all interfaces and networks.
pub fn check(spec: &InstanceSpec, causes: &mut Causes) {
    let interfaces = &spec.domain.devices.interfaces;
    if interfaces.len() > MAX_INTERFACES {
        let message = format!("must have at most {MAX_INTERFACES} interfaces, and has {}", interfaces.len());
        causes.too_long(Rule("interfaces-most"), AT, message);
    }
    check_names(interfaces.iter().map(|one| one.name.as_str()), AT, &NAMES, causes);
    let mut macs: BTreeMap<String, usize> = BTreeMap::new();
    let mut ports: BTreeSet<&str> = BTreeSet::new();
    for (index, interface) in interfaces.iter().enumerate() {
        let at = format!("{AT}[{index}]");
        connected(spec, interface, &at, causes);
        if let Some(mac) = address(interface, &at, causes)
            && let Some(first) = macs.insert(mac, index)
        {
            let message = format!("{AT}[{first}] has this address");
            causes.duplicate(Rule("mac-twice"), format!("{at}.macAddress"), &interface.mac_address, message);
        }
        for (index, port) in interface.ports.iter().enumerate() {
            let at = format!("{at}.ports[{index}]");
            if !port.name.is_empty() {
                if !is_dns_label(&port.name) || port.name.len() > 15 {
                    let message = "must be at most 15 lower case letters, digits and '-'";
                    causes.invalid(Rule("port-name"), format!("{at}.name"), &port.name, message);
                } else if !ports.insert(&port.name) {
                    causes.duplicate(Rule("port-name-twice"), format!("{at}.name"), &port.name, "must occur only once");
                }
            }
            match port.port {
                None => causes.required(Rule("port-missing"), format!("{at}.port"), "must be a port"),
                Some(1..=65535) => {}
                Some(other) => {
                    causes.invalid(Rule("port-range"), format!("{at}.port"), other, "must be between 1 and 65535");
                }
            }
        }
        for (index, server) in interface.dhcp_options.iter().flat_map(|options| &options.ntp_servers).enumerate() {
            if server.parse::<IpAddr>().is_err() {
                let at = format!("{at}.dhcpOptions.ntpServers[{index}]");
                causes.invalid(Rule("ntp-server"), at, server, "must be an IP address");
            }
        }
    }
    networks(spec, causes);
}

fn connected(spec: &InstanceSpec, interface: &Interface, at: &str, causes: &mut Causes) {
    if interface.bridge.is_some() && interface.masquerade.is_some() {
        causes.forbidden(Rule("interface-binding"), at, "must be one of bridge and masquerade");
    }
    if !is_dns_label(&interface.name) {
        return;
    }
    match spec.networks.iter().find(|network| network.name == interface.name) {
        None => {
            let message = "spec.networks has no network of this name";
            causes.invalid(Rule("interface-network"), format!("{at}.name"), &interface.name, message);
        }
        Some(network) if interface.masquerade.is_some() && network.multus.is_some() => {
            let message = "only an interface on the pod's own network can be behind the pod's address";
            causes.forbidden(Rule("masquerade-multus"), format!("{at}.masquerade"), message);
        }
        Some(_) => {}
    }
}

/// Returns the hardware address in a canonical form, if it is valid.
fn address(interface: &Interface, at: &str, causes: &mut Causes) -> Option<String> {
    let text = &interface.mac_address;
    if text.is_empty() {
        return None;
    }
    let at = format!("{at}.macAddress");
    let parts: Vec<&str> = text.split(if text.contains('-') { '-' } else { ':' }).collect();
    let byte = |part: &&str| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2 && !part.starts_with('+'));
    let bytes: Option<Vec<u8>> = parts.iter().map(byte).collect();
    match bytes.as_deref() {
        Some([first, _, _, _, _, _]) if first & 1 == 1 => {
            causes.invalid(Rule("mac-group"), at, text, "is the address of a group: the first byte must be even");
            None
        }
        Some([0, 0, 0, 0, 0, 0]) => {
            causes.invalid(Rule("mac-zero"), at, text, "must not be all zeros");
            None
        }
        Some([_, _, _, _, _, _]) => Some(parts.join(":").to_ascii_lowercase()),
        _ => {
            causes.invalid(Rule("mac"), at, text, "must be six bytes, as 02:00:00:12:34:56");
            None
        }
    }
}

fn networks(spec: &InstanceSpec, causes: &mut Causes) {
    check_names(spec.networks.iter().map(|network| network.name.as_str()), NETWORKS, &NETWORK_NAMES, causes);
    let (mut pods, mut defaults) = (0, 0);
    for (index, network) in spec.networks.iter().enumerate() {
        let at = format!("{NETWORKS}[{index}]");
        match (&network.pod, &network.multus) {
            (Some(_), Some(_)) => causes.forbidden(Rule("network-both"), &at, "must be one of pod and multus"),
            (Some(_), None) => {
                pods += 1;
                if pods == 2 {
                    causes.forbidden(Rule("network-pods"), format!("{at}.pod"), "a pod has one network of its own");
                }
            }
            (None, Some(multus)) => {
                let name = &multus.network_name;
                if name.is_empty() {
                    causes.required(
                        Rule("multus-missing"),
                        format!("{at}.multus.networkName"),
                        "must name the network",
                    );
                } else if name.split('/').count() > 2 || !name.split('/').all(is_dns_subdomain) {
                    let message = format!("must be NAME or NAMESPACE/NAME; a name {SUBDOMAIN_RULE}");
                    causes.invalid(Rule("multus-name"), format!("{at}.multus.networkName"), name, message);
                }
                if multus.default == Some(true) {
                    defaults += 1;
                    if defaults == 2 {
                        let at = format!("{at}.multus.default");
                        causes.forbidden(
                            Rule("multus-defaults"),
                            at,
                            "one network takes the place of the cluster's own",
                        );
                    }
                }
            }
            (None, None) => {}
        }
        let used = spec.domain.devices.interfaces.iter().any(|one| one.name == network.name);
        if !used && is_dns_label(&network.name) {
            let message = format!("no interface of {AT} has this name");
            causes.invalid(Rule("network-unused"), format!("{at}.name"), &network.name, message);
        }
    }
    if pods > 0 && defaults > 0 {
        let message = "a network by Multus with default takes the place of the pod's own: say one of them";
        causes.forbidden(Rule("network-pod-and-default"), NETWORKS, message);
    }
}
