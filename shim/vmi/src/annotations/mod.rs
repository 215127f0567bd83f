//! Defines the annotations `vm.nacelle.dev/...` and their meaning, and merges them with the document among them into one
//! specification. Any client that may create a pod can set them, so they are bounded, and each is either understood or rejected.

pub mod checkpoint;
mod disks;
pub mod empty_dirs;
pub mod machine_id;
mod parse;
pub mod sockets;

pub use crate::annotation_name::{PREFIX, field};

use crate::cause::{Causes, Rule};
use crate::spec::{Power, RunStrategy, SpecKind};
use crate::tree::Tree;
use crate::{read, version};
use machine_id::ExpectedMachineId;
use std::collections::BTreeMap;

/// All annotations: the name after the prefix, and its description.
pub const ALL: &[(&str, &str)] = &[
    ("spec", "the whole specification, in YAML or JSON, in the shape of KubeVirt's VirtualMachineInstanceSpec"),
    ("api-version", "the version of that document: `v1` (if it is missing) or `v1alpha1`"),
    ("v1-fields", "the fields that a document in `v1alpha1` cannot express; written by conversion, not by hand"),
    ("kind", "`container` (the default): containers run in the VM; `machine`: the container is the VM"),
    ("name", "the persistent VM of which this pod is a run"),
    (
        "machine-id",
        "the id that the persistent VM must have, so that the pod runs no other one; with `,new` a VM that does not exist is created",
    ),
    ("run-strategy", "when it runs: `Always`, `RerunOnFailure`, `Once`, `Manual` or `Halted`"),
    ("power", "the requested power state: `on`, `off` or `paused`; applied at the start and after each change"),
    ("instancetype", "the instance type that sizes it"),
    ("preference", "the preference with the defaults of unset fields"),
    ("presets", "presets, separated by commas"),
    ("cpus", "the number of vCPUs: `domain.cpu.cores`"),
    ("cpu-model", "`domain.cpu.model`"),
    ("cpu-pinning", "`true`: `domain.cpu.dedicatedCpuPlacement`"),
    ("memory", "a quantity: `domain.memory.guest`"),
    ("hugepages", "`2Mi` or `1Gi`: `domain.memory.hugepages.pageSize`"),
    ("machine", "`microvm`, `q35` or `pc`: `domain.machine.type`"),
    ("firmware", "`bios`, `efi` or `efi-secure`: `domain.firmware.bootloader`"),
    ("uuid", "`domain.firmware.uuid`"),
    ("serial", "`domain.firmware.serial`"),
    ("kernel-image", "the image with the kernel: `domain.firmware.kernelBoot.container.image`"),
    ("kernel", "the kernel's path in it: `domain.firmware.kernelBoot.container.kernelPath`"),
    ("initrd", "the initial file system's path in it: `domain.firmware.kernelBoot.container.initrdPath`"),
    ("kernel-args", "`domain.firmware.kernelBoot.kernelArgs`"),
    ("disks", "disks with their volumes: `NAME=KIND:WHAT[,OPTION...]`, one a line or separated by semicolons"),
    ("cloud-init", "user data: a volume `cloud-init` of the kind cloudInitNoCloud, and its disk"),
    ("cloud-init-network", "network data of the same volume"),
    ("ssh-keys", "public keys, one a line, that cloud-init puts into the guest"),
    ("mac", "the hardware address of the first interface"),
    ("graphics", "`true` or `false`: `domain.devices.autoattachGraphicsDevice`"),
    ("grace-period", "seconds: `terminationGracePeriodSeconds`"),
    (
        "applied",
        "the sources of fields that instance type, preference and presets set; written by `nacelle admission`, not by hand",
    ),
    ("empty-dir-limits", "sizes of emptyDirs that are disks (docs/user/empty-dir.md); not a setting of the VM"),
    (
        "sockets",
        "paths of mounts whose UNIX sockets connect to the node (docs/user/volumes.md#sockets-of-the-node); not a setting of the VM",
    ),
    (
        "from-checkpoint",
        "the checkpoint from which the pod's containers continue (docs/user/checkpoints.md#by-an-annotation); not a setting of the VM",
    ),
];

/// The settings outside of the specification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodSettings {
    /// The kind of the pod.
    pub kind: Option<SpecKind>,
    /// The name of the persistent VM of which the pod is a run.
    pub name: Option<String>,
    /// The machine id that the persistent VM must have.
    pub machine_id: Option<ExpectedMachineId>,
    /// The run strategy of the persistent VM.
    pub run_strategy: Option<RunStrategy>,
    /// The initial power state.
    pub power: Option<Power>,
    /// The instance type.
    pub instancetype: Option<String>,
    /// The preference.
    pub preference: Option<String>,
    /// The presets.
    pub presets: Vec<String>,
    /// The public SSH keys.
    pub ssh_keys: Vec<String>,
}

