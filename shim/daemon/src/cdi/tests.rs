//! Tests the lookup of CDI devices, with files that the Go library wrote.

use super::*;
use nacelle_model::device::{DeviceAttributes, DeviceFileKind};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A directory with these files; a text is written as it is, other values as JSON.
fn directory(files: &[(&str, Value)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
        fs::write(directory.path().join(name), text).unwrap();
    }
    directory
}

fn ask(names: &[&str], directories: &[&tempfile::TempDir]) -> Result<CdiEdits, CdiError> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    find_edits(&names, &directories.iter().map(|directory| directory.path().to_owned()).collect::<Vec<_>>())
}

fn spec(kind: &str, device: &str, edits: Value) -> Value {
    json!({ "cdiVersion": "1.1.0", "kind": kind, "devices": [{ "name": device, "containerEdits": edits }] })
}

fn node(host: &str, at: &str, permissions: &str) -> DeviceRequest {
    DeviceRequest {
        container_path: at.to_owned(),
        host_path: host.to_owned(),
        permissions: permissions.to_owned(),
        attributes: without_mode(),
    }
}

/// The attributes of a node without any.
fn without_mode() -> DeviceAttributes {
    DeviceAttributes { mode: Some(0o666), ..Default::default() }
}

/// Files that the Go library wrote (tests/cdi/generate.go).
fn of_library(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cdi").join(name);
    Value::String(fs::read_to_string(path).unwrap())
}

#[test]
fn files_that_are_no_specifications_do_not_hide_one() {
    let many: Vec<(String, Value)> = (0..300).map(|n| (format!("a{n}.json"), Value::String("{".to_owned()))).collect();
    let mut files: Vec<(&str, Value)> = many.iter().map(|(name, text)| (name.as_str(), text.clone())).collect();
    files.push(("gpu.yaml", of_library("gpu.yaml")));
    let directory = directory(&files);
    assert!(ask(&["vendor.com/gpu=0"], &[&directory]).is_ok());
}

#[test]
fn files_of_the_go_library_are_read_in_both_formats() {
    for name in ["gpu.yaml", "gpu.json"] {
        let directory = directory(&[(name, of_library(name))]);
        let edits = ask(&["vendor.com/gpu=0", "vendor.com/gpu=all"], &[&directory]).unwrap();
        let attributes = DeviceAttributes { mode: Some(0o640), uid: Some(1000), gid: Some(44), ..Default::default() };
        let control = DeviceRequest { attributes, ..node("/dev/zero", "/dev/gpuctl", "rw") };
        let numbers =
            DeviceAttributes { kind: Some(DeviceFileKind::Character), number: Some((1, 5)), ..without_mode() };
        let closed = DeviceRequest { attributes: numbers, ..node("/dev/gpu-caps", "/dev/gpu-caps", "") };
        let fifo = DeviceAttributes { kind: Some(DeviceFileKind::Fifo), ..without_mode() };
        let pipe = DeviceRequest { attributes: fifo, ..node("/dev/gpu-events", "/dev/gpu-events", "rwm") };
        let first = node("/dev/null", "/dev/gpu0", "rwm");
        assert_eq!(
            edits.devices,
            [control, closed, pipe, first.clone(), first, node("/dev/full", "/dev/gpu1", "rwm")],
            "{name}"
        );
        let env = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let note = "yes: \"quoted\" # and more";
        assert_eq!(edits.env, [env("GPU_MODE", "a=b"), env("GPU_NOTE", note), env("GPU_EMPTY", "")]);
        let mount = CdiMount {
            host_path: "/usr/lib/libgpu.so.1".into(),
            container_path: "/usr/lib/libgpu.so.1".into(),
            options: ["ro", "nosuid", "nodev"].map(str::to_owned).into(),
            propagation: Propagation::Private,
        };
        assert_eq!((edits.mounts, edits.groups), (vec![mount], vec![44]));
        for (device, words) in [
            ("hooked", "the createContainer hook \"/usr/bin/gpu-hook\""),
            ("cache", "intelRdt"),
            ("nic", "the network interface \"eth7\" of the node (netDevices)"),
            ("memory", "a mount of type \"tmpfs\" at \"/gpu\""),
        ] {
            let error = ask(&[&format!("vendor.com/gpu={device}")], &[&directory]).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Unsupported, "{error}");
            assert!(error.to_string().contains(words) && error.to_string().contains(name), "{error}");
        }
    }
}

