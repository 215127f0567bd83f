//! Translates the parts of KubeVirt's VMs that Nacelle expresses differently: fields that belong to the pod move to the pod, and
//! equivalent fields are rewritten, with a note.

use crate::quantity::Quantity;
use crate::spec::{Empty, InstanceSpec};
use crate::version::written;
use serde_json::{Map, Value, json};

const MIB: u64 = 1 << 20;
/// The fields that belong to the pod: they move from the VM to the pod.
const LIFTED: &[&str] = &[
    "affinity",
    "nodeSelector",
    "tolerations",
    "topologySpreadConstraints",
    "schedulerName",
    "priorityClassName",
    "hostname",
    "subdomain",
    "dnsPolicy",
    "dnsConfig",
];
/// The paths of the memory size, in the order of their precedence.
const MEMORY: [&str; 3] =
    ["/domain/memory/guest", "/domain/resources/requests/memory", "/domain/resources/limits/memory"];

/// The parts of a VM's specification that move to the pod.
#[derive(Default)]
pub(super) struct Lifted {
    /// The fields of the pod.
    pub fields: Map<String, Value>,
    /// The names of image pull secrets.
    pub pull_secrets: Vec<String>,
    /// The image pull policy.
    pub pull_policy: Option<String>,
    /// The ports of the container.
    pub ports: Vec<Value>,
    /// Notes about what the user must know or do.
    pub notes: Vec<String>,
}

/// Removes the fields of the pod and rewrites the others. A field with another shape than KubeVirt's stays, and is rejected
/// later.
pub(super) fn lift(run: &mut Value) -> Lifted {
    let mut lifted = Lifted::default();
    let Some(fields) = run.as_object_mut() else { return lifted };
    for key in LIFTED {
        if let Some(value) = fields.remove(*key).filter(|value| !value.is_null()) {
            lifted.fields.insert((*key).to_owned(), value);
        }
    }
    for volume in fields.get_mut("volumes").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(disk) = volume.get_mut("containerDisk").and_then(Value::as_object_mut) {
            pulled(disk, &mut lifted);
        }
        let Some(volume) = volume.as_object_mut() else { continue };
        let name =
            volume.get("dataVolume").and_then(|data| data.get("name")).and_then(Value::as_str).map(str::to_owned);
        if let Some(name) = name {
            volume.remove("dataVolume");
            volume.insert("persistentVolumeClaim".to_owned(), json!({ "claimName": name }));
            lifted
                .notes
                .push(format!("DataVolume {name}: nothing fills the claim {name} here; it must be full before"));
        }
    }
    let kernel = run.pointer_mut("/domain/firmware/kernelBoot/container").and_then(Value::as_object_mut);
    if let Some(kernel) = kernel {
        pulled(kernel, &mut lifted);
    }
    board(run, &mut lifted.notes);
    memory(run, &mut lifted.notes);
    lifted
}

fn pulled(image: &mut Map<String, Value>, lifted: &mut Lifted) {
    if let Some(Value::String(secret)) = image.remove("imagePullSecret")
        && !lifted.pull_secrets.contains(&secret)
    {
        lifted.pull_secrets.push(secret);
    }
    if let Some(Value::String(policy)) = image.remove("imagePullPolicy") {
        lifted.pull_policy.get_or_insert(policy);
    }
}

/// Replaces a versioned board of QEMU by ours. An empty value means no board.
fn board(run: &mut Value, notes: &mut Vec<String>) {
    let Some(domain) = run.get_mut("domain").and_then(Value::as_object_mut) else { return };
    let said = domain.get("machine").and_then(|machine| machine.get("type")).and_then(Value::as_str);
    let (said, ours) = match said {
        Some("") => return drop(domain.remove("machine")),
        Some(said) if said.starts_with("pc-q35-") => (said.to_owned(), "q35"),
        Some(said) if said.starts_with("pc-i440fx-") => (said.to_owned(), "pc"),
        _ => return,
    };
    domain.insert("machine".to_owned(), json!({ "type": ours }));
    notes.push(format!("board {said} becomes {ours}, of the QEMU that there is"));
}

