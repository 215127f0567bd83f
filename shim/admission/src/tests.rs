//! Tests the responses to reviews.

use super::Policy;
use super::review::{AdmissionResponse, Review};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_vmi::{Causes, read};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Returns a review of an object, which is a pod unless it has a kind.
fn review(operation: &str, object: Value, old: Value) -> Review {
    let some = |text: &Value, or: &str| text.as_str().unwrap_or(or).to_owned();
    let api_version = some(&object["apiVersion"], "v1");
    let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
    let body = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u",
            "kind": { "group": group, "version": version, "kind": some(&object["kind"], "Pod") },
            "operation": operation,
            "name": some(&object["metadata"]["name"], ""),
            "namespace": "default",
            "object": object,
            "oldObject": old,
            "dryRun": false,
        },
    });
    Review::read(body.to_string().as_bytes()).unwrap()
}

fn pod(annotations: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p", "annotations": annotations }, "spec": { "containers": [] } })
}

fn created(annotations: Value) -> AdmissionResponse {
    Policy::default().validate(&review("CREATE", pod(annotations), Value::Null))
}

fn allowed() -> AdmissionResponse {
    AdmissionResponse::Allowed { warnings: Vec::new() }
}

fn denied(answer: AdmissionResponse) -> Causes {
    match answer {
        AdmissionResponse::Denied(causes) => causes,
        other => panic!("{other:?}"),
    }
}

fn warned(answer: AdmissionResponse) -> Vec<String> {
    match answer {
        AdmissionResponse::Allowed { warnings } => warnings,
        other => panic!("{other:?}"),
    }
}

#[test]
fn objects_without_vm_settings_are_not_checked() {
    assert_eq!(created(json!({})), allowed());
    assert_eq!(created(Value::Null), allowed());
    assert_eq!(created(json!({ "example.com/a": "b" })), allowed());
    let bad = json!({ "vm.nacelle.dev/cpus": "none" });
    for (kind, api_version) in [("Service", "v1"), ("Pod", "example.com/v1"), ("VirtualMachine", "example.com/v1")] {
        let mut object = pod(bad.clone());
        object["kind"] = json!(kind);
        object["apiVersion"] = json!(api_version);
        assert_eq!(Policy::default().validate(&review("CREATE", object, Value::Null)), allowed());
    }
    for operation in ["DELETE", "CONNECT"] {
        assert_eq!(Policy::default().validate(&review(operation, Value::Null, pod(bad.clone()))), allowed());
    }
    let status = Review { subresource: "status".into(), ..review("UPDATE", pod(bad), Value::Null) };
    assert_eq!(Policy::default().validate(&status), allowed());
}

#[test]
fn all_causes_are_reported_in_the_format_of_kubernetes() {
    let answer = created(json!({ "vm.nacelle.dev/cpus": "0", "vm.nacelle.dev/colour": "red" }));
    let response = review("CREATE", pod(json!({})), Value::Null).encode_response(&answer);
    let response: Value = serde_json::from_slice(&response).unwrap();
    assert_eq!(
        response,
        json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": {
                "uid": "u",
                "allowed": false,
                "status": {
                    "status": "Failure",
                    "code": 422,
                    "reason": "Invalid",
                    "message": "Pod \"p\" is invalid: metadata.annotations[vm.nacelle.dev/colour]: Unknown field: Nacelle has no such \
                        annotation (fields without one are set in vm.nacelle.dev/spec); spec.domain.cpu.cores: Invalid value: 0: must be at \
                        least 1 (from vm.nacelle.dev/cpus)",
                    "details": {
                        "name": "p",
                        "group": "",
                        "kind": "Pod",
                        "causes": [
                            {
                                "reason": "FieldUnknown",
                                "field": "metadata.annotations[vm.nacelle.dev/colour]",
                                "message": "Unknown field: Nacelle has no such annotation (fields without one are set in vm.nacelle.dev/spec)",
                            },
                            {
                                "reason": "FieldValueInvalid",
                                "field": "spec.domain.cpu.cores",
                                "message": "Invalid value: 0: must be at least 1 (from vm.nacelle.dev/cpus)",
                            },
                        ],
                    },
                },
            },
        })
    );
}