#[test]
fn devices_bring_what_their_specification_says() {
    let mut whole = spec(
        "vendor.com/gpu",
        "0",
        json!({
            "deviceNodes": [{ "path": "/dev/gpu0", "hostPath": "/dev/zero", "permissions": "rw", "type": "u" },
                            { "path": "/dev/null" }],
            "mounts": [{ "hostPath": "/lib/gpu", "containerPath": "/gpu", "options": ["ro", "rbind", "nosuid", "rslave"] },
                       { "hostPath": "/run", "containerPath": "/run", "options": ["rw", "shared"] }],
            "additionalGids": [44],
            "hooks": [],
            "netDevices": null,
        }),
    );
    whole["containerEdits"] = json!({ "env": ["GPU=a=b"] });
    whole["devices"].as_array_mut().unwrap().push(json!({ "name": "1" }));
    let directory = directory(&[("gpu.json", whole), ("notes.txt", json!("x"))]);
    let edits = ask(&["vendor.com/gpu=0", "vendor.com/gpu=1", "vendor.com/gpu=0"], &[&directory]).unwrap();
    let unbuffered = DeviceAttributes { kind: Some(DeviceFileKind::Character), ..without_mode() };
    let zero = DeviceRequest { attributes: unbuffered, ..node("/dev/zero", "/dev/gpu0", "rw") };
    let mount = |host: &str, at: &str, options: &[&str], propagation| CdiMount {
        host_path: host.into(),
        container_path: at.into(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        propagation,
    };
    assert_eq!(
        edits,
        CdiEdits {
            env: vec![("GPU".into(), "a=b".into())],
            devices: vec![zero, node("/dev/null", "/dev/null", "rwm")],
            mounts: vec![
                mount("/lib/gpu", "/gpu", &["ro", "nosuid"], Propagation::FromNode),
                mount("/run", "/run", &[], Propagation::BothWays),
            ],
            groups: vec![44],
        }
    );
    assert_eq!(ask(&[], &[&directory]).unwrap(), CdiEdits::default());
}

#[test]
fn yaml_that_people_write_is_read() {
    let text = "# a comment\ncdiVersion: v0.5.0\nkind: vendor.com/gpu\ndevices:\n- name: 0\n  containerEdits:\n    \
                deviceNodes: [{path: /dev/a, fileMode: 0660, permissions: r}, {path: /dev/b, fileMode: 432}]\n    env: ~\n";
    let directory = directory(&[("gpu.yaml", json!(text))]);
    let edits = ask(&["vendor.com/gpu=0"], &[&directory]).unwrap();
    assert_eq!(edits.devices.iter().map(|node| node.attributes.mode).collect::<Vec<_>>(), [Some(0o660); 2]);
}

#[test]
fn later_directories_go_before_and_a_name_has_one_meaning() {
    let env = |value: &str| spec("v/c", "d", json!({ "env": [format!("A={value}")] }));
    let yaml = |value: &str| {
        json!(format!("cdiVersion: 0.5.0\nkind: v/c\ndevices: [{{name: d, containerEdits: {{env: [A={value}]}}}}]\n"))
    };
    let (first, second) = (directory(&[("a.json", env("first"))]), directory(&[("b.yaml", yaml("second"))]));
    assert_eq!(ask(&["v/c=d"], &[&first, &second]).unwrap().env[0].1, "second");
    assert_eq!(ask(&["v/c=d"], &[&second, &first]).unwrap().env[0].1, "first");
    let both = directory(&[("a.json", env("1")), ("a.yaml", yaml("2"))]);
    let error = ask(&["v/c=d"], &[&first, &both]).unwrap_err();
    assert!(matches!(error, CdiError::Ambiguous { .. }), "{error}");
    assert!(["a.json", "a.yaml"].iter().all(|file| error.to_string().contains(file)), "{error}");
    // A directory that takes precedence decides.
    assert_eq!(ask(&["v/c=d"], &[&both, &first]).unwrap().env[0].1, "first");
}

#[test]
fn what_cannot_be_had_is_refused_by_name() {
    let owned = |fields: Value| spec("v/o", "owned", json!({ "deviceNodes": [fields] }));
    let environment = spec("v/e", "bad", json!({ "env": ["A"] }));
    let directory = directory(&[
        ("env.json", environment),
        ("broken.json", json!("x")),
        ("other.yml", json!({})),
        ("twin.yaml", json!("a: 1\na: 2")),
    ]);
    std::os::unix::fs::symlink("/dev/zero", directory.path().join("endless.json")).unwrap();
    let words = [
        "v/c=none",
        "broken.json",
        "endless.json: not a regular file",
        "other.yml: only .json and .yaml",
        "twin.yaml: line",
    ];
    for (name, words) in [("v/e=bad", &["\"A\" is not NAME=VALUE"][..]), ("v/c=none", &words)] {
        let error = ask(&[name], &[&directory]).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    }
    for (fields, words) in [
        (json!({ "path": "/dev/a", "type": "x" }), "type \"x\""),
        (json!({ "path": "/dev/a", "major": -1 }), "number -1:0"),
        (json!({ "path": "/dev/a", "major": 1, "minor": 1 << 20 }), "number 1:1048576"),
    ] {
        fs::write(directory.path().join("owned.json"), owned(fields).to_string()).unwrap();
        let error = ask(&["v/o=owned"], &[&directory]).unwrap_err();
        assert!(matches!(error, CdiError::Rule { .. }) && error.to_string().contains(words), "{error}");
    }
    for name in ["", "v", "v/c", "v=d", "/c=d", "v/=d", "v/c=", "v/c=d d", "../c=d", "v/c=d\n", "v/-c=d"] {
        assert!(matches!(ask(&[name], &[&directory]), Err(CdiError::Name { .. })), "{name:?}");
    }
    assert!(matches!(ask(&["v/c=d"; MAX_NAMES + 1], &[&directory]), Err(CdiError::TooMany { .. })));
}

/// Returns why a file is skipped.
fn skipped_because(name: &str, content: Value) -> String {
    let directory = directory(&[(name, content)]);
    match ask(&["v/c=none"], &[&directory]).unwrap_err() {
        CdiError::Unknown { skipped_files, .. } => skipped_files.concat(),
        other => panic!("{other}"),
    }
}

#[test]
fn versions_are_those_that_were_released() {
    let stated = |version: &str| json!({ "cdiVersion": version, "kind": "v/c", "devices": [{ "name": "d" }] });
    for version in ["0.3.0", "v0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "v1.1.0"] {
        assert_eq!(skipped_because("a.json", stated(version)), "", "{version}");
    }
    for version in ["0.2.0", "1.2.0", "0.5", "", "x"] {
        let why = skipped_because("a.json", stated(version));
        assert!(why.contains(&format!("cdiVersion is {version:?}: 0.3.0 to 1.1.0 are read")), "{why}");
    }
}

#[test]
fn a_file_has_only_what_its_version_has() {
    let edits = |edits: Value| spec("v/c", "d", edits);
    let mut annotated = edits(json!({}));
    annotated["annotations"] = json!({ "a": "b" });
    for (mut content, before, since, words) in [
        (
            edits(json!({ "mounts": [{ "hostPath": "/", "containerPath": "/", "type": "bind" }] })),
            "0.3.0",
            "0.4.0",
            "type of mounts",
        ),
        (edits(json!({ "deviceNodes": [{ "path": "/a", "hostPath": "/b" }] })), "0.4.0", "0.5.0", "hostPath"),
        (spec("v/c", "0", json!({})), "0.4.0", "0.5.0", "begins with a digit"),
        (spec("v/c.d", "d", json!({})), "0.5.0", "0.6.0", "a dot"),
        (annotated, "0.5.0", "0.6.0", "annotations"),
        (edits(json!({ "additionalGids": [0] })), "0.6.0", "0.7.0", "additionalGids"),
        (edits(json!({ "intelRdt": { "enableCMT": true } })), "0.6.0", "0.7.0", "intelRdt"),
        (edits(json!({ "intelRdt": { "schemata": [] } })), "1.0.0", "1.1.0", "schemata"),
        (edits(json!({ "netDevices": [{ "hostInterfaceName": "a", "name": "b" }] })), "1.0.0", "1.1.0", "netDevices"),
    ] {
        content["cdiVersion"] = json!(before);
        let why = skipped_because("a.json", content.clone());
        assert!(why.contains(words) && why.contains(&format!("needs {since}")), "{why}");
        content["cdiVersion"] = json!(since);
        assert_eq!(skipped_because("a.json", content), "");
    }
}

#[test]
fn files_that_the_format_does_not_have_are_skipped() {
    let head = "cdiVersion: 0.5.0\nkind: v/c\n";
    let yaml = |rest: &str| skipped_because("a.yaml", json!(format!("{head}{rest}")));
    for (rest, words) in [
        ("devices: [{name: d, hook: 1}]", "unknown field `hook`"),
        ("devices: [{name: d, containerEdits: {deviceNodes: [{path: /a, mode: 1}]}}]", "unknown field `mode`"),
        ("devices: [{name: d d}]", "\"d d\""),
        ("devices: []", "it has no devices"),
        (
            "devices: [{name: d, containerEdits: &a {}}, {name: e, containerEdits: *a}]",
            "anchors and aliases are not read",
        ),
        ("devices: [{<<: {name: d}}]", "merge"),
        ("devices: [{name: d}]\n---\na: 1", "document"),
        ("devices: [{name: d, name: e}]", "line 3"),
        (
            &format!("devices: [{{name: d}}]\ncontainerEdits:\n  intelRdt:\n    a:\n      {}", "- ".repeat(60)),
            "nested deeper than 32",
        ),
        (&format!("devices: {}", "[".repeat(100)), "recursion limit"),
        (
            &format!("devices: [{{name: d, containerEdits: {{env: [{}]}}}}]", "A,".repeat(100_001)),
            "more than 100000 values",
        ),
        (&format!("# {}", "x".repeat(spec::MAX_FILE)), "more than 1048576 bytes"),
    ] {
        let why = yaml(rest);
        assert!(why.contains(words) && !why.contains('\n') && why.len() < 400, "{why}");
    }
    // YAML allows a key of a mapping 1,024 characters.
    let long = "k".repeat(1000);
    let mut with_long_key = spec("v/c", "d", json!({}));
    with_long_key[long.as_str()] = json!(1);
    for (file, content) in [
        ("a.json", with_long_key),
        ("a.yaml", json!(format!("{head}{long}: 1\n"))),
        ("a.yaml", json!(format!("{head}{long}: 1\n{long}: 1\n"))),
    ] {
        let why = skipped_because(file, content);
        assert!(why.contains("line ") && why.contains("kkkk") && why.len() < 400, "{why}");
    }
    let why = skipped_because("a.json", json!({ "cdiVersion": "0.5.0", "kind": "v", "devices": [] }));
    assert!(why.contains("kind is \"v\""), "{why}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_file_is_a_danger(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        text in "[-a-d0-9:,{}\\[\\]&*<>|!'\"#%@` \n\t?~.]{0,200}",
        name in ".{0,40}",
    ) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a.json"), &bytes).unwrap();
        fs::write(directory.path().join("b.yaml"), &bytes).unwrap();
        fs::write(directory.path().join("c.yaml"), format!("cdiVersion: 0.5.0\nkind: v/c\ndevices: {text}")).unwrap();
        let _ = ask(&[&name, "v/c=d"], &[&directory]);
        prop_assert!(ask(&["v/c=e"], &[&directory]).is_err());
    }

    #[test]
    fn both_formats_mean_the_same(
        names in proptest::collection::btree_set("[a-z]([a-z0-9_.:-]{0,8}[a-z0-9])?", 1..4),
        env in proptest::collection::vec("[A-Z]{1,4}=[ -~éλ]{0,12}", 0..4),
        (mode, uid, major) in (any::<Option<u32>>(), any::<Option<u32>>(), 0..4096_i64),
        groups in proptest::collection::vec(any::<u32>(), 0..3),
    ) {
        let nodes = json!([{ "path": "/dev/a", "type": "c", "major": major, "minor": 3, "fileMode": mode, "uid": uid }]);
        let edits = json!({ "env": env, "deviceNodes": nodes, "additionalGids": groups });
        let devices: Vec<Value> = names.iter().map(|name| json!({ "name": name, "containerEdits": edits })).collect();
        let spec = json!({ "cdiVersion": "1.1.0", "kind": "v/c", "devices": devices });
        let of_json = find_edits_in(spec.to_string().as_bytes(), SpecFormat::Json).unwrap().unwrap();
        let yaml = serde_saphyr::to_string(&spec).unwrap();
        prop_assert_eq!(find_edits_in(yaml.as_bytes(), SpecFormat::Yaml).unwrap().unwrap(), of_json, "{}", yaml);
    }
}
