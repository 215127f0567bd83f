//! Owns: the way of KubeVirt's manifests into pods, ReplicaSets, Deployments and machine records: each machine is admitted,
//! and what cannot be converted is refused with its reason.

use super::{KUBEVIRT, bare, pod};
use crate::admit;
use crate::annotations::PREFIX;
use crate::cause::{Causes, Rule};
use crate::preset::Catalogue;
use crate::spec::{InstanceSpec, RunStrategy, VirtualMachine};
use crate::version::{self, Version, typed, written};
use serde_json::{Map, Value, json};

/// What is said of the pods beside the manifest.
#[derive(Clone, Debug)]
pub struct Options {
    /// Their RuntimeClass.
    pub runtime_class: String,
    /// The image of a machine whose disks are in no image.
    pub image: String,
}

impl Default for Options {
    fn default() -> Options {
        Options { runtime_class: "nacelle".to_owned(), image: "registry.k8s.io/pause:3.10".to_owned() }
    }
}

/// What a manifest became.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Converted {
    /// The documents.
    pub documents: Vec<Value>,
    /// What somebody must know or do.
    pub notes: Vec<String>,
}

/// Fields that a pod says itself: they go from the machine to the pod.
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

/// What was taken out of a machine's specification because the pod says it.
#[derive(Default)]
pub(super) struct Lifted {
    /// Fields of the pod.
    pub fields: Map<String, Value>,
    /// Names of secrets for pulling images.
    pub pull_secrets: Vec<String>,
    /// When the image is pulled.
    pub pull_policy: Option<String>,
    /// What somebody must know or do.
    pub notes: Vec<String>,
}

