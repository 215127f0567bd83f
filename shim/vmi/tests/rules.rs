//! Tests the message of every rule: `tests/rules/*.yaml` contains invalid specifications, one file for each subject, each with
//! the rule that it violates and the complete causes. Every rule must have a case.

use nacelle_vmi::annotations::PREFIX;
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::{admit, read};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// The rule that the case is for.
    rule: String,
    /// The short annotations without their prefix; `kind` defaults to machine.
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    /// The document.
    spec: Option<Value>,
    /// Merged into a specification that is valid otherwise.
    with: Option<Value>,
    /// An annotation that consists of many repetitions.
    repeat: Option<Repeat>,
    /// The documents of the catalogue.
    #[serde(default)]
    catalogue: Vec<Value>,
    /// The expected causes, complete.
    says: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Repeat {
    annotation: String,
    before: String,
    text: String,
    times: usize,
    after: String,
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn files(path: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(here(path)).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn cases() -> Vec<(PathBuf, Case)> {
    let read = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).unwrap();
        let value = read::one(&text, "cases").unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let cases: Vec<Case> =
            serde_json::from_value(value).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        cases.into_iter().map(|case| (file.clone(), case)).collect::<Vec<_>>()
    };
    files("tests/rules").iter().flat_map(read).collect()
}

/// Returns a valid VM.
fn right() -> Value {
    serde_json::json!({
        "domain": { "memory": { "guest": "1Gi" }, "devices": { "disks": [ { "name": "root" } ] } },
        "volumes": [ { "name": "root", "containerDisk": { "image": "debian:12" } } ],
    })
}

/// Merges objects; of other values the second one wins.
fn onto(base: &mut Value, more: &Value) {
    match (base, more) {
        (Value::Object(base), Value::Object(more)) => {
            for (key, value) in more {
                onto(base.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (base, more) => *base = more.clone(),
    }
}

fn causes_of(case: &Case) -> (Vec<String>, Vec<String>) {
    let mut annotations: BTreeMap<String, String> =
        case.annotations.iter().map(|(name, value)| (format!("{PREFIX}{name}"), value.clone())).collect();
    annotations.entry(format!("{PREFIX}kind")).or_insert_with(|| "machine".to_owned());
    if let Some(Repeat { annotation, before, text, times, after }) = &case.repeat {
        annotations.insert(
            format!("{PREFIX}{annotation}"),
            format!(
                "{before}{}{after}",
                (0..*times).map(|number| text.replace('#', &number.to_string())).collect::<String>()
            ),
        );
    }
    let mut document = case.spec.clone();
    if let Some(with) = &case.with {
        let mut whole = right();
        onto(&mut whole, with);
        document = Some(whole);
    }
    if let Some(document) = document {
        annotations.entry(format!("{PREFIX}spec")).or_insert_with(|| document.to_string());
    }
    let mut catalogue = Catalogue::default();
    for document in &case.catalogue {
        if let Err(causes) = catalogue.add(document.clone(), "catalogue") {
            return texts(&causes);
        }
    }
    match admit::pod(&annotations, &catalogue) {
        Ok(_) => (Vec::new(), Vec::new()),
        Err(causes) => texts(&causes),
    }
}

fn texts(causes: &nacelle_vmi::Causes) -> (Vec<String>, Vec<String>) {
    let text = causes.list().iter().map(ToString::to_string).collect();
    (text, causes.list().iter().map(|cause| cause.rule.0.to_owned()).collect())
}

#[test]
fn a_valid_specification_is_admitted() {
    let annotations = [("kind", "machine".to_owned()), ("spec", right().to_string())];
    let annotations = annotations.into_iter().map(|(name, value)| (format!("{PREFIX}{name}"), value)).collect();
    let admitted = admit::pod(&annotations, &Catalogue::default()).unwrap().unwrap();
    assert_eq!(admitted.spec().domain.machine.as_ref().unwrap().kind, "q35");
}

#[test]
fn every_case_has_its_texts_and_rule() {
    let mut wrong = String::new();
    for (file, case) in cases() {
        let (texts, rules) = causes_of(&case);
        if texts != case.says || !rules.contains(&case.rule) {
            writeln!(wrong, "{} {}: rules {rules:?}", file.file_name().unwrap().display(), case.rule).unwrap();
            writeln!(wrong, "  says:").unwrap();
            texts.iter().for_each(|text| writeln!(wrong, "  - {}", Value::from(text.as_str())).unwrap());
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

/// Returns the names of the rules in the sources.
fn known() -> BTreeSet<String> {
    let mut directories = vec![here("src")];
    let mut rules = BTreeSet::new();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            rules.extend(code.split("Rule(\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()));
        }
    }
    rules
}

#[test]
fn every_rule_has_a_case() {
    // These rules are for documents outside of a pod's annotations; `versions.rs` and `manifest` test them. A `field-shape` cause
    // would be a BUG.
    let elsewhere = ["document-kind", "document-version", "document-bytes", "field-shape"];
    let tried: BTreeSet<String> = cases().into_iter().map(|(_, case)| case.rule).collect();
    let missing: Vec<String> = known()
        .into_iter()
        .filter(|rule| !tried.contains(rule) && !elsewhere.contains(&rule.as_str()) && !rule.starts_with("manifest-"))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(tried.len() >= 100, "{}", tried.len());
}
