//! Completes annotations so that nodes need no catalogue to read them: the fields from presets, instance type and preference are
//! written into the document, and a record in another annotation lists the sources of the fields.

use crate::admit::{self, Admitted};
use crate::annotations::{PREFIX, field};
use crate::cause::{Causes, Rule};
use crate::preset::{Applied, Catalogue};
use crate::read;
use crate::spec::SpecKind;
use crate::tree::Tree;
use crate::version::written;
use serde_json::Value;
use std::collections::BTreeMap;

/// The annotations that have no equivalent in the document.
const KEPT_ANNOTATIONS: &[&str] =
    &["kind", "name", "machine-id", "run-strategy", "power", "ssh-keys", "empty-dir-limits", "sockets"];
/// The prefixes of sources of fields.
const SOURCES: &[&str] = &["preset ", "instance type ", "preference "];
/// The maximum length of the name of a source.
const MAX_SOURCE: usize = 300;

/// Returns the annotations with the whole specification in one document, or `None` if they name nothing of a catalogue. With
/// `defaults` the document of a machine pod contains the defaults too; those of a container pod follow from its handler.
/// Completing is idempotent.
pub fn complete(
    annotations: &BTreeMap<String, String>,
    catalogue: &Catalogue,
    defaults: bool,
) -> Result<Option<BTreeMap<String, String>>, Causes> {
    let Some(admitted) = admit::pod(annotations, catalogue)? else { return Ok(None) };
    let defaults = defaults && admitted.kind() == SpecKind::Machine;
    let applied = merged_record(&admitted, annotations);
    if !names_anything(admitted.applied()) && !defaults {
        return Ok(None);
    }
    let mut complete = annotations.clone();
    complete.retain(|key, _| key.strip_prefix(PREFIX).is_none_or(|name| KEPT_ANNOTATIONS.contains(&name)));
    let mut set = |name: &str, text: String| drop(complete.insert(format!("{PREFIX}{name}"), text));
    let document = written(if defaults { admitted.spec() } else { admitted.explicit_spec() });
    let current = annotations.get(&format!("{PREFIX}spec"));
    // A document with the same meaning keeps its text.
    let same_meaning = |text: &&String| read::one(text, "spec").is_ok_and(|value| value == document);
    set("spec", current.filter(same_meaning).cloned().unwrap_or_else(|| document.to_string()));
    if let Some(strategy) = admitted.run_strategy().filter(|_| defaults) {
        set("run-strategy", strategy.word().to_owned());
    }
    if names_anything(&applied) || !applied.fields.is_empty() {
        set("applied", written(&applied).to_string());
    }
    Ok((complete != *annotations).then_some(complete))
}

fn names_anything(applied: &Applied) -> bool {
    applied.instancetype.is_some() || applied.preference.is_some() || !applied.presets.is_empty()
}

/// Merges what was applied now and earlier.
fn merged_record(admitted: &Admitted, annotations: &BTreeMap<String, String>) -> Applied {
    let before =
        annotations.get(&format!("{PREFIX}applied")).and_then(|text| parse_record(text).ok()).unwrap_or_default();
    let now = admitted.applied();
    let fields = now.fields.iter().filter(|(_, from)| is_source(from));
    let mut presets = before.presets;
    presets.extend(now.presets.iter().cloned());
    Applied {
        fields: fields.map(|(path, from)| (path.clone(), from.clone())).collect(),
        instancetype: now.instancetype.clone().or(before.instancetype),
        preference: now.preference.clone().or(before.preference),
        presets,
    }
}

/// Restores the sources of the fields that an earlier completion has written.
pub(crate) fn restore_sources(annotations: &BTreeMap<&str, &str>, tree: &mut Tree, causes: &mut Causes) {
    let Some(text) = annotations.get("applied") else { return };
    match parse_record(text) {
        Ok(applied) => {
            for (path, from) in applied.fields.into_iter().filter(|(_, from)| is_source(from)) {
                tree.from.entry(path).or_insert(from);
            }
        }
        Err(wrong) => causes.extend(wrong),
    }
}

fn parse_record(text: &str) -> Result<Applied, Causes> {
    let at = field("applied");
    let value: Value = read::one(text, &at)?;
    serde_json::from_value(value).map_err(|error| {
        let mut causes = Causes::default();
        causes.forbidden(
            Rule("applied-form"),
            at,
            format!("is not in the format that the admission server writes: {error}"),
        );
        causes
    })
}

fn is_source(from: &str) -> bool {
    let visible = from.len() <= MAX_SOURCE && from.chars().all(|c| c.is_ascii_graphic() || c == ' ');
    visible && SOURCES.iter().any(|source| from.starts_with(source))
}
