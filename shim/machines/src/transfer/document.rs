//! Defines the configuration blob of a VM artifact: the VM's identity and its files, in the order of the artifact's layers. Pure.
//! The input of `read` is untrusted.

use nacelle_base::json;
use nacelle_image::{ArtifactKind, Reference, VM_ARTIFACT_TYPE};
use nacelle_keeper::qcow2::MAX_SIZE;
use nacelle_keeper::{HotplugDisk, parse_hotplug_list};
use nacelle_model::digest::{Digest, ImageId};
use nacelle_model::record::VmRecord;
use nacelle_vmi::annotations::machine_id::is_machine_id;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The media types of VM artifacts.
pub static VM_ARTIFACT: ArtifactKind = ArtifactKind {
    artifact: VM_ARTIFACT_TYPE,
    config: "application/vnd.nacelle.machine.config.v1+json",
    layer: "application/vnd.nacelle.machine.file.v1+zstd",
};

/// The largest number of files of a VM.
pub const MAX_FILES: usize = 64;
/// The largest configuration blob in bytes.
pub const MAX_BYTES: u64 = 256 << 10;
/// The largest template of firmware variables in bytes.
const MAX_FIRMWARE_VARIABLES: u64 = 64 << 20;
/// The largest number of snapshots, the same as in the keeper.
const MAX_SNAPSHOTS: usize = 100;
/// The largest number of names of an image.
const MAX_IMAGE_NAMES: usize = 16;
/// The longest name of a disk, a VM or a namespace, in bytes.
const MAX_LABEL: usize = 63;
/// The name of the disk with the firmware's variables.
const FIRMWARE_VARIABLES: &str = "efi-variables";

/// Why a configuration blob is invalid.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The text is not JSON, a field is missing or has another type, or the version is unknown.
    #[error("its configuration is not that of a VM artifact")]
    Form(#[from] serde_json::Error),
    /// A field has an invalid value.
    #[error("{field} is {value:?}: {rule}")]
    Field {
        /// The field's path.
        field: &'static str,
        /// The value, truncated.
        value: String,
        /// The rule.
        rule: &'static str,
    },
    /// The number of files differs from the number of layers.
    #[error("its configuration lists {files} files, but it has {layers} layers")]
    Layers {
        /// The number of files in the configuration.
        files: usize,
        /// The number of layers in the artifact.
        layers: usize,
    },
}

/// An exported VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExportedVm {
    /// The namespace on the exporting node.
    pub namespace: String,
    /// The name on the exporting node.
    pub name: String,
    /// The UUID in SMBIOS.
    pub uuid: String,
    /// The MAC address of the first network interface: `02:00:00:00:00:01`.
    pub mac: String,
    /// The time of the VM's creation, in nanoseconds since 1970.
    pub created_at: i64,
    /// The id that pods expect of the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// The backing image of its disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<BackingImage>,
    /// The firmware's variables contain enrolled keys.
    #[serde(default)]
    pub secure_boot: bool,
    /// Names of the snapshots in its disks, the oldest first.
    #[serde(default)]
    pub snapshots: Vec<String>,
    /// The VM's files, one for each layer.
    pub files: Vec<ExportedFile>,
}

/// An image that is not part of the artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingImage {
    /// The image id: the digest of the image's configuration.
    pub id: ImageId,
    /// The image's names in registries.
    #[serde(default)]
    pub names: Vec<String>,
}

/// A file of the VM, which is the layer with the same index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedFile {
    /// The file's purpose.
    #[serde(flatten)]
    pub kind: FileKind,
    /// The uncompressed size in bytes.
    pub size: u64,
    /// The digest of the uncompressed contents.
    pub digest: Digest,
}

/// The purpose of a VM's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum FileKind {
    /// A disk, in qcow2.
    Disk {
        /// The disk's name.
        name: String,
        /// The virtual size in bytes.
        bytes: u64,
        /// The file contains only the differences from the image.
        over_image: bool,
    },
    /// A hot-plugged disk that the specification does not contain, in qcow2.
    AddedDisk {
        /// The disk's name.
        name: String,
        /// The disk's slot.
        #[serde(rename = "place")]
        slot: u8,
        /// The virtual size in bytes.
        bytes: u64,
    },
    /// The template of the firmware's variables.
    FirmwareVariables {},
    /// The firmware's variables with the changes, in qcow2.
    FirmwareWritten {
        /// The virtual size in bytes.
        bytes: u64,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "version")]