#[test]
fn templates_and_vms_are_checked_too() {
    let template = json!({ "metadata": { "annotations": { "vm.nacelle.dev/cpus": "0" } }, "spec": { "runtimeClassName": "slow" } });
    let deployment = json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "d" }, "spec": { "template": template } });
    let cron = json!({ "apiVersion": "batch/v1", "kind": "CronJob", "metadata": { "name": "c" },
        "spec": { "jobTemplate": { "spec": { "template": template } } } });
    let other = Policy { runtime_classes: ["fast".to_owned()].into(), ..Policy::default() };
    let this = Policy { runtime_classes: ["fast".to_owned(), "slow".to_owned()].into(), ..Policy::default() };
    for object in [deployment, cron] {
        let review = review("CREATE", object, Value::Null);
        for policy in [Policy::default(), this.clone()] {
            let causes = denied(policy.validate(&review));
            assert_eq!(
                causes.to_string(),
                "spec.domain.cpu.cores: Invalid value: 0: must be at least 1 (from vm.nacelle.dev/cpus)"
            );
        }
        assert_eq!(other.validate(&review), allowed());
    }
    let machine = json!({ "apiVersion": "vm.nacelle.dev/v1", "kind": "VirtualMachine",
        "metadata": { "name": "m", "uid": "x", "generation": 1, "managedFields": [ { "a": "b" } ] },
        "spec": { "runStrategy": "Sometimes", "template": { "spec": {
            "domain": { "memory": { "guest": "1Gi" }, "devices": { "disks": [ { "name": "a" } ] } },
            "volumes": [ { "name": "a", "containerDisk": { "image": "i" } } ] } } } });
    let causes = denied(other.validate(&review("CREATE", machine.clone(), Value::Null)));
    assert_eq!(causes.list().iter().map(|cause| cause.field.as_str()).collect::<Vec<_>>(), ["spec.runStrategy"]);
    let mut right = machine;
    right["spec"]["runStrategy"] = json!("Always");
    assert_eq!(other.validate(&review("CREATE", right.clone(), Value::Null)), allowed());
    right["apiVersion"] = json!("kubevirt.io/v1");
    assert_eq!(other.validate(&review("CREATE", right, Value::Null)), allowed());
}

#[test]
fn pods_without_a_runtime_class_have_the_empty_name() {
    let review = review("CREATE", pod(json!({ "vm.nacelle.dev/cpus": "0" })), Value::Null);
    let policy = |name: &str| Policy { runtime_classes: [name.to_owned()].into(), ..Policy::default() };
    assert_eq!(policy("nacelle").validate(&review), allowed());
    denied(policy("").validate(&review));
}

#[test]
fn an_object_that_was_invalid_before_can_be_relabelled_and_deleted() {
    let bad = pod(json!({ "vm.nacelle.dev/cpus": "0" }));
    let mut labelled = bad.clone();
    labelled["metadata"]["labels"] = json!({ "a": "b" });
    let warnings = warned(Policy::default().validate(&review("UPDATE", labelled, bad.clone())));
    assert_eq!(
        warnings,
        [
            "the object was invalid before and will not run: spec.domain.cpu.cores: Invalid value: 0: must be at least 1 (from vm.nacelle.dev/cpus)"
        ]
    );
    let good = pod(json!({ "vm.nacelle.dev/cpus": "1" }));
    denied(Policy::default().validate(&review("UPDATE", bad.clone(), good.clone())));
    let mut going = bad.clone();
    going["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    warned(Policy::default().validate(&review("UPDATE", going, good.clone())));
    let warnings = warned(Policy::default().validate(&review("UPDATE", good.clone(), bad)));
    assert_eq!(warnings, ["vm.nacelle.dev/...: annotations do not change the VM of an existing pod"]);
    assert_eq!(Policy::default().validate(&review("UPDATE", good.clone(), good)), allowed());
}

#[test]
fn unsupported_fields_cause_a_warning() {
    let kernel =
        json!({ "vm.nacelle.dev/kernel-image": "a:1", "vm.nacelle.dev/kernel": "/k", "vm.nacelle.dev/initrd": "/i" });
    let warnings = warned(created(kernel));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        warnings,
        [format!(
            "spec.domain.firmware.kernelBoot.container.initrdPath (from vm.nacelle.dev/initrd) is not run by nodes with Nacelle {version}: they \
             refuse the pod; the initramfs is Nacelle's, because it contains the agent"
        )]
    );
    let machine = json!({ "vm.nacelle.dev/kind": "machine", "vm.nacelle.dev/memory": "1Gi", "vm.nacelle.dev/disks": "a=image:i",
        "vm.nacelle.dev/spec": "domain: {cpu: {maxSockets: 2}}" });
    let warnings = warned(created(machine));
    assert_eq!(
        warnings,
        [format!("spec.domain.cpu.maxSockets is not run by nodes with Nacelle {version}: they refuse the pod")]
    );
}

