//! Tests the admission of valid annotations: presets, instance type, preference and defaults in the specification, and the
//! recorded sources.

use nacelle_vmi::admit::{self, Admitted};
use nacelle_vmi::annotations::PREFIX;
use nacelle_vmi::complete::complete;
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::spec::{Bus, Power, RunStrategy, SpecKind};
use nacelle_vmi::{Causes, read};
use std::collections::BTreeMap;

const CATALOGUE: &str = "
kind: VirtualMachinePreference
metadata: { name: linux }
spec:
  cpu: { preferredCPUTopology: cores }
  devices: { preferredDiskBus: scsi, preferredDiskCache: none, preferredInterfaceModel: e1000 }
  preferredTerminationGracePeriodSeconds: 5
---
kind: VirtualMachineInstancePreset
metadata: { name: clocked }
spec: { domain: { clock: { timezone: Europe/Berlin }, cpu: { model: host-model } } }
";

fn admitted(annotations: &[(&str, &str)]) -> Result<Option<Admitted>, Causes> {
    let mut catalogue = Catalogue::default();
    for document in read::all(CATALOGUE, "catalogue").unwrap() {
        catalogue.add(document, "catalogue").unwrap();
    }
    let annotations: BTreeMap<String, String> =
        annotations.iter().map(|(name, value)| (format!("{PREFIX}{name}"), (*value).to_owned())).collect();
    admit::pod(&annotations, &catalogue)
}

#[test]
fn without_annotations_there_is_nothing_to_admit() {
    assert_eq!(admitted(&[]), Ok(None));
}

#[test]
fn a_container_pod_is_shaped_and_no_more() {
    let shaped = admitted(&[("cpus", "4"), ("memory", "2Gi"), ("disks", "data=empty:1Gi")]).unwrap().unwrap();
    assert_eq!((shaped.kind(), shaped.run_strategy(), shaped.power()), (SpecKind::Container, None, Power::On));
    let domain = &shaped.spec().domain;
    assert_eq!(domain.cpu.as_ref().unwrap().count(), Some(4));
    assert_eq!(domain.devices.disks[0].bus(), Some(Bus::Virtio));
    assert!(domain.machine.is_none() && domain.devices.interfaces.is_empty());
}

#[test]
fn what_is_said_is_known_without_what_follows() {
    let spec = "{domain: {cpu: {sockets: 2}, devices: {rng: {}, interfaces: [{name: a, ports: [{port: 80}]}]}}, networks: [{name: a, pod: {}}]}";
    let shaped = admitted(&[("spec", spec), ("mac", "02:00:00:00:00:01"), ("kernel-args", "quiet")]).unwrap().unwrap();
    let fields = shaped.fields();
    let fields: Vec<(&str, Option<&str>)> = fields.iter().map(|(path, from)| (path.as_str(), *from)).collect();
    assert_eq!(
        fields,
        [
            ("spec.domain.cpu.sockets", None),
            ("spec.domain.devices.interfaces[0].macAddress", Some("vm.nacelle.dev/mac")),
            ("spec.domain.devices.interfaces[0].name", None),
            ("spec.domain.devices.interfaces[0].ports[0].port", None),
            ("spec.domain.devices.rng", None),
            ("spec.domain.firmware.kernelBoot.kernelArgs", Some("vm.nacelle.dev/kernel-args")),
            ("spec.networks[0].name", None),
            ("spec.networks[0].pod", None),
        ]
    );
    assert_eq!(shaped.explicit_spec().domain.cpu.as_ref().unwrap().cores, None);
    let plain = admitted(&[("kind", "container")]).unwrap().unwrap();
    assert!(plain.fields().is_empty(), "{:?}", plain.fields());
    let sized = admitted(&[("instancetype", "u1.medium")]).unwrap().unwrap();
    assert!(sized.fields().iter().all(|(_, from)| *from == Some("instance type u1.medium")), "{:?}", sized.fields());
    assert!(sized.fields().iter().any(|(path, _)| path == "spec.domain.memory.guest"));
}