enum VersionedVm {
    #[serde(rename = "1")]
    V1(ExportedVm),
}

impl FileKind {
    /// Returns the file's name in the VM's directory.
    pub fn file_name(&self) -> String {
        match self {
            FileKind::Disk { name, .. } => format!("{name}.qcow2"),
            FileKind::AddedDisk { name, .. } => format!("{name}.added.qcow2"),
            FileKind::FirmwareVariables {} => FIRMWARE_VARIABLES.to_owned(),
            FileKind::FirmwareWritten { .. } => format!("{FIRMWARE_VARIABLES}.qcow2"),
        }
    }

    /// Returns a description for messages.
    pub fn description(&self) -> String {
        match self {
            FileKind::Disk { name, .. } | FileKind::AddedDisk { name, .. } => format!("disk {name}"),
            FileKind::FirmwareVariables {} => "firmware variables".to_owned(),
            FileKind::FirmwareWritten { .. } => "written firmware variables".to_owned(),
        }
    }

    /// Returns the disk's virtual size if the file is in qcow2.
    pub fn virtual_size(&self) -> Option<u64> {
        match self {
            FileKind::Disk { bytes, .. } | FileKind::AddedDisk { bytes, .. } | FileKind::FirmwareWritten { bytes } => {
                Some(*bytes)
            }
            FileKind::FirmwareVariables {} => None,
        }
    }
}

fn invalid_field<T>(field: &'static str, value: impl ToString, rule: &'static str) -> Result<T, DocumentError> {
    let value = value.to_string().chars().filter(|c| !c.is_control()).take(100).collect();
    Err(DocumentError::Field { field, value, rule })
}

fn is_label(word: &str, upper: bool) -> bool {
    let is_allowed =
        |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || upper && b.is_ascii_uppercase();
    !word.is_empty() && word.len() <= MAX_LABEL && word.bytes().all(is_allowed)
}

impl ExportedVm {
    /// Serializes the configuration; the same VM always results in the same bytes.
    pub fn into_json(self) -> Result<Vec<u8>, DocumentError> {
        Ok(serde_json::to_vec(&VersionedVm::V1(self))?)
    }

    /// Parses and checks the configuration of an artifact with this number of layers.
    pub fn from_json(bytes: &[u8], layers: usize) -> Result<ExportedVm, DocumentError> {
        let VersionedVm::V1(vm) = json::read(bytes)?;
        vm.check()?;
        match vm.files.len() {
            files if files == layers => Ok(vm),
            files => Err(DocumentError::Layers { files, layers }),
        }
    }

    fn check(&self) -> Result<(), DocumentError> {
        for (key, word) in [("namespace", &self.namespace), ("name", &self.name)] {
            if !is_label(word, false) {
                return invalid_field(key, word, "1 to 63 small letters, digits and '-' are expected");
            }
        }
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let parts: Vec<&str> = self.uuid.split('-').collect();
        if parts.iter().map(|part| part.len()).ne([8, 4, 4, 4, 12]) || !parts.iter().all(|part| digits(part)) {
            return invalid_field("uuid", &self.uuid, "a UUID in small letters is expected");
        }
        self.mac_address()?;
        if let Some(id) = self.machine_id.as_ref().filter(|id| !is_machine_id(id)) {
            let rule = "1 to 63 letters, digits, '-', '_' and '.' are expected, with a letter or digit at both ends";
            return invalid_field("machineId", id, rule);
        }
        if let Some(image) = &self.image {
            if image.names.len() > MAX_IMAGE_NAMES {
                return invalid_field("image.names", image.names.len(), "at most 16 are allowed");
            }
            if let Some(name) = image.names.iter().find(|name| Reference::parse(name).is_err()) {
                return invalid_field("image.names[]", name, "an image reference is expected");
            }
        }
        let is_valid = |name: &String| name.len() <= 64 && name.bytes().all(|b| b.is_ascii_graphic());
        if self.snapshots.len() > MAX_SNAPSHOTS || !self.snapshots.iter().all(is_valid) {
            return invalid_field("snapshots", self.snapshots.len(), "at most 100 names of 64 characters are allowed");
        }
        self.check_files()
    }

