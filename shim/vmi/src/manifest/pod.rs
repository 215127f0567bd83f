//! Builds the pod of a VM: its container is the VM, with the image, the volumes and the resources that it needs.

use super::convert::Options;
use super::lift::Lifted;
use crate::annotations::PREFIX;
use crate::spec::{InstanceSpec, Probe, Volume};
use crate::version::written;
use serde_json::{Map, Value, json};

/// The container's name.
const CONTAINER: &str = "machine";
/// The directory of block volumes in the container.
const DEVICES: &str = "/dev/nacelle";
/// The parent of the mount points of other volumes in the container.
const DIRECTORIES: &str = "/run/nacelle/vm";

/// The command of a guest agent ping, for the container's exec.
const GUEST_PING: [&str; 2] = ["@vm", "guest-ping"];
/// The command of the check whether the VM runs.
const RUNNING: [&str; 2] = ["@vm", "running"];
/// The volume with the pod's annotations, and its mount point in the container.
const ANNOTATIONS: [&str; 2] = ["pod-annotations", "/run/nacelle/pod"];
/// The annotation with the networks that Multus adds to the pod's own.
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// The annotation with the network that replaces the pod's own.
const DEFAULT_NETWORK: &str = "v1.multus-cni.io/default-network";
/// The volume with the kernel, if it is not in the container's image.
const KERNEL_BOOT: &str = "kernel-boot";

/// The volumes and mounts so far.
#[derive(Default)]
struct Parts {
    image: Option<String>,
    volumes: Vec<Value>,
    devices: Vec<Value>,
    mounts: Vec<Value>,
    notes: Vec<String>,
}

/// Returns the template of the pod, and notes for the user. `said` is the specification with its instance type.
pub(super) fn template(
    spec: &InstanceSpec,
    said: &InstanceSpec,
    metadata: &Value,
    lifted: Lifted,
    options: &Options,
) -> (Value, Vec<String>) {
    let mut spec = spec.clone();
    let mut parts = Parts { notes: lifted.notes, ..Parts::default() };
    for volume in &spec.volumes {
        let shared = spec.domain.devices.filesystems.iter().any(|one| one.name == volume.name);
        parts.add(volume, shared);
    }
    for name in secrets(&spec) {
        parts.directory(&format!("secret-{name}"), json!({ "secret": { "secretName": name } }));
    }
    if let Some(kernel) = kernel_image(&spec).filter(|kernel| parts.image.as_ref().is_some_and(|image| image != kernel))
    {
        parts.directory(KERNEL_BOOT, json!({ "image": { "reference": kernel } }));
    }
    let image = parts.image.or_else(|| kernel_image(&spec)).unwrap_or_else(|| options.image.clone());
    let mut container = json!({ "name": CONTAINER, "image": image });
    if let Some(policy) = lifted.pull_policy {
        container["imagePullPolicy"] = json!(policy);
    }
    // kubelet runs these probes: against the guest's ports at the pod's address, and against the guest agent by the container's
    // exec.
    for (key, probe) in [("livenessProbe", &mut spec.liveness_probe), ("readinessProbe", &mut spec.readiness_probe)] {
        if let Some(probe) = probe.take() {
            container[key] = asked(&probe);
        }
    }
    // As in KubeVirt: a VM that is paused or stopped is not ready.
    if container["readinessProbe"].is_null() {
        container["readinessProbe"] = json!({ "exec": { "command": RUNNING }, "periodSeconds": 5 });
    }
    let resources = sizes(said);
    if !resources.is_empty() {
        container["resources"] = Value::Object(resources);
    }
    for (key, list) in [("ports", lifted.ports), ("volumeDevices", parts.devices), ("volumeMounts", parts.mounts)] {
        if !list.is_empty() {
            container[key] = Value::Array(list);
        }
    }
    let mut fields = lifted.fields;
    fields.insert("runtimeClassName".to_owned(), json!(options.runtime_class));
    if let Some(seconds) = spec.termination_grace_period_seconds {
        fields.insert("terminationGracePeriodSeconds".to_owned(), json!(seconds));
    }
    if !lifted.pull_secrets.is_empty() {
        let secrets: Vec<Value> = lifted.pull_secrets.iter().map(|name| json!({ "name": name })).collect();
        fields.insert("imagePullSecrets".to_owned(), Value::Array(secrets));
    }
    if !parts.volumes.is_empty() {
        fields.insert("volumes".to_owned(), Value::Array(parts.volumes));
    }
    fields.insert("containers".to_owned(), json!([container]));
    let mut metadata = metadata.as_object().cloned().unwrap_or_default();
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    annotations[format!("{PREFIX}kind")] = json!("machine");
    for (key, value) in multus(&spec) {
        if annotations.get(key).is_some_and(|said| *said != value) {
            parts.notes.push(format!("annotation {key}: becomes {value}, as the specification's networks are"));
        }
        annotations[key] = value;
    }
    annotations[format!("{PREFIX}spec")] = json!(super::text(&[written(&spec)]));
    metadata.entry("labels").or_insert_with(|| json!({}));
    (json!({ "metadata": metadata, "spec": fields }), parts.notes)
}