/// Returns the annotations with our prefix: name after the prefix, and value.
pub fn with_prefix(annotations: &BTreeMap<String, String>) -> BTreeMap<&str, &str> {
    let named = annotations.iter().filter_map(|(key, value)| Some((key.strip_prefix(PREFIX)?, value.as_str())));
    named.collect()
}

/// Returns the specification and the settings of these annotations. Valid parts are returned even if others are not; without a
/// document that can be parsed there is no specification.
pub fn read(annotations: &BTreeMap<&str, &str>) -> (Option<Tree>, PodSettings, Causes) {
    let mut causes = Causes::default();
    let bytes: usize = annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > read::MAX_BYTES {
        let message = format!("have {bytes} bytes together, and at most {} are read", read::MAX_BYTES);
        causes.too_long(Rule("annotations-bytes"), format!("metadata.annotations[{PREFIX}*]"), message);
        return (None, PodSettings::default(), causes);
    }
    for name in annotations.keys() {
        if !ALL.iter().any(|(known, _)| known == name) {
            let message = format!("Nacelle has no such annotation (fields without one are set in {PREFIX}spec)");
            causes.unknown(Rule("annotation-unknown"), field(&name.chars().take(100).collect::<String>()), message);
        }
    }
    if let Some(text) = annotations.get("empty-dir-limits").filter(|text| empty_dirs::limits(text).is_none()) {
        causes.invalid(Rule("empty-dir-limits"), field("empty-dir-limits"), text, empty_dirs::RULE);
    }
    if let Some(text) = annotations.get("sockets").filter(|text| sockets::paths(text).is_none()) {
        causes.invalid(Rule("sockets"), field("sockets"), text, sockets::RULE);
    }
    if let Some(text) = annotations.get("from-checkpoint").filter(|text| !checkpoint::is_name(text)) {
        causes.invalid(Rule("from-checkpoint"), field("from-checkpoint"), text, checkpoint::RULE);
    }
    let document = document(annotations, &mut causes);
    let readable = document.is_some();
    let mut tree = document.unwrap_or_default();
    let settings = parse::short_annotations(annotations, &mut tree, &mut causes);
    if settings.kind == Some(SpecKind::Machine) && annotations.contains_key("sockets") {
        let message = "is for pods whose containers run in a VM: a machine pod has no containers that mount volumes";
        causes.forbidden(Rule("sockets-machine"), field("sockets"), message);
    }
    if settings.kind == Some(SpecKind::Machine) && annotations.contains_key("from-checkpoint") {
        let message =
            "is for pods whose containers run in a VM: a machine pod starts from a snapshot (nacelle vm restore)";
        causes.forbidden(Rule("from-checkpoint-machine"), field("from-checkpoint"), message);
    }
    (readable.then_some(tree), settings, causes)
}

/// Returns the document as v1: an empty one if there is none, and `None` if it cannot be parsed.
fn document(annotations: &BTreeMap<&str, &str>, causes: &mut Causes) -> Option<Tree> {
    let version = match annotations.get("api-version") {
        None => version::Version::V1,
        Some(word) => match version::Version::of(word) {
            Some(version) => version,
            None => {
                causes.unsupported(Rule("version-unknown"), field("api-version"), word, version::Version::WORDS);
                return None;
            }
        },
    };
    let carried = annotations.get("v1-fields").copied();
    let Some(text) = annotations.get("spec") else {
        for name in ["api-version", "v1-fields", "applied"] {
            if annotations.contains_key(name) {
                let message = format!("describes a document, but {PREFIX}spec is missing");
                causes.forbidden(Rule("annotation-alone"), field(name), message);
            }
        }
        return Some(Tree::default());
    };
    let read = read::one(text, &field("spec")).and_then(|value| {
        if value.is_null() {
            let mut causes = Causes::default();
            causes.required(Rule("document-empty"), field("spec"), "must not be empty");
            return Err(causes);
        }
        Ok(value)
    });
    match read {
        Ok(value) => {
            let (tree, wrong) = version::tree(value, version, carried);
            causes.extend(wrong);
            Some(tree)
        }
        Err(wrong) => {
            causes.extend(wrong);
            None
        }
    }
}