#[test]
fn a_container_pod_may_have_words_for_the_kernel_that_it_has() {
    let shaped = admitted(&[("kernel-args", "quiet nosmt")]).unwrap().unwrap();
    let boot = shaped.spec().domain.firmware.as_ref().unwrap().kernel_boot.as_ref().unwrap();
    assert_eq!((boot.kernel_args.as_str(), boot.container.is_none()), ("quiet nosmt", true));
    for annotations in [&[("spec", "{domain: {firmware: {kernelBoot: {}}}}")][..], &[("initrd", "/i")]] {
        assert!(admitted(annotations).is_err());
    }
}

#[test]
fn what_was_applied_is_recorded() {
    let machine = admitted(&[
        ("kind", "machine"),
        ("instancetype", "u1.large"),
        ("preference", "linux"),
        ("presets", "clocked"),
        ("ssh-keys", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA me"),
        ("mac", "02:00:00:00:00:01"),
        (
            "spec",
            "{domain: {devices: {disks: [{name: root}, {name: cd, cdrom: {bus: sata}}]}}, volumes: [{name: root, persistentVolumeClaim: {claimName: a}}, {name: cd, containerDisk: {image: b}}]}",
        ),
    ]);
    let machine = machine.unwrap().unwrap();
    let spec = machine.spec();
    let cpu = spec.domain.cpu.as_ref().unwrap();
    assert_eq!((cpu.cores, cpu.sockets, cpu.threads, cpu.model.as_str()), (Some(2), Some(1), Some(1), "host-model"));
    assert_eq!(spec.domain.memory.as_ref().unwrap().guest.as_ref().unwrap().bytes(), Some(8 << 30));
    let buses: Vec<_> = spec.domain.devices.disks.iter().map(|disk| disk.bus().unwrap()).collect();
    // From the preference, the document, and a default: the volume for the keys was added last.
    assert_eq!(buses, [Bus::Scsi, Bus::Sata, Bus::Virtio]);
    assert!(spec.volumes[2].cloud_init_no_cloud.is_some());
    assert_eq!(spec.networks[0].name, "default");
    assert_eq!(spec.termination_grace_period_seconds, Some(5));
    assert_eq!((machine.kind(), machine.run_strategy()), (SpecKind::Machine, Some(RunStrategy::Always)));
    assert_eq!(machine.ssh_keys().len(), 1);
    let applied = machine.applied();
    assert_eq!(applied.instancetype.as_deref(), Some("u1.large"));
    let from = |field: &str| applied.fields.get(field).map(String::as_str);
    assert_eq!(from("spec.domain.cpu.cores"), Some("instance type u1.large"));
    assert_eq!(from("spec.domain.clock.timezone"), Some("preset clocked"));
    assert_eq!(from("spec.terminationGracePeriodSeconds"), Some("preference linux"));
    assert_eq!(from("spec.domain.devices.interfaces[0]"), Some("vm.nacelle.dev/mac"));
    // The record can be stored and parsed again.
    let text = serde_json::to_string(applied).unwrap();
    assert_eq!(&serde_json::from_str::<nacelle_vmi::preset::Applied>(&text).unwrap(), applied);
}

#[test]
fn both_sides_may_say_the_same() {
    let spec = "{domain: {memory: {guest: 1Gi}, cpu: {sockets: 2, threads: 2}, devices: {disks: [{name: a}]}}, volumes: [{name: a, emptyDisk: {capacity: 1Gi}}]}";
    let same = [("kind", "machine"), ("spec", spec), ("memory", "1Gi"), ("cpus", "4")];
    assert_eq!(admitted(&same).unwrap().unwrap().spec().domain.cpu.as_ref().unwrap().sockets, Some(2));
}

fn completed(annotations: &[(&str, &str)], defaults: bool) -> Option<BTreeMap<String, String>> {
    let mut catalogue = Catalogue::default();
    for document in read::all(CATALOGUE, "catalogue").unwrap() {
        catalogue.add(document, "catalogue").unwrap();
    }
    let annotations: BTreeMap<String, String> =
        annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    complete(&annotations, &catalogue, defaults).unwrap()
}

#[test]
fn what_names_nothing_is_complete() {
    assert_eq!(completed(&[], true), None);
    assert_eq!(completed(&[("example.com/a", "b")], true), None);
    assert_eq!(completed(&[("vm.nacelle.dev/cpus", "2")], true), None);
    let machine = [
        ("vm.nacelle.dev/kind", "machine"),
        ("vm.nacelle.dev/memory", "1Gi"),
        ("vm.nacelle.dev/disks", "root=image:a"),
    ];
    assert_eq!(completed(&machine, false), None);
}

#[test]
fn names_become_a_document_that_needs_no_catalogue() {
    let made = completed(
        &[
            ("example.com/a", "b"),
            ("vm.nacelle.dev/kind", "machine"),
            ("vm.nacelle.dev/name", "db"),
            ("vm.nacelle.dev/instancetype", "u1.small"),
            ("vm.nacelle.dev/preference", "linux"),
            ("vm.nacelle.dev/presets", "clocked"),
            ("vm.nacelle.dev/disks", "root=image:a"),
            ("vm.nacelle.dev/firmware", "efi"),
        ],
        false,
    );
    let made = made.unwrap();
    let names: Vec<&str> = made.keys().map(String::as_str).collect();
    let ours = ["applied", "kind", "name", "spec"].map(|name| format!("{PREFIX}{name}"));
    assert_eq!(names, ["example.com/a", &ours[0], &ours[1], &ours[2], &ours[3]]);
    assert_eq!(
        made["vm.nacelle.dev/spec"],
        "{\"domain\":{\"clock\":{\"timezone\":\"Europe/Berlin\"},\"cpu\":{\"cores\":1,\"model\":\"host-model\"},\
         \"devices\":{\"disks\":[{\"cache\":\"none\",\"disk\":{\"bus\":\"scsi\"},\"name\":\"root\"}]},\
         \"firmware\":{\"bootloader\":{\"efi\":{\"secureBoot\":false}}},\"memory\":{\"guest\":\"2147483648\"}},\
         \"terminationGracePeriodSeconds\":5,\"volumes\":[{\"containerDisk\":{\"image\":\"a\"},\"name\":\"root\"}]}"
    );
    assert_eq!(
        made["vm.nacelle.dev/applied"],
        "{\"fields\":{\"spec.domain.clock.timezone\":\"preset clocked\",\"spec.domain.cpu.cores\":\"instance type u1.small\",\
         \"spec.domain.cpu.model\":\"preset clocked\",\"spec.domain.devices.disks[0]\":\"preference linux\",\"spec.domain.devices.disks[0].cache\":\"preference linux\",\
         \"spec.domain.memory.guest\":\"instance type u1.small\",\"spec.terminationGracePeriodSeconds\":\"preference linux\"},\
         \"instancetype\":\"u1.small\",\"preference\":\"linux\",\"presets\":[\"clocked\"]}"
    );
    // A node without the catalogue gets the same specification and sources.
    let node = admit::pod(&made, &Catalogue::default()).unwrap().unwrap();
    assert_eq!(node.spec().domain.cpu.as_ref().unwrap().model, "host-model");
    assert!(node.fields().contains(&("spec.domain.memory.guest".to_owned(), Some("instance type u1.small"))));
    assert_eq!(complete(&made, &Catalogue::default(), false), Ok(None));
}

#[test]
fn defaults_of_machine_pods_are_written_on_demand() {
    let machine = [
        ("vm.nacelle.dev/kind", "machine"),
        (
            "vm.nacelle.dev/spec",
            "{domain: {memory: {guest: 1Gi}, devices: {disks: [{name: root}]}}, volumes: [{name: root, containerDisk: {image: a}}]}",
        ),
    ];
    let mut made = completed(&machine, true).unwrap();
    assert_eq!(made["vm.nacelle.dev/run-strategy"], "Always");
    assert!(made["vm.nacelle.dev/spec"].contains("\"machine\":{\"type\":\"q35\"}"), "{made:?}");
    assert!(!made.contains_key("vm.nacelle.dev/applied"));
    assert_eq!(complete(&made, &Catalogue::default(), true), Ok(None));
    // Another text with the same meaning.
    let spec = made["vm.nacelle.dev/spec"].replace("\"machine\":{\"type\":\"q35\"}", "\"machine\": {type: q35}");
    made.insert("vm.nacelle.dev/spec".to_owned(), spec);
    assert_eq!(complete(&made, &Catalogue::default(), true), Ok(None));
}