/// Makes the VM follow the annotations of its pod (`vm.nacelle.dev/power`), which kubelet writes into a volume.
pub(super) fn follow_annotations(template: &mut Value) {
    let [name, path] = ANNOTATIONS;
    let mut name = name.to_owned();
    let volumes = template["spec"]["volumes"].as_array().cloned().unwrap_or_default();
    while volumes.iter().any(|volume| volume["name"] == name.as_str()) {
        name.push_str("-x");
    }
    let item = json!({ "path": "annotations", "fieldRef": { "fieldPath": "metadata.annotations" } });
    let spec = &mut template["spec"];
    push(&mut spec["volumes"], json!({ "name": name, "downwardAPI": { "items": [item] } }));
    push(&mut spec["containers"][0]["volumeMounts"], json!({ "name": name, "mountPath": path, "readOnly": true }));
}

/// Appends an entry to a list that may be missing.
fn push(list: &mut Value, entry: Value) {
    match list {
        Value::Array(entries) => entries.push(entry),
        missing => *missing = json!([entry]),
    }
}

impl Parts {
    /// Adds a volume; `shared` means that the guest mounts it.
    fn add(&mut self, volume: &Volume, shared: bool) {
        let name = &volume.name;
        if let Some(disk) = &volume.container_disk {
            match &self.image {
                None => self.image = Some(disk.image.clone()),
                Some(_) => self.directory(name, json!({ "image": { "reference": disk.image } })),
            }
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            let mut source = json!({ "claimName": claim.claim_name });
            if claim.read_only == Some(true) {
                source["readOnly"] = json!(true);
            }
            self.volumes.push(json!({ "name": name, "persistentVolumeClaim": source }));
            if shared {
                let mut mount = json!({ "name": name, "mountPath": format!("{DIRECTORIES}/{name}") });
                if claim.read_only == Some(true) {
                    mount["readOnly"] = json!(true);
                }
                self.mounts.push(mount);
                return;
            }
            self.devices.push(json!({ "name": name, "devicePath": format!("{DEVICES}/{name}") }));
            let claim = &claim.claim_name;
            self.notes
                .push(format!("claim {claim}: must have volumeMode Block, else it is a volumeMounts of the container"));
        }
        if let Some(disk) = &volume.host_disk {
            let made = disk.capacity.is_some();
            let source = json!({ "path": disk.path, "type": if made { "FileOrCreate" } else { "File" } });
            self.volumes.push(json!({ "name": name, "hostPath": source }));
            self.mounts.push(json!({ "name": name, "mountPath": format!("{DIRECTORIES}/{name}") }));
        }
        if let Some(map) = &volume.config_map {
            let mut source = json!({ "name": map.name });
            if let Some(optional) = map.optional {
                source["optional"] = json!(optional);
            }
            self.directory(name, json!({ "configMap": source }));
        }
        if let Some(secret) = &volume.secret {
            let mut source = json!({ "secretName": secret.secret_name });
            if let Some(optional) = secret.optional {
                source["optional"] = json!(optional);
            }
            self.directory(name, json!({ "secret": source }));
        }
        if let Some(downward) = &volume.downward_api {
            self.directory(name, json!({ "downwardAPI": { "items": written(&downward.fields) } }));
        }
    }

    /// Adds a volume that the VM sees as a directory, or that Nacelle converts to a disk.
    fn directory(&mut self, name: &str, mut volume: Value) {
        volume["name"] = json!(name);
        self.volumes.push(volume);
        self.mounts.push(json!({ "name": name, "mountPath": format!("{DIRECTORIES}/{name}"), "readOnly": true }));
    }
}

