//! Tests that versions are converted without loss in both directions, and that every stored version can be read.

use nacelle_vmi::schema;
use nacelle_vmi::spec::{InstanceSpec, VirtualMachine};
use nacelle_vmi::version::{self, Version, record, v1alpha1, written};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Returns a value that matches a schema; the bytes make the choices.
fn some(schema: &Value, bytes: &mut impl Iterator<Item = u8>) -> Value {
    let mut next = || bytes.next().unwrap_or(0);
    if schema.get(schema::EITHER).is_some() {
        return json!(["1Gi", "1500m", "7"][usize::from(next() % 3)]);
    }
    if let Some(words) = schema["enum"].as_array() {
        return words[usize::from(next()) % words.len()].clone();
    }
    match schema["type"].as_str().unwrap() {
        "boolean" => json!(next() % 2 == 1),
        "integer" => json!(next()),
        "string" => json!(["", "a", "b", "c", "/x"][usize::from(next() % 5)]),
        "array" => {
            let number = next() % 4;
            (0..number).map(|_| some(&schema["items"], bytes)).collect()
        }
        "object" => {
            let mut fields = Map::new();
            match schema["properties"].as_object() {
                Some(known) => {
                    for (key, of) in known {
                        // After the end of the bytes all optional fields are left out.
                        if !bytes.next().unwrap_or(0).is_multiple_of(3) {
                            fields.insert(key.clone(), some(of, bytes));
                        }
                    }
                }
                None if schema["additionalProperties"] == false => {}
                None => {
                    for key in 0..next() % 3 {
                        fields.insert(format!("k{key}"), some(&schema["additionalProperties"], bytes));
                    }
                }
            }
            Value::Object(fields)
        }
        other => panic!("{other}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_machine_survives_the_old_version(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
        let value = some(&schema::of::<VirtualMachine>(), &mut bytes.into_iter());
        let machine: VirtualMachine = serde_json::from_value(value).unwrap();
        for version in [Version::V1Alpha1, Version::V1] {
            let document = version::encode(&machine, version);
            prop_assert_eq!(version::decode(document), Ok(machine.clone()), "{:?}", version);
        }
    }

    #[test]
    fn an_old_machine_survives_the_new_version(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
        let mut value = some(&schema::of::<v1alpha1::VirtualMachine>(), &mut bytes.into_iter());
        value["apiVersion"] = json!("vm.nacelle.dev/v1alpha1");
        value["kind"] = json!("VirtualMachine");
        let machine = version::decode(value).unwrap();
        let old = version::encode(&machine, Version::V1Alpha1);
        let again = version::decode(version::encode(&version::decode(old.clone()).unwrap(), Version::V1)).unwrap();
        prop_assert!(old["metadata"]["annotations"].get(version::CARRIED).is_none());
        prop_assert_eq!(version::encode(&again, Version::V1Alpha1), old);
    }

    #[test]
    fn a_specification_in_annotations_survives_the_old_version(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
        let value = some(&schema::of::<InstanceSpec>(), &mut bytes.into_iter());
        let spec: InstanceSpec = serde_json::from_value(value).unwrap();
        let (old, carried) = version::instance_v1alpha1(&spec);
        let (tree, causes) = version::tree(old, Version::V1Alpha1, carried.as_deref());
        prop_assert!(causes.is_empty(), "{}", causes);
        prop_assert_eq!(Value::Object(tree.value), written(&spec));
    }

    #[test]
    fn shapes_that_are_right_are_read(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
        let value = some(&schema::of::<InstanceSpec>(), &mut bytes.into_iter());
        let text = value.to_string();
        prop_assert_eq!(&nacelle_vmi::read::one(&text, "x").unwrap(), &value);
        let (spec, causes) = version::typed::<InstanceSpec>(value, "spec");
        prop_assert!(causes.is_empty(), "{}", causes);
        prop_assert_eq!(version::typed::<InstanceSpec>(written(&spec), "spec").0, spec);
    }
}

#[test]
fn what_was_stored_is_read_for_ever() {
    let stored = [
        (
            r#"{"apiVersion":"vm.nacelle.dev/v1alpha1","kind":"VirtualMachine","metadata":{"name":"a"},"spec":{"running":true,"template":{"spec":{"domain":{"cpu":{"cores":2}},"volumes":[{"name":"root","registryDisk":{"image":"i"}}]}}}}"#,
            true,
        ),
        (
            r#"{"apiVersion":"vm.nacelle.dev/v1","kind":"VirtualMachine","metadata":{"name":"a"},"spec":{"runStrategy":"Always","template":{"spec":{"domain":{"cpu":{"cores":2}},"volumes":[{"name":"root","containerDisk":{"image":"i"}}]}}}}"#,
            false,
        ),
    ];
    let machines: Vec<VirtualMachine> = stored
        .into_iter()
        .map(|(text, old)| {
            let stored = record::read(text).unwrap();
            assert_eq!(stored.old, old);
            stored.machine
        })
        .collect();
    assert_eq!(machines[0], machines[1]);
    assert_eq!(
        serde_json::from_str::<Value>(&record::write(&machines[0])).unwrap(),
        serde_json::from_str::<Value>(stored[1].0).unwrap()
    );
}

#[test]
fn an_edit_of_the_old_document_is_kept() {
    let machine = json!({ "apiVersion": "vm.nacelle.dev/v1", "kind": "VirtualMachine", "metadata": { "name": "a" },
        "spec": { "runStrategy": "RerunOnFailure", "preference": { "name": "p" } } });
    let machine = version::decode(machine).unwrap();
    let mut old = version::encode(&machine, Version::V1Alpha1);
    assert_eq!(old["spec"]["running"], true);
    old["spec"]["running"] = json!(false);
    let new = version::encode(&version::decode(old).unwrap(), Version::V1);
    assert_eq!(new["spec"]["runStrategy"], "Halted");
    assert_eq!(new["spec"]["preference"]["name"], "p");
}

#[test]
fn unknown_versions_and_kinds_are_rejected_by_name() {
    let refused = |value: Value| version::decode(value).unwrap_err().to_string();
    assert_eq!(
        refused(json!({ "apiVersion": "vm.nacelle.dev/v2", "kind": "VirtualMachine" })),
        "apiVersion: Unsupported value: \"vm.nacelle.dev/v2\": supported values: \"vm.nacelle.dev/v1alpha1\", \"vm.nacelle.dev/v1\""
    );
    assert_eq!(
        refused(json!({ "apiVersion": "vm.nacelle.dev/v1", "kind": "Pod" })),
        "kind: Unsupported value: \"Pod\": supported values: \"VirtualMachine\""
    );
    let carried = json!({ "apiVersion": "vm.nacelle.dev/v1alpha1", "kind": "VirtualMachine",
        "metadata": { "annotations": { "vm.nacelle.dev/v1-fields": "[{at: [spec], is: {template: {spec: {colour: red}}}}]" } } });
    assert_eq!(refused(carried), "spec.template.spec.colour: Unknown field");
}