/// Rounds the memory down to whole mebibytes.
fn memory(run: &mut Value, notes: &mut Vec<String>) {
    let Some(said) = MEMORY.iter().find_map(|at| run.pointer(at).filter(|said| !said.is_null())) else { return };
    let text = said.as_str().map_or_else(|| said.to_string(), str::to_owned);
    let Some(bytes) = Quantity::parse(&text).ok().and_then(|said| said.bytes()) else { return };
    if bytes.is_multiple_of(MIB) || bytes < MIB {
        return;
    }
    let Some(domain) = run.get_mut("domain").and_then(Value::as_object_mut) else { return };
    if domain.get("memory").is_none_or(Value::is_null) {
        domain.insert("memory".to_owned(), json!({}));
    }
    let Some(memory) = domain.get_mut("memory").and_then(Value::as_object_mut) else { return };
    let whole = format!("{}Mi", bytes / MIB);
    notes.push(format!("memory {text} becomes {whole}: machines have whole mebibytes"));
    memory.insert("guest".to_owned(), json!(whole));
}

/// Changes an interface behind the pod's address to the pod's own interface. Its ports become ports of the container, for clients
/// that look them up. The specification must be valid.
pub(super) fn connect(spec: &mut InstanceSpec, lifted: &mut Lifted) {
    let InstanceSpec { networks, domain, .. } = spec;
    for interface in &mut domain.devices.interfaces {
        let name = &interface.name;
        if networks.iter().any(|network| network.name == *name && network.multus.is_some()) {
            continue;
        }
        let listed = !interface.ports.is_empty();
        for port in std::mem::take(&mut interface.ports) {
            let mut port = written(&port);
            if let Some(fields) = port.as_object_mut()
                && let Some(number) = fields.remove("port")
            {
                fields.insert("containerPort".to_owned(), number);
            }
            lifted.ports.push(port);
        }
        if interface.masquerade.take().is_some() {
            interface.bridge = Some(Empty {});
            let ports = if listed { ", and all ports lead to it" } else { "" };
            lifted.notes.push(format!(
                "interface {name}: masquerade becomes bridge: the guest has the pod's own address{ports}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lifted(mut run: Value) -> (Value, Vec<String>) {
        let lifted = lift(&mut run);
        (run, lifted.notes)
    }

    #[test]
    fn memory_has_whole_mebibytes_and_never_more_than_is_said() {
        for (said, guest) in [
            (json!({ "memory": { "guest": "1024M" } }), "976Mi"),
            (json!({ "memory": null, "resources": { "requests": { "memory": "1G" } } }), "953Mi"),
            (json!({ "resources": { "limits": { "memory": 3_000_000 } } }), "2Mi"),
        ] {
            let (run, notes) = lifted(json!({ "domain": said }));
            assert_eq!(run["domain"]["memory"]["guest"], guest);
            assert_eq!(notes.len(), 1);
        }
        for said in [
            json!({ "memory": { "guest": "1Gi" }, "resources": { "requests": { "memory": "1G" } } }),
            json!({ "memory": { "guest": "much" } }),
            json!({ "memory": [], "resources": { "requests": { "memory": "1G" } } }),
            json!({ "memory": { "guest": "1k" } }),
            json!([]),
        ] {
            let run = json!({ "domain": said });
            assert_eq!(lifted(run.clone()), (run, vec![]));
        }
    }

    #[test]
    fn boards_are_ours() {
        let of =
            |kind: &str| lifted(json!({ "domain": { "machine": { "type": kind } } })).0["domain"]["machine"].take();
        assert_eq!(of("pc-q35-rhel9.4.0")["type"], "q35");
        assert_eq!(of("pc-i440fx-2.10")["type"], "pc");
        assert_eq!(of("virt")["type"], "virt");
        assert_eq!(of(""), Value::Null);
    }
}