/// Returns the pod's annotations for Multus, for the networks of the specification in the order of its interfaces.
fn multus(spec: &InstanceSpec) -> Vec<(&'static str, Value)> {
    let (mut asked, mut said) = (Vec::new(), Vec::new());
    for interface in &spec.domain.devices.interfaces {
        let network = spec.networks.iter().find(|network| network.name == interface.name);
        let Some(multus) = network.and_then(|network| network.multus.as_ref()) else { continue };
        if multus.default == Some(true) {
            said.push((DEFAULT_NETWORK, json!(multus.network_name)));
            continue;
        }
        let (namespace, name) = multus.network_name.split_once('/').unwrap_or(("", &multus.network_name));
        let mut one = json!({ "name": name, "interface": format!("net{}", asked.len() + 1) });
        for (key, value) in [("namespace", namespace), ("mac", &interface.mac_address)] {
            if !value.is_empty() {
                one[key] = json!(value);
            }
        }
        asked.push(one);
    }
    if !asked.is_empty() {
        said.push((NETWORKS, json!(Value::Array(asked).to_string())));
    }
    said
}

/// Returns the image with the kernel of a direct boot.
fn kernel_image(spec: &InstanceSpec) -> Option<String> {
    Some(spec.domain.firmware.as_ref()?.kernel_boot.as_ref()?.container.as_ref()?.image.clone())
}

/// Returns the secrets that are referenced outside of the volumes, each once.
fn secrets(spec: &InstanceSpec) -> Vec<String> {
    let clouds = spec.volumes.iter().filter_map(Volume::cloud_init);
    let data = clouds.flat_map(|(_, data)| [&data.secret_ref, &data.network_data_secret_ref]);
    let data = data.flatten().map(|reference| reference.name.clone());
    let credentials = spec.access_credentials.iter().flat_map(|credential| {
        let key = credential.ssh_public_key.as_ref().and_then(|key| key.source.as_ref());
        let password = credential.user_password.as_ref().and_then(|password| password.source.as_ref());
        [key, password].into_iter().flatten().filter_map(|source| Some(source.secret.as_ref()?.secret_name.clone()))
    });
    let mut names: Vec<String> = data.chain(credentials).collect();
    names.sort();
    names.dedup();
    names
}

/// Converts a probe to that of a container.
fn asked(probe: &Probe) -> Value {
    let mut value = written(probe);
    if let Some(fields) = value.as_object_mut()
        && fields.remove("guestAgentPing").is_some()
    {
        fields.insert("exec".to_owned(), json!({ "command": GUEST_PING }));
    }
    if let Some(http) = value.get_mut("httpGet").and_then(Value::as_object_mut) {
        http.entry("path").or_insert_with(|| json!("/"));
    }
    value
}

/// Returns the resources of the container: those of the VM, with the memory as the limit and the least request.
fn sizes(spec: &InstanceSpec) -> Map<String, Value> {
    let mut sizes = Map::new();
    if let Some(resources) = &spec.domain.resources {
        for (key, list) in [("requests", &resources.requests), ("limits", &resources.limits)] {
            if !list.is_empty() {
                sizes.insert(key.to_owned(), written(list));
            }
        }
    }
    // kubelet assigns dedicated CPUs only to pods whose CPU request is an integer and equals the limit.
    if let Some(cpu) = spec.domain.cpu.as_ref().filter(|cpu| cpu.dedicated_cpu_placement == Some(true)) {
        let count = [cpu.sockets, cpu.cores, cpu.threads].iter().map(|part| part.unwrap_or(1)).product::<u32>();
        let limits = sizes.entry("limits").or_insert_with(|| json!({}));
        if limits.get("cpu").is_none() {
            limits["cpu"] = json!(count.to_string());
        }
    }
    let guest = spec.domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
    if let Some(guest) = guest {
        let asked = spec.domain.resources.as_ref().and_then(|resources| resources.requests.get("memory"));
        let most = asked.filter(|asked| asked.milli() > guest.milli()).unwrap_or(guest);
        let limits = sizes.entry("limits").or_insert_with(|| json!({}));
        if limits.get("memory").is_none() {
            limits["memory"] = json!(most);
        }
    }
    sizes
}
