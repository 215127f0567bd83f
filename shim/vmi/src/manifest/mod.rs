//! Finds the VMs in manifests: which documents there are and where their specifications are, and validates them.

mod convert;
mod lift;
mod pod;

pub use convert::{Converted, Options, convert};

use crate::admit::{self, Admitted};
use crate::cause::{Causes, Rule};
use crate::preset::Catalogue;
use crate::refused;
use crate::spec::{InstanceSpec, VirtualMachine};
use crate::version::{self, typed};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The workloads with a pod template, and the path of the template.
const WORKLOADS: &[(&str, &str)] = &[
    ("Pod", "/metadata"),
    ("PodTemplate", "/template/metadata"),
    ("Deployment", "/spec/template/metadata"),
    ("ReplicaSet", "/spec/template/metadata"),
    ("StatefulSet", "/spec/template/metadata"),
    ("DaemonSet", "/spec/template/metadata"),
    ("ReplicationController", "/spec/template/metadata"),
    ("Job", "/spec/template/metadata"),
    ("CronJob", "/spec/jobTemplate/spec/template/metadata"),
];
/// The kinds of VMs.
const MACHINES: [&str; 3] = ["VirtualMachine", "VirtualMachineInstance", "VirtualMachineInstanceReplicaSet"];
/// The API group of KubeVirt's documents.
const KUBEVIRT: &str = "kubevirt.io/";

/// The result of the validation of one document.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The document's kind.
    pub kind: String,
    /// The document's name.
    pub name: String,
    /// Whether the document describes a VM.
    pub machine: bool,
    /// The causes of rejection.
    pub causes: Causes,
    /// The admitted specification; for a VM of KubeVirt, the one that `convert` produces.
    #[serde(skip)]
    pub admitted: Option<Box<Admitted>>,
}

/// Validates all documents of a file. Its instance types, preferences and presets are available to its other documents.
pub fn validate(documents: &[Value], catalogue: &Catalogue) -> Vec<Verdict> {
    let mut catalogue = catalogue.clone();
    let mut verdicts: Vec<Option<Verdict>> = Vec::new();
    for document in documents {
        let listed = is_catalogue(document)
            .then(|| verdict(document, false, catalogue.add(bare(document), "document").map(|()| None)));
        verdicts.push(listed);
    }
    let all = documents.iter().zip(verdicts);
    all.map(|(document, verdict)| verdict.unwrap_or_else(|| one(document, &catalogue))).collect()
}

/// Returns whether a document is part of a catalogue.
pub fn is_catalogue(document: &Value) -> bool {
    let kind = document["kind"].as_str().unwrap_or_default();
    ["Instancetype", "Preference", "InstancePreset"].iter().any(|end| kind.ends_with(end))
}

fn verdict(document: &Value, machine: bool, outcome: Result<Option<Admitted>, Causes>) -> Verdict {
    let text = |pointer: &str| document.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (admitted, causes) = match outcome {
        Ok(admitted) => (admitted.map(Box::new), Causes::default()),
        Err(causes) => (None, causes),
    };
    Verdict { kind: text("/kind"), name: text("/metadata/name"), machine, causes, admitted }
}

/// Validates one document that is not part of a catalogue.
pub fn one(document: &Value, catalogue: &Catalogue) -> Verdict {
    let kind = document["kind"].as_str();
    let group = document["apiVersion"].as_str().unwrap_or_default();
    let outcome = match kind {
        Some(kind) if template(kind).is_some() => {
            let (annotations, mut causes) = annotations(document);
            if annotations.keys().all(|key| !key.starts_with(crate::annotations::PREFIX)) {
                return verdict(document, false, causes.into_result().map(|()| None));
            }
            match admit::pod(&annotations, catalogue) {
                Ok(admitted) => causes.into_result().map(|()| admitted),
                Err(wrong) => {
                    causes.extend(wrong);
                    Err(causes)
                }
            }
        }
        Some("VirtualMachine") if !group.starts_with(KUBEVIRT) => version::decode(document.clone())
            .and_then(|machine| admit::machine(&machine, Causes::default(), catalogue).map(Some)),
        Some("VirtualMachine" | "VirtualMachineInstance" | "VirtualMachineInstanceReplicaSet") => {
            convert(document, catalogue, &Options::default()).and_then(|made| match made.documents.last() {
                Some(pods) => admit::pod(&annotations(pods).0, catalogue),
                None => Ok(None),
            })
        }
        None if document.get("domain").is_some() => {
            let (spec, wrong) = typed::<InstanceSpec>(document.clone(), crate::tree::ROOT);
            admit::instance(&spec, wrong, catalogue).map(Some)
        }
        _ => {
            let mut causes = Causes::default();
            match kind.and_then(|kind| Some((kind, refused::kind(kind)?))) {
                Some((kind, reason)) => {
                    causes.forbidden(Rule("manifest-kind"), "kind", format!("{kind:?}: {reason}"));
                }
                None => {
                    let mut kinds: Vec<&str> = WORKLOADS.iter().map(|(kind, _)| *kind).collect();
                    kinds.extend(MACHINES);
                    causes.unsupported(Rule("manifest-kind"), "kind", &document["kind"], &kinds);
                }
            }
            Err(causes)
        }
    };
    verdict(document, true, outcome)
}