fn with_catalogue() -> Policy {
    let mut policy = Policy::default();
    let text =
        "kind: VirtualMachineInstancetype\nmetadata: {name: ours}\nspec: {cpu: {guest: 3}, memory: {guest: 3Gi}}";
    policy.catalogue.add(read::one(text, "x").unwrap(), "x").unwrap();
    policy
}

/// Applies a patch of annotations.
fn patched(object: &Value, patch: &Value) -> Value {
    let mut object = object.clone();
    for step in patch.as_array().unwrap() {
        let path = step["path"].as_str().unwrap().strip_prefix("/metadata/annotations/").unwrap();
        let key = path.replace("~1", "/").replace("~0", "~");
        let annotations = object["metadata"]["annotations"].as_object_mut().unwrap();
        let before = match step["op"].as_str().unwrap() {
            "remove" => annotations.remove(&key),
            _ => annotations.insert(key, step["value"].clone()),
        };
        assert_eq!(before.is_some(), step["op"] != "add", "{step}");
    }
    object
}

#[test]
fn names_of_the_catalogue_are_written_out_for_nodes() {
    let policy = with_catalogue();
    let object = pod(json!({ "a~b/c": "d", "vm.nacelle.dev/instancetype": "ours" }));
    let request = review("CREATE", object.clone(), Value::Null);
    assert_eq!(
        warned(policy.validate(&request)),
        ["instance type ours is not known to nodes: have /mutate asked before, too"]
    );
    let AdmissionResponse::Patched(patch) = policy.mutate(&request) else { panic!("no patch") };
    assert_eq!(
        patch,
        json!([
            { "op": "remove", "path": "/metadata/annotations/vm.nacelle.dev~1instancetype" },
            { "op": "add", "path": "/metadata/annotations/vm.nacelle.dev~1applied", "value": "{\"fields\":{\"spec.domain.cpu.sockets\":\
                \"instance type ours\",\"spec.domain.memory.guest\":\"instance type ours\"},\"instancetype\":\"ours\"}" },
            { "op": "add", "path": "/metadata/annotations/vm.nacelle.dev~1spec",
                "value": "{\"domain\":{\"cpu\":{\"sockets\":3},\"memory\":{\"guest\":\"3Gi\"}}}" },
        ])
    );
    let response: Value =
        serde_json::from_slice(&request.encode_response(&AdmissionResponse::Patched(patch.clone()))).unwrap();
    assert_eq!(response["response"]["patchType"], "JSONPatch");
    let sent = STANDARD.decode(response["response"]["patch"].as_str().unwrap()).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&sent).unwrap(), patch);
    // A second application changes nothing, and a server without this catalogue accepts the result.
    let again = review("CREATE", patched(&object, &patch), Value::Null);
    assert_eq!(policy.mutate(&again), allowed());
    assert_eq!(Policy::default().validate(&again), allowed());
    // Existing pods, templates and invalid objects are not changed.
    assert_eq!(policy.mutate(&Review { operation: "UPDATE".into(), ..request.clone() }), allowed());
    assert_eq!(policy.mutate(&Review { kind: "Deployment".into(), group: "apps".into(), ..request }), allowed());
    let wrong = pod(json!({ "vm.nacelle.dev/instancetype": "ours", "vm.nacelle.dev/cpus": "2" }));
    assert_eq!(policy.mutate(&review("CREATE", wrong, Value::Null)), allowed());
}

#[test]
fn defaults_are_written_on_demand() {
    let policy = Policy { defaults: true, ..Policy::default() };
    assert_eq!(policy.mutate(&review("CREATE", pod(json!({ "vm.nacelle.dev/cpus": "2" })), Value::Null)), allowed());
    let machine = pod(
        json!({ "vm.nacelle.dev/kind": "machine", "vm.nacelle.dev/memory": "1Gi", "vm.nacelle.dev/disks": "a=image:i" }),
    );
    assert_eq!(Policy::default().mutate(&review("CREATE", machine.clone(), Value::Null)), allowed());
    let AdmissionResponse::Patched(patch) = policy.mutate(&review("CREATE", machine.clone(), Value::Null)) else {
        panic!("no patch")
    };
    let machine = patched(&machine, &patch);
    assert_eq!(machine["metadata"]["annotations"]["vm.nacelle.dev/run-strategy"], "Always");
    assert_eq!(policy.mutate(&review("CREATE", machine.clone(), Value::Null)), allowed());
    assert_eq!(policy.validate(&review("CREATE", machine, Value::Null)), allowed());
}