/// Converts one document.
pub fn convert(document: &Value, catalogue: &Catalogue, options: &Options) -> Result<Converted, Causes> {
    let mut causes = Causes::default();
    let mut document = bare(document);
    let group = document["apiVersion"].as_str().unwrap_or_default();
    if !group.starts_with(KUBEVIRT) {
        causes.unsupported(Rule("manifest-group"), "apiVersion", group, &["kubevirt.io/v1"]);
        return Err(causes);
    }
    let kind = document["kind"].as_str().unwrap_or_default().to_owned();
    if let Some(fields) = document.as_object_mut() {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    match kind.as_str() {
        "VirtualMachineInstance" => instance(document, catalogue, options),
        "VirtualMachineInstanceReplicaSet" => replica_set(document, catalogue, options),
        "VirtualMachine" => machine(document, catalogue, options),
        _ => {
            let known = ["VirtualMachine", "VirtualMachineInstance", "VirtualMachineInstanceReplicaSet"];
            causes.unsupported(Rule("manifest-kind"), "kind", kind, &known);
            Err(causes)
        }
    }
}

fn instance(mut document: Value, catalogue: &Catalogue, options: &Options) -> Result<Converted, Causes> {
    let metadata = document["metadata"].take();
    let mut run = document["spec"].take();
    let lifted = lift(&mut run);
    let (spec, causes) = typed::<InstanceSpec>(run, "spec");
    admit::instance(&spec, causes, catalogue)?;
    let (mut pod, notes) = pod::template(&spec, &metadata, lifted, options);
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    // An instance runs once.
    pod["spec"]["restartPolicy"] = json!("Never");
    Ok(Converted { documents: vec![pod], notes })
}

fn replica_set(mut document: Value, catalogue: &Catalogue, options: &Options) -> Result<Converted, Causes> {
    let mut causes = Causes::default();
    for key in document["spec"].as_object().into_iter().flatten().map(|(key, _)| key) {
        if !["replicas", "selector", "template", "paused"].contains(&key.as_str()) {
            causes.unknown(Rule("field-unknown"), format!("spec.{key}"), "");
        }
    }
    if document["spec"]["paused"] == true {
        causes.forbidden(Rule("manifest-paused"), "spec.paused", "a ReplicaSet cannot be paused: say replicas");
    }
    if document["spec"].get("selector").is_none() {
        causes.required(Rule("manifest-selector"), "spec.selector", "must say which pods it counts");
    }
    let mut run = document["spec"]["template"]["spec"].take();
    let lifted = lift(&mut run);
    let (spec, wrong) = typed::<InstanceSpec>(run, "spec");
    let wrong = admit::instance(&spec, wrong, catalogue).err().unwrap_or_default();
    causes.extend(admit::below_template(wrong));
    causes.done()?;
    let (template, notes) = pod::template(&spec, &document["spec"]["template"]["metadata"].take(), lifted, options);
    let set = json!({
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": document["metadata"].take(),
        "spec": {
            "replicas": document["spec"].get("replicas").cloned().unwrap_or(json!(1)),
            "selector": document["spec"]["selector"].take(),
            "template": template,
        },
    });
    Ok(Converted { documents: vec![set], notes })
}

fn machine(mut document: Value, catalogue: &Catalogue, options: &Options) -> Result<Converted, Causes> {
    let mut causes = Causes::default();
    running(&mut document["spec"], &mut causes);
    let lifted = lift(&mut document["spec"]["template"]["spec"]);
    for matcher in ["instancetype", "preference"] {
        let Some(fields) = document["spec"].get_mut(matcher).and_then(Value::as_object_mut) else { continue };
        // Which state of it the cluster had used.
        fields.remove("revisionName");
        if fields.contains_key("inferFromVolume") {
            let message = "volumes are not looked into: name it";
            causes.forbidden(Rule("manifest-infer"), format!("spec.{matcher}.inferFromVolume"), message);
            document["spec"][matcher].take();
        }
    }
    let (mut machine, wrong) = typed::<VirtualMachine>(document, "");
    causes.extend(wrong);
    machine.spec.run_strategy.get_or_insert(RunStrategy::Halted);
    admit::machine(&machine, causes, catalogue)?;
    let strategy = machine.spec.run_strategy.unwrap_or(RunStrategy::Halted);
    let name = machine.metadata.name.clone();
    let (mut template, mut notes) =
        pod::template(&machine.spec.template.spec, &written(&machine.spec.template.metadata), lifted, options);
    let annotations = &mut template["metadata"]["annotations"];
    annotations[format!("{PREFIX}name")] = json!(name);
    annotations[format!("{PREFIX}run-strategy")] = json!(strategy.word());
    for (key, matcher) in [("instancetype", &machine.spec.instancetype), ("preference", &machine.spec.preference)] {
        if let Some(matcher) = matcher {
            annotations[format!("{PREFIX}{key}")] = json!(matcher.name);
        }
    }
    // Labels of its own, so that it counts no pod of another.
    let label = json!({ format!("{PREFIX}machine"): name });
    template["metadata"]["labels"][format!("{PREFIX}machine")] = json!(name);
    let replicas = i32::from(strategy != RunStrategy::Halted);
    if replicas == 0 {
        notes.push(
            "the machine is halted: the Deployment has no pod until replicas is 1 and its run-strategy another"
                .to_owned(),
        );
    }
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": written(&machine.metadata),
        "spec": {
            "replicas": replicas,
            // Two pods cannot be runs of one machine at the same time.
            "strategy": { "type": "Recreate" },
            "selector": { "matchLabels": label },
            "template": template,
        },
    });
    Ok(Converted { documents: vec![version::encode(&machine, Version::V1), deployment], notes })
}

/// What used to say when a machine runs.
fn running(spec: &mut Value, causes: &mut Causes) {
    let Some(fields) = spec.as_object_mut() else { return };
    let Some(running) = fields.remove("running").filter(|running| !running.is_null()) else { return };
    if fields.get("runStrategy").is_some_and(|strategy| !strategy.is_null()) {
        let message = "must be one of running and runStrategy";
        causes.forbidden(Rule("manifest-running"), "spec.running", message);
        return;
    }
    match running.as_bool() {
        Some(running) => {
            drop(fields.insert("runStrategy".to_owned(), json!(if running { "Always" } else { "Halted" })))
        }
        None => causes.wrong_type(Rule("field-type"), "spec.running", running, "true or false"),
    }
}

/// Takes out what the pod says.
fn lift(run: &mut Value) -> Lifted {
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
