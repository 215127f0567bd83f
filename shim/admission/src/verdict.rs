//! Decides the response to a review. `nacelle_vmi` has the rules; this module selects which of them apply to which object. Pure.

use super::review::{AdmissionResponse, Review};
use nacelle_machines::supported::{unknown_presets, unsupported_settings};
use nacelle_vmi::admit::Admitted;
use nacelle_vmi::annotations::PREFIX;
use nacelle_vmi::complete::complete;
use nacelle_vmi::manifest;
use nacelle_vmi::preset::Catalogue;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The configurable checks of objects.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// The instance types, preferences and presets that pods can name.
    pub catalogue: Catalogue,
    /// The RuntimeClasses whose pods are checked, "" for pods without one; empty for all pods.
    pub runtime_classes: BTreeSet<String>,
    /// The defaults of machine pods are written into their documents.
    pub defaults: bool,
}

impl Policy {
    /// Returns whether an object is valid.
    pub fn validate(&self, review: &Review) -> AdmissionResponse {
        let allowed = |warnings| AdmissionResponse::Allowed { warnings };
        let Some(object) = self.checked_object(review) else { return allowed(Vec::new()) };
        let verdict = manifest::one(&object, &self.catalogue);
        if let Some(first) = verdict.causes.list().first() {
            if review.operation == "UPDATE"
                && (is_being_deleted(&review.object)
                    || vm_settings(&object) == vm_settings(&with_kind(review, &review.old)))
            {
                // It must remain possible to label, scale and delete an object that was invalid before.
                return allowed(vec![format!("the object was invalid before and will not run: {first}")]);
            }
            return AdmissionResponse::Denied(verdict.causes);
        }
        // Nodes run pods, and no machine records.
        let pods = verdict.admitted.filter(|_| !manifest::is_machine(&review.kind));
        allowed(pods.map_or_else(Vec::new, |admitted| warnings(review, &object, &admitted)))
    }

    /// Returns the annotations that are added to a new pod.
    pub fn mutate(&self, review: &Review) -> AdmissionResponse {
        let unchanged = AdmissionResponse::Allowed { warnings: Vec::new() };
        if review.kind != "Pod" || review.operation != "CREATE" {
            return unchanged;
        }
        let Some(object) = self.checked_object(review) else { return unchanged };
        let (annotations, wrong) = manifest::annotations(&object);
        // An invalid pod is not changed: the validating webhook rejects it after all mutations.
        match complete(&annotations, &self.catalogue, self.defaults) {
            Ok(Some(complete)) if wrong.is_empty() => AdmissionResponse::Patched(patch(&annotations, &complete)),
            _ => unchanged,
        }
    }

    /// Returns the object, if this server checks it.
    fn checked_object(&self, review: &Review) -> Option<Value> {
        let is_object_write =
            review.subresource.is_empty() && ["CREATE", "UPDATE"].contains(&review.operation.as_str());
        if !is_object_write || review.object.is_null() || !manifest::is_known(&review.api_version(), &review.kind) {
            return None;
        }
        let object = with_kind(review, &review.object);
        let pods = !manifest::is_machine(&review.kind);
        let class = manifest::runtime_class(&object).unwrap_or_default();
        let is_checked = !pods || self.runtime_classes.is_empty() || self.runtime_classes.contains(class);
        is_checked.then_some(object)
    }
}

/// Returns warnings about valid settings that may surprise the user.
fn warnings(review: &Review, object: &Value, admitted: &Admitted) -> Vec<String> {
    let unsupported = unknown_presets(admitted).into_iter().chain(unsupported_settings(admitted));
    let mut warnings: Vec<String> = unsupported.map(|setting| setting.to_string()).collect();
    if review.kind == "Pod"
        && review.operation == "UPDATE"
        && vm_settings(object) != vm_settings(&with_kind(review, &review.old))
    {
        warnings.push(format!("{PREFIX}...: annotations do not change the VM of an existing pod"));
    }
    warnings
}

/// Returns the object with its kind, and without the fields that a cluster adds.
fn with_kind(review: &Review, object: &Value) -> Value {
    let mut object = manifest::bare(object);
    if object.is_object() {
        object["apiVersion"] = json!(review.api_version());
        object["kind"] = json!(review.kind);
    }
    object
}

fn is_being_deleted(object: &Value) -> bool {
    object.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null())
}

/// Returns the parts of an object that are about VMs.
fn vm_settings(object: &Value) -> Value {
    if manifest::is_machine(object["kind"].as_str().unwrap_or_default()) {
        return json!([object["metadata"]["annotations"], object["spec"]]);
    }
    let (mut annotations, _) = manifest::annotations(object);
    annotations.retain(|key, _| key.starts_with(PREFIX));
    json!(annotations)
}

/// Returns the JSON patch between two sets of annotations.
fn patch(from: &BTreeMap<String, String>, to: &BTreeMap<String, String>) -> Value {
    let path = |key: &str| format!("/metadata/annotations/{}", key.replace('~', "~0").replace('/', "~1"));
    let removed = from.keys().filter(|key| !to.contains_key(*key));
    let removed = removed.map(|key| json!({ "op": "remove", "path": path(key) }));
    let changed = to.iter().filter(|(key, value)| from.get(*key) != Some(value));
    let changed = changed.map(|(key, value)| {
        let op = if from.contains_key(key) { "replace" } else { "add" };
        json!({ "op": op, "path": path(key), "value": value })
    });
    removed.chain(changed).collect()
}
