//! Owns: the proof of what becomes of whole manifests: `tests/corpus/manifests/NAME.yaml` is checked
//! (`tests/manifests/NAME.checked`) and converted (`NAME.converted`); what it became is right again.

use nacelle_vmi::manifest::{self, Options, Verdict};
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::read;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests")
}

fn documents(name: &str) -> Vec<Value> {
    read::all(&std::fs::read_to_string(folder().join(format!("../corpus/manifests/{name}.yaml"))).unwrap(), name)
        .unwrap()
}

fn expect(file: &str, found: &str) {
    let expected = std::fs::read_to_string(folder().join(file)).unwrap_or_default();
    assert!(found == expected, "{file} should be\n{expected}\nand is\n{found}");
}

fn checked(verdicts: &[Verdict]) -> String {
    let mut text = String::new();
    for verdict in verdicts {
        let what = match (verdict.machine, verdict.causes.is_empty()) {
            (_, false) => "wrong",
            (true, true) => "right",
            (false, true) => "no machine",
        };
        writeln!(text, "{} {}: {what}", verdict.kind, verdict.name).unwrap();
        verdict.causes.list().iter().for_each(|cause| writeln!(text, "  {cause}").unwrap());
    }
    text
}

/// Converts; what it became must be right.
fn converted(name: &str) -> String {
    let mut catalogue = Catalogue::default();
    let mut text = String::new();
    for document in documents(name) {
        if manifest::is_catalogue(&document) {
            catalogue.add(document, name).unwrap();
            continue;
        }
        match manifest::convert(&document, &catalogue, &Options::default()) {
            Ok(converted) => {
                converted.notes.iter().for_each(|note| writeln!(text, "# note: {note}").unwrap());
                let yaml = manifest::text(&converted.documents);
                let again = read::all(&yaml, name).unwrap();
                assert_eq!(again, converted.documents);
                for verdict in manifest::validate(&again, &catalogue) {
                    assert!(verdict.machine && verdict.causes.is_empty(), "{verdict:?}");
                }
                text += &yaml;
            }
            Err(causes) => causes.list().iter().for_each(|cause| writeln!(text, "# refused: {cause}").unwrap()),
        }
    }
    text
}

#[test]
fn pods_and_machines_are_checked() {
    expect("pods.checked", &checked(&manifest::validate(&documents("pods"), &Catalogue::default())));
}

#[test]
fn an_instance_becomes_a_pod() {
    expect("instance.converted", &converted("instance"));
}

#[test]
fn a_machine_becomes_a_record_and_a_deployment() {
    expect("machine.converted", &converted("machine"));
}

#[test]
fn a_replica_set_stays_one() {
    expect("replicas.converted", &converted("replicas"));
}

#[test]
fn what_cannot_be_converted_is_refused_with_its_reasons() {
    expect("refused.converted", &converted("refused"));
    expect("refused.checked", &checked(&manifest::validate(&documents("refused"), &Catalogue::default())));
}

#[test]
fn the_schema_is_one_document_without_references() {
    for version in [nacelle_vmi::version::Version::V1, nacelle_vmi::version::Version::V1Alpha1] {
        let text = manifest::openapi(version).to_string();
        assert!(!text.contains("$ref"));
        let document: Value = serde_json::from_str(&text).unwrap();
        let cores = "/components/schemas/VirtualMachineInstanceSpec/properties/domain/properties/cpu/properties/cores";
        assert_eq!(document.pointer(cores).unwrap()["type"], json!("integer"));
    }
}
