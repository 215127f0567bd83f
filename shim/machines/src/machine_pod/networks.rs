//! Converts the network interfaces of a machine, and selects the pod's interface to which each one is connected. Pure.

use super::build::{Refused, value};
use crate::multus::{self, Asked, NETWORKS};
use nacelle_model::StringMap;
use nacelle_model::machine::{Card, CardModel, INTERFACE};
use nacelle_vmi::spec::{InstanceSpec, Multus, NicModel};

/// The largest number of queues of an interface.
const MOST_QUEUES: u32 = 8;

/// Returns the interfaces for a pod in this namespace with these annotations, and a machine with this many vCPUs.
pub(super) fn cards(
    spec: &InstanceSpec,
    annotations: &StringMap,
    namespace: &str,
    processors: u32,
) -> Result<Vec<Card>, Refused> {
    let devices = &spec.domain.devices;
    let asked = multus::asked(annotations, namespace)
        .map_err(|rule| Refused::Wrong { field: format!("annotation {NETWORKS}"), rule })?;
    let mut finder = Finder { asked, namespace, taken: 0 };
    let mut cards: Vec<Card> = Vec::with_capacity(devices.interfaces.len());
    for (n, interface) in devices.interfaces.iter().enumerate() {
        let place = |field: &str| format!("spec.domain.devices.interfaces[{n}].{field}");
        let model = match interface.model {
            Some(NicModel::Virtio) | None => CardModel::Virtio,
            Some(NicModel::E1000) => CardModel::E1000,
            Some(NicModel::E1000e) => CardModel::E1000e,
            Some(NicModel::Rtl8139) => CardModel::Rtl8139,
            Some(other) => {
                let instead = "virtio, e1000, e1000e and rtl8139 are possible";
                return value(place("model"), format!("{other:?}"), instead);
            }
        };
        let mac = match interface.mac_address.as_str() {
            "" => None,
            text => Some(mac(text).ok_or_else(|| Refused::Wrong {
                field: place("macAddress"),
                rule: "six numbers of two hexadecimal digits are expected",
            })?),
        };
        let network = spec.networks.iter().enumerate().find(|(_, network)| network.name == interface.name);
        let of_pod = network.and_then(|(n, network)| Some((n, network.multus.as_ref()?)));
        let of_pod = of_pod.filter(|(_, multus)| multus.default != Some(true));
        let joined = match of_pod {
            None => INTERFACE.to_owned(),
            Some((n, multus)) => finder.interface(multus).ok_or_else(|| Refused::Wrong {
                field: format!("spec.networks[{n}].multus.networkName"),
                rule: "the pod's annotation k8s.v1.cni.cncf.io/networks does not name this network, or not as often as the specification",
            })?,
        };
        let several = devices.network_interface_multiqueue == Some(true) && model == CardModel::Virtio;
        let queues = if several { processors.clamp(1, MOST_QUEUES) } else { 1 };
        cards.push(Card { interface: joined, model, mac, boot_order: interface.boot_order, queues });
    }
    Ok(cards)
}

/// Finds the interfaces of Multus networks, each of which can be used once.
struct Finder<'a> {
    /// The networks in the pod's annotation; `None` without one: then the networks of the specification are used.
    asked: Option<Vec<Asked>>,
    namespace: &'a str,
    taken: usize,
}

impl Finder<'_> {
    fn interface(&mut self, multus: &Multus) -> Option<String> {
        self.taken += 1;
        let Some(asked) = &mut self.asked else { return Some(format!("net{}", self.taken)) };
        let name = multus.network_name.as_str();
        let (namespace, name) = name.split_once('/').unwrap_or((self.namespace, name));
        let at = asked.iter().position(|one| one.namespace == namespace && one.name == name)?;
        Some(asked.remove(at).interface)
    }
}

fn mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split([':', '-']).map(|part| u8::from_str_radix(part, 16).ok()).collect();
    bytes?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn built(networks: Value, asked: Option<&str>, more: Value) -> Result<Vec<(String, u32)>, String> {
        let interfaces: Vec<Value> =
            networks.as_array().unwrap().iter().map(|one| json!({ "name": one["name"] })).collect();
        let mut devices = json!({ "interfaces": interfaces });
        for (key, value) in more.as_object().unwrap() {
            devices[key] = value.clone();
        }
        let spec = json!({ "domain": { "devices": devices }, "networks": networks });
        let spec: InstanceSpec = serde_json::from_value(spec).unwrap();
        let annotations = asked.map(|text| (NETWORKS.to_owned(), text.to_owned())).into_iter().collect();
        let cards = cards(&spec, &annotations, "home", 12).map_err(|refused| refused.to_string())?;
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
        assert_eq!(built(all.clone(), None, none()).unwrap(), [one("net1"), one("eth0"), one("net2"), one("net3")]);
        let said = "other/b, more, home/a@lan, a";
        let expected = [one("lan"), one("eth0"), one("net1"), one("net4")];
        assert_eq!(built(all.clone(), Some(said), none()).unwrap(), expected);
        for wrong in ["b, a, a", "other/b, a"] {
            assert!(built(all.clone(), Some(wrong), none()).unwrap_err().contains("].multus.networkName"), "{wrong}");
        }
        assert!(built(all, Some("["), none()).unwrap_err().contains(NETWORKS));
        let default = json!([{ "name": "d", "multus": { "networkName": "a", "default": true } }, of("x", "b")]);
        assert_eq!(built(default, None, none()).unwrap(), [one("eth0"), one("net1")]);
    }

    #[test]
    fn cards_of_virtio_have_a_queue_for_each_processor_where_that_is_said() {
        let more = json!({ "networkInterfaceMultiqueue": true, "interfaces": [{ "name": "p" }, { "name": "q", "model": "e1000" }] });
        let networks = json!([{ "name": "p", "pod": {} }, { "name": "q", "multus": { "networkName": "a" } }]);
        assert_eq!(built(networks, None, more).unwrap(), [("eth0".to_owned(), 8), one("net1")]);
    }
}