/// Returns the path of the metadata of a workload's pods.
fn template(kind: &str) -> Option<&'static str> {
    WORKLOADS.iter().find(|(known, _)| *known == kind).map(|(_, at)| *at)
}

/// Returns whether `one` supports documents of this kind in this group or group version.
pub fn is_known(api_version: &str, kind: &str) -> bool {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    match template(kind) {
        Some(_) => ["", "apps", "batch"].contains(&group),
        None => (group == version::GROUP || api_version.starts_with(KUBEVIRT)) && is_machine(kind),
    }
}

/// Returns whether documents of this kind are VMs themselves, in contrast to workloads with pods.
pub fn is_machine(kind: &str) -> bool {
    MACHINES.contains(&kind)
}

/// Returns the RuntimeClass of a workload's pods.
pub fn runtime_class(document: &Value) -> Option<&str> {
    let above = template(document["kind"].as_str()?)?.strip_suffix("metadata")?;
    document.pointer(&format!("{above}spec/runtimeClassName"))?.as_str()
}

/// Returns the annotations of a workload's pods.
pub fn annotations(document: &Value) -> (BTreeMap<String, String>, Causes) {
    let mut causes = Causes::default();
    let at = document["kind"].as_str().and_then(template);
    let found = at.and_then(|at| document.pointer(at)).and_then(|metadata| metadata.get("annotations"));
    let mut read = BTreeMap::new();
    for (key, value) in found.and_then(Value::as_object).into_iter().flatten() {
        match value.as_str() {
            Some(text) => drop(read.insert(key.clone(), text.to_owned())),
            None => {
                let field = format!("metadata.annotations[{}]", key.chars().take(100).collect::<String>());
                causes.wrong_type(Rule("manifest-annotation"), field, value, "a string (in quotes)");
            }
        }
    }
    (read, causes)
}

/// Returns an object without the fields that a cluster adds.
pub fn bare(document: &Value) -> Value {
    let mut document = document.clone();
    if let Some(fields) = document.as_object_mut() {
        fields.remove("status");
        if let Some(metadata) = fields.get_mut("metadata") {
            said(metadata);
        }
    }
    if let Some(metadata) = document.pointer_mut("/spec/template/metadata") {
        said(metadata);
    }
    document
}

/// Removes the fields of metadata that a cluster adds.
fn said(metadata: &mut Value) {
    if let Some(fields) = metadata.as_object_mut() {
        fields.retain(|key, value| {
            ["name", "namespace", "labels", "annotations"].contains(&key.as_str()) && !value.is_null()
        });
        // The annotation of `kubectl apply` repeats the manifest.
        if let Some(annotations) = fields.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }
}

/// Formats documents as YAML.
pub fn text(documents: &[Value]) -> String {
    let one = |document: &Value| serde_saphyr::to_string(document).unwrap_or_else(|_| format!("{document:#}\n"));
    documents.iter().map(one).collect::<Vec<_>>().join("---\n")
}

/// Returns the OpenAPI document of a version.
pub fn openapi(version: version::Version) -> Value {
    let schemas = match version {
        version::Version::V1 => vec![
            ("VirtualMachine", object(crate::schema::of::<VirtualMachine>())),
            ("VirtualMachineInstanceSpec", crate::schema::of::<InstanceSpec>()),
            ("VirtualMachineInstancetype", object(crate::schema::of::<crate::preset::Instancetype>())),
            ("VirtualMachinePreference", object(crate::schema::of::<crate::preset::Preference>())),
            ("VirtualMachineInstancePreset", object(crate::schema::of::<crate::preset::Preset>())),
        ],
        version::Version::V1Alpha1 => vec![
            ("VirtualMachine", object(crate::schema::of::<version::v1alpha1::VirtualMachine>())),
            ("VirtualMachineInstanceSpec", crate::schema::of::<version::v1alpha1::InstanceSpec>()),
        ],
    };
    crate::schema::openapi(version.word(), schemas)
}

/// Adds the version and the kind to the schema of an object.
fn object(mut schema: Value) -> Value {
    let known = schema.get_mut("properties").and_then(Value::as_object_mut);
    let properties: &mut Map<String, Value> = match known {
        Some(known) => known,
        None => return schema,
    };
    for key in ["apiVersion", "kind"] {
        properties.insert(key.to_owned(), json!({ "type": "string" }));
    }
    schema
}
