//! Converts the network interfaces of a machine, and selects the pod's interface to which each one is connected. Pure.

use super::rejection::{SpecRejection, reject_value};
use crate::multus::{self, NETWORKS, NetworkRequest};
use nacelle_model::StringMap;
use nacelle_model::machine::{Card, CardModel, INTERFACE};
use nacelle_vmi::spec::{InstanceSpec, Multus, NicModel};

/// The largest number of queues of an interface.
const MAX_QUEUES: u32 = 8;

/// Returns the interfaces for a pod in this namespace with these annotations, and a machine with this many vCPUs.
pub(super) fn build_cards(
    spec: &InstanceSpec,
    annotations: &StringMap,
    namespace: &str,
    processors: u32,
) -> Result<Vec<Card>, SpecRejection> {
    let devices = &spec.domain.devices;
    let requested = multus::requested_networks(annotations, namespace)
        .map_err(|rule| SpecRejection::Invalid { field: format!("annotation {NETWORKS}"), rule })?;
    let mut finder = InterfaceFinder { requested, namespace, used: 0 };
    let mut cards: Vec<Card> = Vec::with_capacity(devices.interfaces.len());
    for (n, interface) in devices.interfaces.iter().enumerate() {
        let path = |field: &str| format!("spec.domain.devices.interfaces[{n}].{field}");
        let model = match interface.model {
            Some(NicModel::Virtio) | None => CardModel::Virtio,
            Some(NicModel::E1000) => CardModel::E1000,
            Some(NicModel::E1000e) => CardModel::E1000e,
            Some(NicModel::Rtl8139) => CardModel::Rtl8139,
            Some(other) => {
                let instead = "virtio, e1000, e1000e and rtl8139 are supported";
                return reject_value(path("model"), format!("{other:?}"), instead);
            }
        };
        let mac = match interface.mac_address.as_str() {
            "" => None,
            text => Some(parse_mac(text).ok_or_else(|| SpecRejection::Invalid {
                field: path("macAddress"),
                rule: "six pairs of hexadecimal digits are expected",
            })?),
        };
        let network = spec.networks.iter().enumerate().find(|(_, network)| network.name == interface.name);
        let multus = network.and_then(|(n, network)| Some((n, network.multus.as_ref()?)));
        let multus = multus.filter(|(_, multus)| multus.default != Some(true));
        let pod_interface = match multus {
            None => INTERFACE.to_owned(),
            Some((n, multus)) => finder.interface(multus).ok_or_else(|| SpecRejection::Invalid {
                field: format!("spec.networks[{n}].multus.networkName"),
                rule: "the pod's annotation k8s.v1.cni.cncf.io/networks does not name this network as often as the specification",
            })?,
        };
        let is_multiqueue = devices.network_interface_multiqueue == Some(true) && model == CardModel::Virtio;
        let queues = if is_multiqueue { processors.clamp(1, MAX_QUEUES) } else { 1 };
        cards.push(Card { interface: pod_interface, model, mac, boot_order: interface.boot_order, queues });
    }
    Ok(cards)
}

/// Finds the interfaces of Multus networks, each of which can be used once.
struct InterfaceFinder<'a> {
    /// The networks in the pod's annotation; `None` without one: then the networks of the specification are used.
    requested: Option<Vec<NetworkRequest>>,
    namespace: &'a str,
    used: usize,
}

impl InterfaceFinder<'_> {
    fn interface(&mut self, multus: &Multus) -> Option<String> {
        self.used += 1;
        let Some(requested) = &mut self.requested else { return Some(format!("net{}", self.used)) };
        let name = multus.network_name.as_str();
        let (namespace, name) = name.split_once('/').unwrap_or((self.namespace, name));
        let index = requested.iter().position(|one| one.namespace == namespace && one.name == name)?;
        Some(requested.remove(index).interface)
    }
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split([':', '-']).map(|part| u8::from_str_radix(part, 16).ok()).collect();
    bytes?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn convert(networks: Value, annotation: Option<&str>, more: Value) -> Result<Vec<(String, u32)>, String> {
        let interfaces: Vec<Value> =
            networks.as_array().unwrap().iter().map(|one| json!({ "name": one["name"] })).collect();
        let mut devices = json!({ "interfaces": interfaces });
        for (key, value) in more.as_object().unwrap() {
            devices[key] = value.clone();
        }
        let spec = json!({ "domain": { "devices": devices }, "networks": networks });
        let spec: InstanceSpec = serde_json::from_value(spec).unwrap();
        let annotations = annotation.map(|text| (NETWORKS.to_owned(), text.to_owned())).into_iter().collect();
        let cards = build_cards(&spec, &annotations, "home", 12).map_err(|error| error.to_string())?;
        Ok(cards.into_iter().map(|card| (card.interface, card.queues)).collect())
    }

    fn one(interface: &str) -> (String, u32) {
        (interface.to_owned(), 1)
    }

    #[test]
    fn each_network_has_its_interface() {
        let of = |name: &str, network: &str| json!({ "name": name, "multus": { "networkName": network } });
        let pod = json!({ "name": "p", "pod": {} });
        let all = json!([of("x", "a"), pod, of("y", "other/b"), of("z", "a")]);
        // In the order of the specification, or of the annotation.
        let none = || json!({});
        assert_eq!(convert(all.clone(), None, none()).unwrap(), [one("net1"), one("eth0"), one("net2"), one("net3")]);
        let annotation = "other/b, more, home/a@lan, a";
        let expected = [one("lan"), one("eth0"), one("net1"), one("net4")];
        assert_eq!(convert(all.clone(), Some(annotation), none()).unwrap(), expected);
        for wrong in ["b, a, a", "other/b, a"] {
            assert!(convert(all.clone(), Some(wrong), none()).unwrap_err().contains("].multus.networkName"), "{wrong}");
        }
        assert!(convert(all, Some("["), none()).unwrap_err().contains(NETWORKS));
        let default = json!([{ "name": "d", "multus": { "networkName": "a", "default": true } }, of("x", "b")]);
        assert_eq!(convert(default, None, none()).unwrap(), [one("eth0"), one("net1")]);
    }

    #[test]
    fn virtio_interfaces_have_a_queue_for_each_vcpu_if_multiqueue_is_requested() {
        let more = json!({ "networkInterfaceMultiqueue": true, "interfaces": [{ "name": "p" }, { "name": "q", "model": "e1000" }] });
        let networks = json!([{ "name": "p", "pod": {} }, { "name": "q", "multus": { "networkName": "a" } }]);
        assert_eq!(convert(networks, None, more).unwrap(), [("eth0".to_owned(), 8), one("net1")]);
    }
}