    fn check_files(&self) -> Result<(), DocumentError> {
        if self.files.len() > MAX_FILES {
            return invalid_field("files", self.files.len(), "at most 64 are allowed");
        }
        let mut names = BTreeSet::new();
        let mut total = 0u64;
        for ExportedFile { kind, size, .. } in &self.files {
            if let FileKind::Disk { name, over_image, .. } = kind {
                if !is_label(name, true) {
                    return invalid_field("files[].name", name, "1 to 63 letters, digits and '-' are expected");
                }
                if *over_image && self.image.is_none() {
                    return invalid_field("files[].overImage", true, "the artifact has no backing image");
                }
            }
            if !names.insert(kind.file_name()) {
                return invalid_field("files[]", kind.description(), "another file has the same name");
            }
            if kind.virtual_size().is_some_and(|bytes| bytes == 0 || bytes > MAX_SIZE) {
                return invalid_field("files[].bytes", kind.description(), "a disk of 1 byte to 4 TiB is expected");
            }
            if kind.virtual_size().is_none() && *size > MAX_FIRMWARE_VARIABLES {
                return invalid_field("files[].size", size, "firmware variables have at most 64 MiB");
            }
            let Some(sum) = total.checked_add(*size) else {
                return invalid_field("files[].size", size, "the sum of all sizes is too large");
            };
            total = sum;
        }
        // Checked as the keeper reads it.
        let added = serde_json::to_vec(&self.added_disks())?;
        if parse_hotplug_list(&added).is_err() {
            return invalid_field("files[]", self.added_disks().len(), "the added disks conflict with each other");
        }
        if names.contains(&format!("{FIRMWARE_VARIABLES}.qcow2")) != names.contains(FIRMWARE_VARIABLES) {
            return invalid_field(
                "files",
                FIRMWARE_VARIABLES,
                "the template and the written firmware variables are expected together",
            );
        }
        Ok(())
    }

