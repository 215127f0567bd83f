//! Tests whole manifests: `tests/corpus/manifests/NAME.yaml` is validated (`tests/manifests/NAME.checked`) and converted
//! (`NAME.converted`); the result is valid again. The same is done with the kinds of examples of KubeVirt, one a file:
//! `tests/manifests/examples/NAME.yaml`. Whether they run is documented in docs/user/vm/migrating-from-kubevirt.md.

use nacelle_vmi::manifest::{self, Options, Verdict};
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::{Causes, read};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests")
}

fn documents(name: &str) -> Vec<Value> {
    of_file(&directory().join(format!("../corpus/manifests/{name}.yaml")))
}

fn of_file(file: &Path) -> Vec<Value> {
    read::all(&std::fs::read_to_string(file).unwrap(), &file.display().to_string()).unwrap()
}

/// With `NACELLE_WRITE_EXPECTED` in the environment the actual output becomes the expected output.
fn expect(file: &str, found: &str) {
    if std::env::var_os("NACELLE_WRITE_EXPECTED").is_some() {
        std::fs::write(directory().join(file), found).unwrap();
    }
    let expected = std::fs::read_to_string(directory().join(file)).unwrap_or_default();
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

/// Converts the documents. The result must be valid.
fn converted(documents: Vec<Value>) -> String {
    let mut catalogue = Catalogue::default();
    let mut text = String::new();
    let refused =
        |causes: Causes| causes.list().iter().map(|cause| format!("# refused: {cause}\n")).collect::<String>();
    for document in documents {
        if manifest::is_catalogue(&document) {
            if let Err(causes) = catalogue.add(document, "document") {
                return refused(causes);
            }
            continue;
        }
        match manifest::convert(&document, &catalogue, &Options::default()) {
            Ok(converted) => {
                converted.notes.iter().for_each(|note| writeln!(text, "# note: {note}").unwrap());
                let yaml = manifest::text(&converted.documents);
                let again = read::all(&yaml, "again").unwrap();
                assert_eq!(again, converted.documents);
                for verdict in manifest::validate(&again, &catalogue) {
                    assert!(verdict.machine && verdict.causes.is_empty(), "{verdict:?}");
                }
                text += &yaml;
            }
            Err(causes) => text += &refused(causes),
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
    expect("instance.converted", &converted(documents("instance")));
}

#[test]
fn a_machine_becomes_a_record_and_a_deployment() {
    expect("machine.converted", &converted(documents("machine")));
}

#[test]
fn a_replica_set_stays_one() {
    expect("replicas.converted", &converted(documents("replicas")));
}

#[test]
fn what_cannot_be_converted_is_refused_with_its_reasons() {
    expect("refused.converted", &converted(documents("refused")));
    expect("refused.checked", &checked(&manifest::validate(&documents("refused"), &Catalogue::default())));
}

#[test]
fn kubevirts_kinds_of_examples_are_converted_or_refused_with_their_reasons() {
    let mut names: Vec<PathBuf> = std::fs::read_dir(directory().join("examples"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "yaml"))
        .collect();
    names.sort();
    assert!(names.len() >= 30);
    for file in names {
        let expected = format!("examples/{}.converted", file.file_stem().unwrap().display());
        expect(&expected, &converted(of_file(&file)));
    }
}

#[test]
fn what_must_be_an_object_and_is_none_is_refused_by_its_field() {
    let run = json!({ "domain": { "memory": { "guest": "1Gi" } } });
    for kind in ["VirtualMachineInstance", "VirtualMachineInstanceReplicaSet", "VirtualMachine"] {
        let mut fields = vec!["metadata", "metadata.annotations", "metadata.labels", "spec"];
        let mut whole = json!({ "apiVersion": "kubevirt.io/v1", "kind": kind, "metadata": { "name": "a", "annotations": {} },
            "spec": { "template": { "metadata": {}, "spec": run } } });
        if kind == "VirtualMachineInstance" {
            whole["spec"] = run.clone();
        } else {
            let template = ["", ".metadata", ".metadata.annotations", ".metadata.labels", ".spec"];
            fields.extend(template.iter().map(|part| format!("spec.template{part}").leak() as &str));
        }
        for field in fields {
            for wrong in [json!(true), json!(1), json!("x"), json!([1])] {
                let mut document = whole.clone();
                let at = field.split('.').fold(&mut document, |value, key| &mut value[key]);
                *at = wrong.clone();
                let causes = manifest::convert(&document, &Catalogue::default(), &Options::default()).unwrap_err();
                assert!(causes.list().iter().any(|cause| cause.field == field), "{kind} {field} {wrong}: {causes}");
                assert!(!manifest::one(&document, &Catalogue::default()).causes.is_empty(), "{kind} {field} {wrong}");
            }
        }
    }
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
