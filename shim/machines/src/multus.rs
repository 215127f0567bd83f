//! Parses the annotation with which a pod requests further networks from Multus, and determines the names of their interfaces.
//! Pure; the annotation is untrusted. Source: the Kubernetes Network Custom Resource Definition De-facto Standard, version 1.3,
//! section 4.1.

use nacelle_model::StringMap;
use serde::Deserialize;

/// The annotation's name.
pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// The largest number of networks.
const MAX_NETWORKS: usize = 15;
/// The longest name of an interface in bytes.
const MAX_INTERFACE_NAME: usize = 15;

/// A requested network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkRequest {
    /// The namespace of its NetworkAttachmentDefinition.
    pub namespace: String,
    /// The name of its NetworkAttachmentDefinition.
    pub name: String,
    /// The name of its interface in the pod.
    pub interface: String,
}

/// An entry of the annotation's JSON list; other fields are ignored.
#[derive(Deserialize)]
struct NetworkElement {
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default, alias = "interfaceRequest")]
    interface: String,
}

/// Returns the networks that a pod in this namespace requests, in order; `None` without the annotation. An interface without a
/// name is `net` and its index, from 1.
pub fn requested_networks(
    annotations: &StringMap,
    namespace: &str,
) -> Result<Option<Vec<NetworkRequest>>, &'static str> {
    let Some(text) = annotations.get(NETWORKS).map(|text| text.trim()).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let elements = match text.starts_with('[') {
        true => {
            nacelle_base::json::read(text.as_bytes()).map_err(|_error| "a list of objects with a name is expected")?
        }
        false => text.split(',').map(|one| parse_short_form(one.trim())).collect::<Vec<NetworkElement>>(),
    };
    if elements.len() > MAX_NETWORKS {
        return Err("at most 15 networks are allowed");
    }
    let to_request = |(n, element): (usize, NetworkElement)| {
        let NetworkElement { name, namespace: requested_namespace, interface } = element;
        let interface = if interface.is_empty() { format!("net{}", n + 1) } else { interface };
        NetworkRequest {
            name,
            namespace: if requested_namespace.is_empty() { namespace.to_owned() } else { requested_namespace },
            interface,
        }
    };
    let requests: Vec<NetworkRequest> = elements.into_iter().enumerate().map(to_request).collect();
    for (n, one) in requests.iter().enumerate() {
        if !is_interface_name(&one.interface) || one.interface == "eth0" || one.interface == "lo" {
            return Err("an interface has 1 to 15 letters, digits, '.', '_' or '-', and is neither eth0 nor lo");
        }
        if requests.iter().take(n).any(|earlier| earlier.interface == one.interface) {
            return Err("two interfaces have the same name");
        }
    }
    Ok(Some(requests))
}

/// Parses `[NAMESPACE/]NAME[@INTERFACE]`.
fn parse_short_form(text: &str) -> NetworkElement {
    let (rest, interface) = text.split_once('@').unwrap_or((text, ""));
    let (namespace, name) = rest.split_once('/').unwrap_or(("", rest));
    NetworkElement { name: name.to_owned(), namespace: namespace.to_owned(), interface: interface.to_owned() }
}

fn is_interface_name(name: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_INTERFACE_NAME).contains(&name.len()) && name.bytes().all(letter) && !matches!(name, "." | "..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Result<Option<Vec<String>>, &'static str> {
        let annotations = [(NETWORKS.to_owned(), text.to_owned())].into();
        let line = |one: NetworkRequest| format!("{}/{}@{}", one.namespace, one.name, one.interface);
        requested_networks(&annotations, "home")
            .map(|found| found.map(|requests| requests.into_iter().map(line).collect()))
    }

    #[test]
    fn both_notations_of_networks_are_parsed() {
        assert_eq!(requested_networks(&StringMap::default(), "home"), Ok(None));
        assert_eq!(of(" "), Ok(None));
        let expected = vec!["home/a@net1".to_owned(), "other/b@lan".to_owned(), "home/a@net3".to_owned()];
        assert_eq!(of("a, other/b@lan,a"), Ok(Some(expected.clone())));
        let json = r#"[{"name": "a", "mac": "02:00:00:00:00:01"}, {"name": "b", "namespace": "other", "interface": "lan"}, {"name": "a"}]"#;
        assert_eq!(of(json), Ok(Some(expected)));
        let many = vec!["a"; 16].join(",");
        for wrong in ["[{}]", "[", "a@eth0", "a@../x", "a@lan,b@lan", "a@net2,b", "a@sixteen-letters-", &many] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn any_annotation_yields_valid_and_distinct_interface_names(text in "\\PC{0,80}|[\\[\\]{}a-z@/, \":]{0,80}") {
            if let Ok(Some(requests)) = requested_networks(&[(NETWORKS.to_owned(), text)].into(), "home") {
                let mut names: Vec<_> = requests.iter().map(|one| one.interface.clone()).collect();
                prop_assert!(names.len() <= MAX_NETWORKS && names.iter().all(|name| is_interface_name(name) && name != "eth0"));
                names.sort();
                names.dedup();
                prop_assert_eq!(names.len(), requests.len());
            }
        }
    }
}
