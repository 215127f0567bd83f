//! Tests the table in docs/user/vm/migrating-from-kubevirt.md about KubeVirt's examples (`shim/vmi/tests/manifests/examples`):
//! what each becomes and whether it runs. The test covers what needs no node, up to the container of CreateContainer.

use super::volumes::image_volume_path;
use super::{build, check_container, check_volumes};
use crate::MachineSettings;
use crate::supported::unsupported_settings;
use nacelle_model::container::ContainerConfig;
use nacelle_model::device::DeviceRequest;
use nacelle_model::machine::KERNEL_SOURCE_KEY;
use nacelle_model::machine_pod::{MachinePod, RequestedDiskSource};
use nacelle_model::mount::{ImageVolume, NodeVolume, Propagation};
use nacelle_model::pod::PodConfig;
use nacelle_model::testing;
use nacelle_vmi::manifest::{self, Options};
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::{Causes, admit, read};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const PAGE: &str = include_str!("../../../../docs/user/vm/migrating-from-kubevirt.md");

/// Returns the kind that a manifest becomes, and the pods or their template.
fn converted(documents: Vec<Value>) -> Result<(&'static str, Value), Causes> {
    let mut catalogue = Catalogue::default();
    let mut converted = None;
    for document in documents {
        if manifest::is_catalogue(&document) {
            catalogue.add(document, "document")?;
        } else {
            converted = Some(manifest::convert(&document, &catalogue, &Options::default())?.documents);
        }
    }
    let mut documents = converted.expect("a machine");
    let pods = documents.pop().expect("pods");
    let kinds: Vec<&str> = documents.iter().chain([&pods]).filter_map(|document| document["kind"].as_str()).collect();
    let becomes = match kinds.as_slice() {
        ["Pod"] => "a Pod",
        ["ReplicaSet"] => "a ReplicaSet",
        ["VirtualMachine", "Deployment"] => "a record and a Deployment",
        other => panic!("{other:?}"),
    };
    Ok((becomes, pods))
}

/// Returns what nodes reject of the pods; empty if they run.
fn rejected_settings(pods: &Value) -> Vec<String> {
    // Read as nodes do.
    let (annotations, causes) = manifest::annotations(pods);
    assert!(causes.is_empty());
    let admitted = admit::pod(&annotations, &Catalogue::default()).unwrap().expect("a machine");
    let settings: Vec<String> = unsupported_settings(&admitted).into_iter().map(|one| one.what).collect();
    if settings.is_empty() {
        let pod = PodConfig { annotations, ..(*testing::pod(1).config).clone() };
        let machine = build(&admitted, &pod, &MachineSettings::default()).unwrap();
        check_container_request(&machine, pods.pointer("/spec/template/spec").unwrap_or(&pods["spec"]));
    }
    settings
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// Requests the container as kubelet would.
fn check_container_request(machine: &MachinePod, pod: &Value) {
    let container = &pod["containers"][0];
    let mut config = ContainerConfig { command: vec![], args: vec![], ..(*testing::container(1, 1).config).clone() };
    let device = |device: &Value| DeviceRequest {
        container_path: text(&device["devicePath"]),
        host_path: "/dev/x".into(),
        permissions: "mrw".into(),
        ..DeviceRequest::default()
    };
    config.resources.cpuset_cpus = "0-63".into();
    config.devices = list(container, "volumeDevices").iter().map(device).collect();
    for mount in list(container, "volumeMounts") {
        let volume = list(pod, "volumes").iter().find(|volume| volume["name"] == mount["name"]).expect("a volume");
        let container_path = text(&mount["mountPath"]);
        if volume.get("image").is_some() {
            config.volumes.push(ImageVolume {
                image: text(&volume["image"]["reference"]),
                user_image: String::new(),
                sub_path: String::new(),
                container_path,
                recursive_read_only: false,
                options: [].into(),
            });
            continue;
        }
        let path = volume.pointer("/hostPath/path").and_then(Value::as_str);
        config.node_volumes.push(NodeVolume {
            host_path: path.map_or_else(|| format!("/v{container_path}"), str::to_owned),
            container_path,
            readonly: mount["readOnly"] == true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        });
    }
    check_container(machine, &config).unwrap();
    check_volumes(machine, &config).unwrap();
    let kernel = machine.kernel.iter().flat_map(|kernel| [Some(&kernel.kernel), kernel.initrd.as_ref()]).flatten();
    let disks = machine.disks.iter().map(|disk| (disk.name.as_str(), &disk.source));
    for (name, source) in disks.chain(kernel.map(|source| (KERNEL_SOURCE_KEY, source))) {
        if let RequestedDiskSource::Image { image, .. } = source {
            let at = image_volume_path(name);
            let volume = config.volumes.iter().find(|volume| Path::new(&volume.container_path) == at);
            let found = volume.map_or_else(|| text(&container["image"]), |volume| volume.image.clone());
            assert_eq!(*image, found, "where {name} is looked for");
        }
    }
}

#[test]
fn every_example_is_documented_with_its_result() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vmi/tests/manifests/examples");
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect();
    files.sort();
    let mut table = String::from("| example | becomes | runs here |\n|---|---|---|\n");
    let fields = |fields: &[String]| fields.iter().map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ");
    let mut counts = [0; 3];
    for file in &files {
        let yaml = std::fs::read_to_string(file).unwrap();
        let about = yaml.lines().next().and_then(|line| line.strip_prefix("# ")).expect("what it shows");
        let (count, becomes, runs) = match converted(read::all(&yaml, "example").unwrap()) {
            Err(causes) => {
                let named: Vec<String> = causes.list().iter().map(|cause| cause.field.clone()).collect();
                (0, "nothing", format!("refused: {}", fields(&named)))
            }
            Ok((becomes, pods)) => match rejected_settings(&pods) {
                settings if settings.is_empty() => (1, becomes, "yes".to_owned()),
                settings => (2, becomes, format!("not run: {}", fields(&settings))),
            },
        };
        counts[count] += 1;
        writeln!(table, "| `{}`: {about} | {becomes} | {runs} |", file.file_stem().unwrap().display()).unwrap();
    }
    assert!(counts.iter().sum::<usize>() >= 30 && counts[1] >= 20, "{counts:?}");
    assert!(PAGE.contains(&table), "docs/user/vm/migrating-from-kubevirt.md should have\n{table}");
}