#[test]
fn an_invalid_review_is_rejected_with_its_reason() {
    let right = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": { "uid": "u", "operation": "CREATE", "kind": { "group": "", "version": "v1", "kind": "Pod" }, "object": {} } });
    assert!(Review::read(right.to_string().as_bytes()).is_ok());
    let mut wrong = Vec::new();
    for (pointer, value) in [
        ("/apiVersion", json!("admission.k8s.io/v1beta1")),
        ("/kind", json!("Pod")),
        ("/request", json!(null)),
        ("/request/uid", json!("")),
        ("/request/uid", json!("x".repeat(257))),
        ("/request/uid", json!(7)),
        ("/request/operation", json!("PATCH")),
        ("/request/kind", json!({})),
        ("/request/object", json!([])),
    ] {
        let mut body = right.clone();
        *body.pointer_mut(pointer).unwrap() = value;
        wrong.push(Review::read(body.to_string().as_bytes()).unwrap_err().to_string());
    }
    assert_eq!(
        wrong,
        [
            "the body is \"AdmissionReview\" of \"admission.k8s.io/v1beta1\"; AdmissionReview of admission.k8s.io/v1 is expected",
            "the body is \"Pod\" of \"admission.k8s.io/v1\"; AdmissionReview of admission.k8s.io/v1 is expected",
            "request must be an object",
            "request.uid must be a string of 1 to 256 bytes",
            "request.uid must be a string of 1 to 256 bytes",
            "request.uid must be a string",
            "request.operation must be CREATE, UPDATE, DELETE or CONNECT",
            "request.kind.kind must be a string",
            "request.object must be an object or null",
        ]
    );
    for body in ["", "[]", "null", "\"AdmissionReview\"", "{"] {
        assert!(Review::read(body.as_bytes()).is_err());
    }
}

/// Arbitrary JSON, from words with a meaning in this crate.
fn anything() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "apiVersion",
        "kind",
        "metadata",
        "annotations",
        "spec",
        "template",
        "jobTemplate",
        "name",
        "vm.nacelle.dev/spec",
        "vm.nacelle.dev/kind",
        "vm.nacelle.dev/disks",
        "vm.nacelle.dev/instancetype",
        "vm.nacelle.dev/applied",
        "machine",
        "u1.small",
        "{domain: {cpu: {cores: 2}}}",
        "a=image:b",
        "domain",
        "running",
        "Pod",
        "runtimeClassName",
        "deletionTimestamp",
        "\u{7f}\n",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word.clone().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 64, 8, move |inner| {
        let key = prop_oneof![4 => word.clone().prop_map(str::to_owned), 1 => any::<String>()];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..6).prop_map(|pairs| pairs.into_iter().collect()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_objects_cause_no_panic(
        object in anything(),
        old in anything(),
        kind in prop::sample::select(vec!["Pod", "Deployment", "CronJob", "VirtualMachine", "VirtualMachineInstanceReplicaSet", "X"]),
        group in prop::sample::select(vec!["", "apps", "vm.nacelle.dev", "kubevirt.io"]),
        operation in prop::sample::select(vec!["CREATE", "UPDATE"]),
        defaults: bool,
    ) {
        let body = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "u", "operation": operation, "kind": { "group": group, "version": "v1", "kind": kind },
            "object": object, "oldObject": old } });
        if let Ok(review) = Review::read(body.to_string().as_bytes()) {
            let policy = Policy { defaults, ..Policy::default() };
            for answer in [policy.validate(&review), policy.mutate(&review)] {
                let response: Value = serde_json::from_slice(&review.encode_response(&answer)).unwrap();
                prop_assert_eq!(&response["response"]["uid"], "u");
                prop_assert_eq!(response["response"]["allowed"].as_bool(), Some(!matches!(answer, AdmissionResponse::Denied(_))));
            }
        }
    }

    #[test]
    fn arbitrary_bodies_cause_no_panic(body in prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        anything().prop_map(|value| value.to_string().into_bytes()),
        anything().prop_map(|value| json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": value })
            .to_string().into_bytes()),
    ]) {
        let _ = Review::read(&body);
    }
}
