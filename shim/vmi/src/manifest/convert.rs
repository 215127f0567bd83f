//! Converts KubeVirt's manifests to pods, ReplicaSets, Deployments and VM records. Each VM is admitted; what cannot be converted
//! is rejected with its reason.

use super::lift::{connect, lift};
use super::{KUBEVIRT, bare, pod};
use crate::annotations::PREFIX;
use crate::cause::{Causes, Rule};
use crate::complete::complete;
use crate::preset::Catalogue;
use crate::spec::{InstanceSpec, RunStrategy, VirtualMachine};
use crate::version::{self, Version, typed, written};
use crate::{admit, read, refused};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The fields of a manifest outside of the VM that must be objects.
const OBJECTS: &[&str] = &[
    "metadata",
    "metadata.annotations",
    "metadata.labels",
    "spec",
    "spec.template",
    "spec.template.metadata",
    "spec.template.metadata.annotations",
    "spec.template.metadata.labels",
    "spec.template.spec",
];

/// The settings of the pods that are not in the manifest.
#[derive(Clone, Debug)]
pub struct Options {
    /// The RuntimeClass of the pods.
    pub runtime_class: String,
    /// The image of a VM whose disks are in no image.
    pub image: String,
}

impl Default for Options {
    fn default() -> Options {
        Options { runtime_class: "nacelle".to_owned(), image: "registry.k8s.io/pause:3.10".to_owned() }
    }
}

/// The result of a conversion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Converted {
    /// The documents.
    pub documents: Vec<Value>,
    /// Notes about what the user must know or do.
    pub notes: Vec<String>,
}

/// Converts one document.
pub fn convert(document: &Value, catalogue: &Catalogue, options: &Options) -> Result<Converted, Causes> {
    let mut causes = Causes::default();
    let mut document = bare(document);
    if let Some(reason) = document["kind"].as_str().and_then(refused::kind) {
        causes.forbidden(Rule("manifest-kind"), "kind", format!("{}: {reason}", document["kind"]));
        return Err(causes);
    }
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
    objects(&document, &mut causes);
    if !causes.is_empty() {
        return Err(causes);
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
    let mut lifted = lift(&mut run);
    let (mut spec, mut causes) = typed::<InstanceSpec>(run, "spec");
    annotated(&metadata, "metadata", &mut causes);
    let admitted = admit::instance(&spec, causes, catalogue)?;
    connect(&mut spec, &mut lifted);
    let (mut pod, notes) = pod::template(&spec, admitted.explicit_spec(), &metadata, lifted, options);
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    // A VirtualMachineInstance runs once.
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
    annotated(&document["spec"]["template"]["metadata"], "spec.template.metadata", &mut causes);
    let mut run = document["spec"]["template"]["spec"].take();
    let mut lifted = lift(&mut run);
    let (mut spec, wrong) = typed::<InstanceSpec>(run, "spec");
    let admitted = match admit::instance(&spec, wrong, catalogue) {
        Ok(admitted) if causes.is_empty() => admitted,
        outcome => {
            causes.extend(admit::below_template(outcome.err().unwrap_or_default()));
            return Err(causes);
        }
    };
    connect(&mut spec, &mut lifted);
    let metadata = document["spec"]["template"]["metadata"].take();
    let (template, notes) = pod::template(&spec, admitted.explicit_spec(), &metadata, lifted, options);
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
    annotated(&document["spec"]["template"]["metadata"], "spec.template.metadata", &mut causes);
    let mut lifted = lift(&mut document["spec"]["template"]["spec"]);
    for matcher in ["instancetype", "preference"] {
        let Some(fields) = document["spec"].get_mut(matcher).and_then(Value::as_object_mut) else { continue };
        // The revision of it in the cluster.
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
    let admitted = admit::machine(&machine, causes, catalogue)?;
    connect(&mut machine.spec.template.spec, &mut lifted);
    let strategy = machine.spec.run_strategy.unwrap_or(RunStrategy::Halted);
    let name = machine.metadata.name.clone();
    let run = &machine.spec.template;
    let (mut template, mut notes) =
        pod::template(&run.spec, admitted.explicit_spec(), &written(&run.metadata), lifted, options);
    pod::follow_annotations(&mut template);
    let annotations = &mut template["metadata"]["annotations"];
    annotations[format!("{PREFIX}name")] = json!(name);
    annotations[format!("{PREFIX}run-strategy")] = json!(strategy.word());
    for (key, matcher) in [("instancetype", &machine.spec.instancetype), ("preference", &machine.spec.preference)] {
        if let Some(matcher) = matcher {
            annotations[format!("{PREFIX}{key}")] = json!(matcher.name);
        }
    }
    let nodes = Catalogue::default();
    let instancetype = machine.spec.instancetype.as_ref().map(|matcher| matcher.name.as_str());
    let preference = machine.spec.preference.as_ref().map(|matcher| matcher.name.as_str());
    if instancetype.is_some_and(|name| nodes.instancetypes.get(name) != catalogue.instancetypes.get(name))
        || preference.is_some_and(|name| nodes.preferences.get(name) != catalogue.preferences.get(name))
    {
        written_out(annotations, catalogue)?;
    }
    // A label of its own, so that the selector matches no other pod.
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
            // Two pods cannot be runs of one VM at the same time.
            "strategy": { "type": "Recreate" },
            "selector": { "matchLabels": label },
            "template": template,
        },
    });
    Ok(Converted { documents: vec![version::encode(&machine, Version::V1), deployment], notes })
}

/// Writes the fields of an instance type and a preference that no node knows into the pod's document.
fn written_out(annotations: &mut Value, catalogue: &Catalogue) -> Result<(), Causes> {
    let strings = annotations.as_object().into_iter().flatten();
    let strings = strings.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
    let strings: BTreeMap<String, String> = strings.collect();
    let Some(mut complete) = complete(&strings, catalogue, false)? else { return Ok(()) };
    if let Some(document) = complete.get_mut(&format!("{PREFIX}spec")) {
        *document = super::text(&[read::one(document, "spec")?]);
    }
    *annotations = json!(complete);
    Ok(())
}

/// Checks that fields which are accessed before the types are checked are objects where they are present.
fn objects(document: &Value, causes: &mut Causes) {
    for at in OBJECTS {
        let said = at.split('.').try_fold(document, |value, key| value.get(key));
        if let Some(said) = said.filter(|said| !said.is_null() && !said.is_object()) {
            causes.wrong_type(Rule("field-type"), *at, said, "an object");
        }
    }
}

/// Rejects annotations by which KubeVirt changes a VM.
fn annotated(metadata: &Value, at: &str, causes: &mut Causes) {
    for (key, reason) in refused::ANNOTATIONS {
        if metadata["annotations"].get(*key).is_some_and(|value| !value.is_null()) {
            causes.forbidden(Rule("manifest-hook"), format!("{at}.annotations[{key}]"), *reason);
        }
    }
}

/// Converts the older field for the run strategy.
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
