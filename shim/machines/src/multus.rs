//! Parses the annotation with which a pod requests further networks from Multus, and determines the names of their interfaces.
//! Pure; the annotation is untrusted. Source: the Kubernetes Network Custom Resource Definition De-facto Standard, version 1.3,
//! section 4.1.

use nacelle_model::StringMap;
use serde::Deserialize;

/// The annotation's name.
pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// The largest number of networks.
const MOST: usize = 15;
/// The longest name of an interface in bytes.
const LONGEST: usize = 15;

/// A requested network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The namespace of its NetworkAttachmentDefinition.
    pub namespace: String,
    /// The name of its NetworkAttachmentDefinition.
    pub name: String,
    /// The name of its interface in the pod.
    pub interface: String,
}

/// An entry of the annotation's JSON list; other fields are ignored.
#[derive(Deserialize)]
struct Element {
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default, alias = "interfaceRequest")]
    interface: String,
}

/// Returns the networks that a pod in this namespace requests, in order; `None` without the annotation. An interface without a
/// name is `net` and its index, from 1.
pub fn asked(annotations: &StringMap, namespace: &str) -> Result<Option<Vec<Asked>>, &'static str> {
    let Some(text) = annotations.get(NETWORKS).map(|text| text.trim()).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let elements = match text.starts_with('[') {
        true => {
            nacelle_base::json::read(text.as_bytes()).map_err(|_wrong| "a list of objects with a name is expected")?
        }
        false => text.split(',').map(|one| short(one.trim())).collect::<Vec<Element>>(),
    };
    if elements.len() > MOST {
        return Err("at most 15 networks are possible");
    }
    let asked = |(n, element): (usize, Element)| {
        let Element { name, namespace: of, interface } = element;
        let interface = if interface.is_empty() { format!("net{}", n + 1) } else { interface };
        Asked { name, namespace: if of.is_empty() { namespace.to_owned() } else { of }, interface }
    };
    let asked: Vec<Asked> = elements.into_iter().enumerate().map(asked).collect();
    for (n, one) in asked.iter().enumerate() {
        if !plain(&one.interface) || one.interface == "eth0" || one.interface == "lo" {
            return Err("an interface has 1 to 15 letters, digits, '.', '_' or '-', and is neither eth0 nor lo");
        }
        if asked.iter().take(n).any(|earlier| earlier.interface == one.interface) {
            return Err("each interface has a name of its own");
        }
    }
    Ok(Some(asked))
}

/// Parses `[NAMESPACE/]NAME[@INTERFACE]`.
fn short(text: &str) -> Element {
    let (rest, interface) = text.split_once('@').unwrap_or((text, ""));
    let (namespace, name) = rest.split_once('/').unwrap_or(("", rest));
    Element { name: name.to_owned(), namespace: namespace.to_owned(), interface: interface.to_owned() }
}

fn plain(name: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=LONGEST).contains(&name.len()) && name.bytes().all(letter) && !matches!(name, "." | "..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Result<Option<Vec<String>>, &'static str> {
        let annotations = [(NETWORKS.to_owned(), text.to_owned())].into();
        let line = |one: Asked| format!("{}/{}@{}", one.namespace, one.name, one.interface);
        asked(&annotations, "home").map(|asked| asked.map(|asked| asked.into_iter().map(line).collect()))
    }

    #[test]
    fn networks_are_named_in_both_ways() {
        assert_eq!(asked(&StringMap::default(), "home"), Ok(None));
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
        fn whatever_is_written_gives_names_that_are_possible_and_distinct(text in "\\PC{0,80}|[\\[\\]{}a-z@/, \":]{0,80}") {
            if let Ok(Some(asked)) = asked(&[(NETWORKS.to_owned(), text)].into(), "home") {
                let mut names: Vec<_> = asked.iter().map(|one| one.interface.clone()).collect();
                prop_assert!(names.len() <= MOST && names.iter().all(|name| plain(name) && name != "eth0"));
                names.sort();
                names.dedup();
                prop_assert_eq!(names.len(), asked.len());
            }
        }
    }
}
