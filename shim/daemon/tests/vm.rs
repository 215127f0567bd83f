//! Tests `nacelle vm` as a user calls it: its output and its exit code.

use serde_json::Value;
use std::io::Write;
use std::process::{Command, Output, Stdio};

const WRONG: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  name: wrong
  annotations:
    vm.nacelle.dev/kind: machine
    vm.nacelle.dev/spec: |
      domain:
        cpu: { cores: 0 }
        memory: { guest: 1Gi }
        devices: { disks: [ { name: root, disk: { bus: floppy } }, { name: root } ] }
      volumes: [ { name: root, containerDisk: { image: debian } } ]
"#;
const MACHINE: &str = r#"
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: { name: web }
spec:
  domain: { memory: { guest: 1Gi }, devices: { disks: [ { name: root } ] } }
  volumes: [ { name: root, containerDisk: { image: debian } } ]
"#;

const SIZED: &str = r#"
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: { name: mine }
spec: { cpu: { guest: 1 }, memory: { guest: 1Gi } }
---
apiVersion: v1
kind: Pod
metadata:
  name: sized
  annotations: { vm.nacelle.dev/kind: machine, vm.nacelle.dev/instancetype: mine, vm.nacelle.dev/disks: "root=image:debian" }
"#;

fn vm(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nacelle"));
    command.arg("vm").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The process may end without reading its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn validate_names_everything_that_is_wrong_at_once() {
    let output = vm(&["validate", "-"], WRONG);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stdout),
        "-: Pod wrong: spec.domain.devices.disks[0].disk.bus: Unsupported value: \"floppy\": supported values: \"virtio\", \
         \"sata\", \"scsi\", \"usb\"\n\
         -: Pod wrong: spec.domain.cpu.cores: Invalid value: 0: must be at least 1\n\
         -: Pod wrong: spec.domain.devices.disks[1].name: Duplicate value: \"root\": spec.domain.devices.disks[0] has this name\n"
    );
    let output = vm(&["validate", "--output", "json", "-"], WRONG);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report[0]["valid"], false);
    let fields: Vec<&str> =
        report[0]["causes"].as_array().unwrap().iter().filter_map(|cause| cause["field"].as_str()).collect();
    assert_eq!(
        fields,
        ["spec.domain.devices.disks[0].disk.bus", "spec.domain.cpu.cores", "spec.domain.devices.disks[1].name"]
    );
    assert_eq!(report[0]["causes"][1]["reason"], "FieldValueInvalid");
    assert_eq!(report[0]["causes"][1]["rule"], "cpu-part-zero");

    let output = vm(&["validate", "-"], MACHINE);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "-: VirtualMachineInstance web: valid\n"));
}

#[test]
fn validate_warns_of_valid_fields_that_nodes_reject() {
    let machine = MACHINE.replace("memory: { guest: 1Gi }", "memory: { guest: 1Gi }, clock: { timezone: Europe/Rome }");
    for input in [machine.clone(), text(&vm(&["convert", "-"], &machine).stdout).to_owned()] {
        let output = vm(&["validate", "-"], &input);
        let report = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{report}");
        let warning = format!(
            " web: warning: spec.domain.clock.timezone is not run by nodes with Nacelle {}: they refuse the pod\n",
            env!("CARGO_PKG_VERSION")
        );
        assert!(report.contains(" web: valid\n") && report.ends_with(&warning), "{report}");
        let report: Value = serde_json::from_slice(&vm(&["validate", "-o", "json", "-"], &input).stdout).unwrap();
        assert_eq!(report[0]["valid"], true);
        assert_eq!(report[0]["warnings"][0]["what"], "spec.domain.clock.timezone");
    }
    let report = vm(&["validate", "-"], SIZED);
    let warning = "-: Pod sized: warning: instance type mine is not known to nodes: have /mutate asked before, too\n";
    assert!(text(&report.stdout).ends_with(warning), "{report:?}");
}

#[test]
fn what_cannot_be_read_is_an_error() {
    for (arguments, input, report) in [
        (["validate", "/nowhere"], "", "cannot read /nowhere"),
        (["validate", "-"], "", "- contains no document"),
        (["validate", "-"], "a: &a 1", "anchors and aliases are not read"),
    ] {
        let output = vm(&arguments, input);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains(report), "{output:?}");
    }
    assert_eq!(vm(&["validate"], "").status.code(), Some(2));
}

#[test]
fn converted_manifests_are_valid() {
    let output = vm(&["convert", "--runtime-class", "slow", "-"], MACHINE);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let pod = text(&output.stdout);
    assert!(
        pod.contains("kind: Pod") && pod.contains("runtimeClassName: slow") && pod.contains("image: debian"),
        "{pod}"
    );
    let output = vm(&["validate", "-"], pod);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "-: Pod web: valid\n"));
    let output = vm(&["convert", "-"], &MACHINE.replace("containerDisk", "ephemeral"));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("spec.volumes[0].ephemeral: Forbidden"), "{output:?}");
}

#[test]
fn the_schema_is_printed() {
    let output = vm(&["schema"], "");
    let schema: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(schema["openapi"], "3.0.3");
    assert!(schema["components"]["schemas"]["VirtualMachine"]["properties"]["spec"].is_object());
}