    /// Returns the MAC address of the first interface.
    fn mac_address(&self) -> Result<[u8; 6], DocumentError> {
        let bytes: Option<Vec<u8>> = self
            .mac
            .split(':')
            .map(|part| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2 && !part.starts_with('+')))
            .collect();
        let mac: Option<[u8; 6]> = bytes.and_then(|bytes| bytes.try_into().ok());
        match mac {
            Some(mac @ [first, ..]) if first & 1 == 0 && mac != [0; 6] => Ok(mac),
            _ => invalid_field("mac", &self.mac, "a unicast address is expected, such as 02:00:00:00:00:01"),
        }
    }

    /// Returns the hot-plugged disks.
    pub fn added_disks(&self) -> Vec<HotplugDisk> {
        let one = |file: &ExportedFile| match &file.kind {
            FileKind::AddedDisk { name, slot, bytes } => {
                Some(HotplugDisk { name: name.clone(), slot: *slot, bytes: *bytes })
            }
            _ => None,
        };
        self.files.iter().filter_map(one).collect()
    }

    /// Returns the size of all files in bytes.
    pub fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }

    /// Returns the record of the imported VM: `fresh`, with the exported identity unless `new_identity` is set.
    pub fn to_record(&self, fresh: VmRecord, new_identity: bool) -> Result<VmRecord, DocumentError> {
        let image = self.image.as_ref().map(|image| image.id);
        if new_identity {
            return Ok(VmRecord { image, ..fresh });
        }
        let mac = self.mac_address()?;
        let machine_id = self.machine_id.clone();
        Ok(VmRecord { image, uuid: self.uuid.clone(), mac, created_at: self.created_at, machine_id, ..fresh })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::Chain;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn exported_vm() -> ExportedVm {
        let file = |kind| ExportedFile { kind, size: 1 << 20, digest: Digest([3; 32]) };
        ExportedVm {
            namespace: "default".into(),
            name: "db".into(),
            uuid: "01020304-0506-4708-890a-0b0c0d0e0f10".into(),
            mac: "02:00:00:00:00:01".into(),
            created_at: 5,
            machine_id: Some("8b0d4a52".into()),
            image: Some(BackingImage { id: Digest([7; 32]), names: vec!["docker.io/library/a:1".into()] }),
            secure_boot: false,
            snapshots: vec!["before".into()],
            files: vec![
                file(FileKind::Disk { name: "root".into(), bytes: 1 << 30, over_image: true }),
                file(FileKind::AddedDisk { name: "more".into(), slot: 3, bytes: 1 << 20 }),
                file(FileKind::FirmwareVariables {}),
                file(FileKind::FirmwareWritten { bytes: 1 << 20 }),
            ],
        }
    }

    #[test]
    fn a_configuration_is_read_as_it_was_written() {
        let text = exported_vm().into_json().unwrap();
        assert_eq!(ExportedVm::from_json(&text, 4).unwrap(), exported_vm());
        let parsed: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(
            (&parsed["version"], &parsed["files"][0]["kind"], &parsed["files"][0]["overImage"]),
            (&json!("1"), &json!("disk"), &json!(true)),
            "{parsed}"
        );
        let fresh = VmRecord::new("other", "db2", &[9; 22], 8);
        let same = exported_vm().to_record(fresh.clone(), false).unwrap();
        assert_eq!((same.id.as_str(), &same.uuid, same.mac), ("other/db2", &exported_vm().uuid, [2, 0, 0, 0, 0, 1]));
        assert_eq!(same.machine_id.as_deref(), Some("8b0d4a52"));
        assert_eq!((same.uid.as_str(), same.image), (fresh.uid.as_str(), Some(Digest([7; 32]))));
        let new = exported_vm().to_record(fresh.clone(), true).unwrap();
        assert_eq!((&new.uuid, new.mac, new.created_at, &new.machine_id), (&fresh.uuid, fresh.mac, 8, &None));
    }

    #[test]
    fn an_untrusted_configuration_is_checked() {
        let error_of = |pointer: &str, value: Value| {
            let mut changed = serde_json::to_value(VersionedVm::V1(exported_vm())).unwrap();
            *changed.pointer_mut(pointer).unwrap() = value;
            Chain(&ExportedVm::from_json(changed.to_string().as_bytes(), 4).unwrap_err()).to_string()
        };
        let disk = json!({ "kind": "disk", "name": "a", "bytes": 5, "overImage": false, "size": 1, "digest": Digest([1; 32]) });
        for (pointer, value, words) in [
            ("/version", json!("2"), "unknown variant `2`"),
            ("/namespace", json!("../etc"), "namespace is \"../etc\""),
            ("/name", json!(""), "name is \"\""),
            ("/uuid", json!("01020304-0506-4708-890a-0b0c0d0e0f1"), "uuid is"),
            ("/uuid", json!("01020304-0506-4708-890a-0B0c0d0e0f10"), "small letters"),
            ("/mac", json!("01:00:00:00:00:01"), "unicast"),
            ("/mac", json!("+2:00:00:00:00:01"), "unicast"),
            ("/mac", json!("02:00:00:00:00"), "unicast"),
            ("/machineId", json!("../a"), "machineId is"),
            ("/machineId", json!("a".repeat(64)), "1 to 63 letters"),
            ("/image/id", json!("sha256:0"), "digest"),
            ("/image/names/0", json!("a b"), "image.names[]"),
            ("/image/names", json!(vec!["a"; 17]), "at most 16"),
            ("/snapshots", json!(vec!["a"; 101]), "at most 100"),
            ("/snapshots", json!(["a\n"]), "at most 100"),
            ("/files/0/name", json!("../../root"), "files[].name"),
            ("/files/0/name", json!("a".repeat(64)), "files[].name"),
            ("/files/0/name", json!("efi-variables"), "the same name"),
            ("/files/0/bytes", json!(0), "1 byte to 4 TiB"),
            ("/files/0/bytes", json!(u64::MAX), "1 byte to 4 TiB"),
            ("/files/0/kind", json!("passwd"), "unknown variant `passwd`"),
            ("/files/0/size", json!(u64::MAX), "too large"),
            ("/files/0/size", json!(-1), "invalid value"),
            ("/files/2/size", json!((64 << 20) + 1), "at most 64 MiB"),
            ("/files/3", disk.clone(), "expected together"),
            ("/files/2", disk.clone(), "expected together"),
            (
                "/files/0",
                json!({ "kind": "added-disk", "name": "a.b", "place": 0, "bytes": 5, "size": 1, "digest": Digest([1; 32]) }),
                "conflict with each other",
            ),
            ("/files", json!(vec![disk.clone(); 65]), "at most 64"),
            ("/files", json!([disk]), "1 files, but it has 4 layers"),
            ("/image", Value::Null, "no backing image"),
        ] {
            let error = error_of(pointer, value);
            assert!(error.contains(words), "{words:?} in {error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_yield_an_error_or_safe_file_names(at in 0..900usize, byte: u8) {
            let mut text = exported_vm().into_json().unwrap();
            if let Some(target) = text.get_mut(at) { *target = byte; }
            if let Ok(read) = ExportedVm::from_json(&text, 4) {
                for file in &read.files {
                    prop_assert!(!file.kind.file_name().contains('/'));
                }
            }
        }
    }
}
