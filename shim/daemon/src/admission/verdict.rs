//! Owns: what is answered to a review: the rules are those of `nacelle_vmi`; here is only which object is asked about what. Pure.

use super::review::{Answer, Review};
use crate::cri::convert::not_honoured as not_honoured_of_containers;
use crate::machine_pod::not_honoured as not_honoured_of_machines;
use nacelle_vmi::admit::{self, Admitted};
use nacelle_vmi::annotations::PREFIX;
use nacelle_vmi::complete::complete;
use nacelle_vmi::manifest;
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::spec::PodKind;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// What is asked of objects, beside what is right everywhere.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// What pods can name.
    pub catalogue: Catalogue,
    /// The RuntimeClasses whose pods are looked at, "" for pods that name none; empty: all pods.
    pub runtime_classes: BTreeSet<String>,
    /// Machine pods get their defaults written into their document.
    pub defaults: bool,
}

impl Policy {
    /// Whether an object is right.
    pub fn validate(&self, review: &Review) -> Answer {
        let allowed = |warnings| Answer::Allowed { warnings };
        let Some(object) = self.looked_at(review) else { return allowed(Vec::new()) };
        let causes = manifest::one(&object, &self.catalogue).causes;
        if let Some(first) = causes.list().first() {
            if review.operation == "UPDATE"
                && (is_going(&review.object) || said(&object) == said(&typed(review, &review.old)))
            {
                // What is wrong already must still be labelled, scaled and taken away.
                return allowed(vec![format!("it was wrong before, and is not run: {first}")]);
            }
            return Answer::Denied(causes);
        }
        allowed(self.warnings(review, &object))
    }

    /// What a new pod has to say beside what it says.
    pub fn mutate(&self, review: &Review) -> Answer {
        let unchanged = Answer::Allowed { warnings: Vec::new() };
        if review.kind != "Pod" || review.operation != "CREATE" {
            return unchanged;
        }
        let Some(object) = self.looked_at(review) else { return unchanged };
        let (annotations, wrong) = manifest::annotations(&object);
        // One that is wrong is left as it is: it is refused when all have changed what they change.
        match complete(&annotations, &self.catalogue, self.defaults) {
            Ok(Some(complete)) if wrong.is_empty() => Answer::Patched(patch(&annotations, &complete)),
            _ => unchanged,
        }
    }

    /// The object, if it is one that somebody here has something to say of.
    fn looked_at(&self, review: &Review) -> Option<Value> {
        let whole = review.subresource.is_empty() && ["CREATE", "UPDATE"].contains(&review.operation.as_str());
        if !whole || review.object.is_null() || !manifest::is_known(&review.api_version(), &review.kind) {
            return None;
        }
        let object = typed(review, &review.object);
        let pods = !manifest::is_machine(&review.kind);
        let class = manifest::runtime_class(&object).unwrap_or_default();
        let asked = !pods || self.runtime_classes.is_empty() || self.runtime_classes.contains(class);
        asked.then_some(object)
    }

    /// What is right, and yet not what somebody may think.
    fn warnings(&self, review: &Review, object: &Value) -> Vec<String> {
        let (annotations, _) = manifest::annotations(object);
        let Ok(Some(admitted)) = admit::pod(&annotations, &self.catalogue) else { return Vec::new() };
        let mut warnings = unknown_to_nodes(&admitted);
        let fields = match admitted.kind() {
            PodKind::Machine => not_honoured_of_machines(&admitted),
            PodKind::Container => not_honoured_of_containers(&admitted),
        };
        let version = env!("CARGO_PKG_VERSION");
        warnings.extend(
            fields
                .iter()
                .map(|field| format!("{field} is not run by nodes with Nacelle {version}: they refuse the pod")),
        );
        if review.kind == "Pod" && review.operation == "UPDATE" && said(object) != said(&typed(review, &review.old)) {
            warnings.push(format!("{PREFIX}...: the machine of a pod that is there does not change by annotations"));
        }
        warnings
    }
}

/// The object with its kind, and without what a cluster adds to it.
fn typed(review: &Review, object: &Value) -> Value {
    let mut object = manifest::bare(object);
    if object.is_object() {
        object["apiVersion"] = json!(review.api_version());
        object["kind"] = json!(review.kind);
    }
    object
}

fn is_going(object: &Value) -> bool {
    object.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null())
}

/// What an object says of machines.
fn said(object: &Value) -> Value {
    if manifest::is_machine(object["kind"].as_str().unwrap_or_default()) {
        return json!([object["metadata"]["annotations"], object["spec"]]);
    }
    let (mut annotations, _) = manifest::annotations(object);
    annotations.retain(|key, _| key.starts_with(PREFIX));
    json!(annotations)
}

/// Names that only this server knows, if nobody has put what they mean into the document.
fn unknown_to_nodes(admitted: &Admitted) -> Vec<String> {
    let built_in = Catalogue::default();
    let applied = admitted.applied();
    let types = applied.instancetype.iter().filter(|name| !built_in.instancetypes.contains_key(*name));
    let types = types.map(|name| format!("instance type {name}"));
    let preferences = applied.preference.iter().filter(|name| !built_in.preferences.contains_key(*name));
    let preferences = preferences.map(|name| format!("preference {name}"));
    let presets = applied.presets.iter().filter(|name| !built_in.presets.contains_key(*name));
    let presets = presets.map(|name| format!("preset {name}"));
    let all = types.chain(preferences).chain(presets);
    all.map(|what| format!("{what} is not known to nodes: have /mutate asked before, too")).collect()
}

/// The way from some annotations to others.
fn patch(from: &BTreeMap<String, String>, to: &BTreeMap<String, String>) -> Value {
    let path = |key: &str| format!("/metadata/annotations/{}", key.replace('~', "~0").replace('/', "~1"));
    let gone = from.keys().filter(|key| !to.contains_key(*key));
    let gone = gone.map(|key| json!({ "op": "remove", "path": path(key) }));
    let new = to.iter().filter(|(key, value)| from.get(*key) != Some(value));
    let new = new.map(|(key, value)| {
        let op = if from.contains_key(key) { "replace" } else { "add" };
        json!({ "op": op, "path": path(key), "value": value })
    });
    gone.chain(new).collect()
}
