//! Converts the versions of the documents to and from one internal type (`crate::spec`, which has the shape of v1), without loss:
//! what v1alpha1 cannot express is carried in an annotation and restored.

mod carry;
pub mod record;
pub mod v1alpha1;

use crate::annotation_name::field;
use crate::cause::{Causes, Rule};
use crate::spec::{InstanceSpec, VirtualMachine, words};
use crate::tree::{ROOT, Tree};
use crate::{read, schema, shape};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// The group of our documents.
pub const GROUP: &str = "vm.nacelle.dev";
/// The kind of a machine that outlives its runs.
pub const MACHINE: &str = "VirtualMachine";
/// The annotation of an object that carries what its version cannot say.
pub const CARRIED: &str = "vm.nacelle.dev/v1-fields";

words! {
    /// A version.
    pub enum Version {
        V1Alpha1 = "v1alpha1",
        V1 = "v1",
    }
}

/// Returns a document of a type; parts of the wrong shape are reported and left out.
pub fn typed<T: JsonSchema + DeserializeOwned + Default>(mut value: Value, at: &str) -> (T, Causes) {
    let mut causes = shape::prune_to_schema(&mut value, &schema::of::<T>(), at);
    let read = serde_json::from_value(value).unwrap_or_else(|error| {
        causes.forbidden(Rule("field-shape"), at, format!("cannot be read: {error}"));
        T::default()
    });
    (read, causes)
}

/// Returns a value as JSON.
pub fn written(value: &impl Serialize) -> Value {
    // The value consists of strings, numbers, lists and maps with string keys: all of it is valid JSON.
    serde_json::to_value(value).unwrap_or_default()
}

/// Returns a specification of any version as a tree of v1. `carried` is the annotation with the fields that v1alpha1 cannot express.
pub fn tree(value: Value, version: Version, carried: Option<&str>) -> (Tree, Causes) {
    match version {
        Version::V1 => {
            let (spec, mut causes) = typed::<InstanceSpec>(value, ROOT);
            if carried.is_some() {
                let message = "is only allowed with documents of v1alpha1";
                causes.forbidden(Rule("carried-version"), field("v1-fields"), message);
            }
            (Tree::of(written(&spec)), causes)
        }
        Version::V1Alpha1 => {
            let (old, mut causes) = typed::<v1alpha1::InstanceSpec>(value, ROOT);
            let mut value = written(&InstanceSpec::from(&old));
            if let Some(carried) = carried {
                match edits(carried, &field("v1-fields")) {
                    Ok(edits) => carry::apply(&mut value, edits),
                    Err(wrong) => causes.extend(wrong),
                }
            }
            // The carried fields are as untrusted as the rest.
            let (spec, wrong) = typed::<InstanceSpec>(value, ROOT);
            causes.extend(wrong);
            (Tree::of(written(&spec)), causes)
        }
    }
}

/// Returns a specification as v1alpha1, and the fields that v1alpha1 cannot express, if there are any.
pub fn instance_v1alpha1(spec: &InstanceSpec) -> (Value, Option<String>) {
    let old = v1alpha1::InstanceSpec::from(spec);
    let lost = carry::difference(&written(spec), &written(&InstanceSpec::from(&old)));
    (written(&old), (!lost.is_empty()).then(|| written(&lost).to_string()))
}

fn edits(text: &str, at: &str) -> Result<Vec<carry::Edit>, Causes> {
    let value = read::one(text, at)?;
    serde_json::from_value(value).map_err(|error| {
        let mut causes = Causes::default();
        causes.forbidden(Rule("carried-form"), at, format!("is not in the format that a conversion writes: {error}"));
        causes
    })
}

/// Returns a VM as a document of a version.
pub fn encode(machine: &VirtualMachine, version: Version) -> Value {
    let mut value = match version {
        Version::V1 => written(machine),
        Version::V1Alpha1 => {
            let mut machine = machine.clone();
            machine.metadata.annotations.remove(CARRIED);
            let mut old = v1alpha1::VirtualMachine::from(&machine);
            let lost = carry::difference(&written(&machine), &written(&VirtualMachine::from(&old)));
            if !lost.is_empty() {
                old.metadata.annotations.insert(CARRIED.to_owned(), written(&lost).to_string());
            }
            written(&old)
        }
    };
    value["apiVersion"] = json!(format!("{GROUP}/{}", version.word()));
    value["kind"] = json!(MACHINE);
    value
}

/// Parses the VM from a document of any version.
pub fn decode(mut value: Value) -> Result<VirtualMachine, Causes> {
    let mut causes = Causes::default();
    let version = version_of(&value, &mut causes);
    if let Some(fields) = value.as_object_mut() {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    let machine = match version {
        None => return Err(causes),
        Some(Version::V1) => {
            let (mut machine, wrong) = typed::<VirtualMachine>(value, "");
            causes.extend(wrong);
            // The annotation belongs to the other version.
            machine.metadata.annotations.remove(CARRIED);
            machine
        }
        Some(Version::V1Alpha1) => {
            let (mut old, wrong) = typed::<v1alpha1::VirtualMachine>(value, "");
            causes.extend(wrong);
            let carried = old.metadata.annotations.remove(CARRIED);
            let mut value = written(&VirtualMachine::from(&old));
            if let Some(carried) = carried {
                match edits(&carried, &format!("metadata.annotations[{CARRIED}]")) {
                    Ok(edits) => carry::apply(&mut value, edits),
                    Err(wrong) => causes.extend(wrong),
                }
            }
            let (machine, wrong) = typed::<VirtualMachine>(value, "");
            causes.extend(wrong);
            machine
        }
    };
    causes.into_result().map(|()| machine)
}

fn version_of(value: &Value, causes: &mut Causes) -> Option<Version> {
    if value["kind"] != MACHINE {
        causes.unsupported(Rule("document-kind"), "kind", &value["kind"], &[MACHINE]);
    }
    let named = value["apiVersion"].as_str().and_then(|name| name.strip_prefix(GROUP)?.strip_prefix('/'));
    let version = named.and_then(Version::of);
    if version.is_none() {
        let known = Version::WORDS.iter().map(|word| format!("{GROUP}/{word}")).collect::<Vec<_>>();
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        causes.unsupported(Rule("document-version"), "apiVersion", &value["apiVersion"], &known);
    }
    version.filter(|_| causes.is_empty())
}
