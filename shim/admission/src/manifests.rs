//! Generates the manifests that run the server in a cluster and register it: those of docs/examples/admission, with the values of
//! the cluster. Pure.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_vmi::{Causes, manifest, read};
use serde_json::{Value, json};

const SERVER: &str = include_str!("../../../docs/examples/admission/server.yaml");
const WEBHOOKS: &str = include_str!("../../../docs/examples/admission/webhooks.yaml");

/// The values that differ between clusters.
#[derive(Clone, Debug)]
pub struct ClusterValues {
    /// The namespace of the server.
    pub namespace: String,
    /// The image with the binary.
    pub image: String,
    /// The CA certificate of the server's certificate, as PEM.
    pub authority: Vec<u8>,
    /// The networks of the API servers, ADDRESS/PREFIX; empty if every address may call the webhooks.
    pub clients: Vec<String>,
}

/// Returns the manifests as YAML.
pub fn manifests(cluster: &ClusterValues) -> Result<String, Causes> {
    let mut documents = read::all(SERVER, "server.yaml")?;
    documents.extend(read::all(WEBHOOKS, "webhooks.yaml")?);
    for document in &mut documents {
        set_cluster_values(document, cluster);
    }
    Ok(manifest::text(&documents))
}

fn set_cluster_values(document: &mut Value, cluster: &ClusterValues) {
    let set = |value: Option<&mut Value>, to: Value| {
        if let Some(value) = value {
            *value = to;
        }
    };
    let pointer = if document["kind"] == "Namespace" { "/metadata/name" } else { "/metadata/namespace" };
    set(document.pointer_mut(pointer), json!(cluster.namespace));
    set(document.pointer_mut("/spec/template/spec/containers/0/image"), json!(cluster.image));
    if document["kind"] == "NetworkPolicy" && !cluster.clients.is_empty() {
        let networks = cluster.clients.iter().map(|network| json!({"ipBlock": {"cidr": network}}));
        document["spec"]["ingress"][0]["from"] = networks.collect();
    }
    for webhook in document.get_mut("webhooks").and_then(Value::as_array_mut).into_iter().flatten() {
        set(webhook.pointer_mut("/clientConfig/service/namespace"), json!(cluster.namespace));
        set(webhook.pointer_mut("/clientConfig/caBundle"), json!(STANDARD.encode(&cluster.authority)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifests_have_the_values_of_the_cluster() {
        let cluster = ClusterValues {
            namespace: "other".into(),
            image: "example.com/n:1".into(),
            authority: b"certificate".to_vec(),
            clients: vec!["192.0.2.0/28".into(), "2001:db8::/64".into()],
        };
        let text = manifests(&cluster).unwrap();
        assert!(!text.contains("nacelle-system") && !text.contains("registry.example"), "{text}");
        let documents = read::all(&text, "x").unwrap();
        let kinds: Vec<_> = documents.iter().map(|document| document["kind"].as_str().unwrap()).collect();
        assert_eq!(
            kinds,
            [
                "Namespace",
                "ServiceAccount",
                "Service",
                "PodDisruptionBudget",
                "NetworkPolicy",
                "Deployment",
                "MutatingWebhookConfiguration",
                "ValidatingWebhookConfiguration"
            ]
        );
        let webhooks: Vec<&Value> =
            documents.iter().flat_map(|document| document["webhooks"].as_array().into_iter().flatten()).collect();
        assert_eq!(webhooks.len(), 5);
        for webhook in webhooks {
            assert_eq!(webhook["clientConfig"]["caBundle"], STANDARD.encode("certificate"));
            assert_eq!(webhook["clientConfig"]["service"]["namespace"], "other");
            assert_eq!(webhook["sideEffects"], "None");
        }
        let policy = |text: &str| read::all(text, "x").unwrap()[4]["spec"].clone();
        let from = json!([{"ipBlock": {"cidr": "192.0.2.0/28"}}, {"ipBlock": {"cidr": "2001:db8::/64"}}]);
        assert_eq!((&policy(&text)["ingress"][0]["from"], &policy(&text)["egress"]), (&from, &Value::Null));
        let open = manifests(&ClusterValues { clients: Vec::new(), ..cluster }).unwrap();
        assert_eq!(policy(&open)["ingress"], json!([{"ports": [{"port": "https", "protocol": "TCP"}]}]));
        // JSON has no octal numbers: this is 0440.
        assert_eq!(documents[5]["spec"]["template"]["spec"]["volumes"][0]["secret"]["defaultMode"], 288);
    }
}
