//! Defines the document of an exported VM: its identity and its files, in the order of the artifact's layers. Pure. The input of
//! `read` is untrusted.

use nacelle_base::json;
use nacelle_image::{ArtifactKind, Reference};
use nacelle_keeper::qcow2::MAX_SIZE;
use nacelle_keeper::{HotplugDisk, parse_hotplug_list};
use nacelle_model::digest::{Digest, ImageId};
use nacelle_model::record::VmRecord;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The media types of VM artifacts.
pub static MACHINE: ArtifactKind = ArtifactKind {
    artifact: "application/vnd.nacelle.machine.v1",
    config: "application/vnd.nacelle.machine.config.v1+json",
    layer: "application/vnd.nacelle.machine.file.v1+zstd",
};

/// The largest number of files of a VM.
pub const MOST_FILES: usize = 64;
/// The largest document in bytes.
pub const MOST_BYTES: u64 = 256 << 10;
/// The largest template of firmware variables in bytes.
const MOST_VARIABLES: u64 = 64 << 20;
/// The largest number of snapshots, the same as in the keeper.
const MOST_SNAPSHOTS: usize = 100;
/// The largest number of names of an image.
const MOST_NAMES: usize = 16;
/// The longest name of a disk, a VM or a namespace, in bytes.
const LONGEST: usize = 63;
/// The name of the disk with the firmware's variables.
const VARIABLES: &str = "efi-variables";

/// Why a document is invalid.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The text is not JSON, a field is missing or has another type, or the version is unknown.
    #[error("its configuration does not have the form of one")]
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
    #[error("its configuration has {files} files, and it has {layers} layers")]
    Layers {
        /// The number of files in the document.
        files: usize,
        /// The number of layers in the artifact.
        layers: usize,
    },
}

/// An exported VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
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
    /// The backing image of its disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    /// The firmware's variables contain enrolled keys.
    #[serde(default)]
    pub secure_boot: bool,
    /// Names of the snapshots in its disks, the oldest first.
    #[serde(default)]
    pub snapshots: Vec<String>,
    /// The VM's files, one for each layer.
    pub files: Vec<File>,
}

/// An image that is not part of the artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// The image id: the digest of the image's configuration.
    pub id: ImageId,
    /// The image's names in registries.
    #[serde(default)]
    pub names: Vec<String>,
}

/// A file of the VM, which is the layer with the same index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// The file's purpose.
    #[serde(flatten)]
    pub kept: Kept,
    /// The uncompressed size in bytes.
    pub size: u64,
    /// The digest of the uncompressed contents.
    pub digest: Digest,
}

/// The purpose of a VM's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum Kept {
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
        place: u8,
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
enum Stored {
    #[serde(rename = "1")]
    V1(Document),
}

impl Kept {
    /// Returns the file's name in the VM's directory.
    pub fn file(&self) -> String {
        match self {
            Kept::Disk { name, .. } => format!("{name}.qcow2"),
            Kept::AddedDisk { name, .. } => format!("{name}.added.qcow2"),
            Kept::FirmwareVariables {} => VARIABLES.to_owned(),
            Kept::FirmwareWritten { .. } => format!("{VARIABLES}.qcow2"),
        }
    }

    /// Returns a description for messages.
    pub fn what(&self) -> String {
        match self {
            Kept::Disk { name, .. } | Kept::AddedDisk { name, .. } => format!("disk {name}"),
            Kept::FirmwareVariables {} => "firmware variables".to_owned(),
            Kept::FirmwareWritten { .. } => "written firmware variables".to_owned(),
        }
    }

    /// Returns the disk's virtual size if the file is in qcow2.
    pub fn qcow2(&self) -> Option<u64> {
        match self {
            Kept::Disk { bytes, .. } | Kept::AddedDisk { bytes, .. } | Kept::FirmwareWritten { bytes } => Some(*bytes),
            Kept::FirmwareVariables {} => None,
        }
    }
}

fn field<T>(field: &'static str, value: impl ToString, rule: &'static str) -> Result<T, DocumentError> {
    let value = value.to_string().chars().filter(|c| !c.is_control()).take(100).collect();
    Err(DocumentError::Field { field, value, rule })
}

fn is_label(word: &str, upper: bool) -> bool {
    let right = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || upper && b.is_ascii_uppercase();
    !word.is_empty() && word.len() <= LONGEST && word.bytes().all(right)
}

impl Document {
    /// Serializes the document; the same VM always results in the same bytes.
    pub fn write(self) -> Result<Vec<u8>, DocumentError> {
        Ok(serde_json::to_vec(&Stored::V1(self))?)
    }

    /// Parses and checks the document of an artifact with this number of layers.
    pub fn read(bytes: &[u8], layers: usize) -> Result<Document, DocumentError> {
        let Stored::V1(document) = json::read(bytes)?;
        document.check()?;
        match document.files.len() {
            files if files == layers => Ok(document),
            files => Err(DocumentError::Layers { files, layers }),
        }
    }

    fn check(&self) -> Result<(), DocumentError> {
        for (key, word) in [("namespace", &self.namespace), ("name", &self.name)] {
            if !is_label(word, false) {
                return field(key, word, "1 to 63 small letters, digits and '-' are expected");
            }
        }
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let parts: Vec<&str> = self.uuid.split('-').collect();
        if parts.iter().map(|part| part.len()).ne([8, 4, 4, 4, 12]) || !parts.iter().all(|part| digits(part)) {
            return field("uuid", &self.uuid, "a UUID in small letters is expected");
        }
        self.mac_address()?;
        if let Some(image) = &self.image {
            if image.names.len() > MOST_NAMES {
                return field("image.names", image.names.len(), "at most 16 are possible");
            }
            if let Some(name) = image.names.iter().find(|name| Reference::parse(name).is_err()) {
                return field("image.names[]", name, "a reference of an image is expected");
            }
        }
        let plain = |name: &String| name.len() <= 64 && name.bytes().all(|b| b.is_ascii_graphic());
        if self.snapshots.len() > MOST_SNAPSHOTS || !self.snapshots.iter().all(plain) {
            return field("snapshots", self.snapshots.len(), "at most 100 names of 64 characters are possible");
        }
        self.check_files()
    }

    fn check_files(&self) -> Result<(), DocumentError> {
        if self.files.len() > MOST_FILES {
            return field("files", self.files.len(), "at most 64 are possible");
        }
        let mut names = BTreeSet::new();
        let mut total = 0u64;
        for File { kept, size, .. } in &self.files {
            if let Kept::Disk { name, over_image, .. } = kept {
                if !is_label(name, true) {
                    return field("files[].name", name, "1 to 63 letters, digits and '-' are expected");
                }
                if *over_image && self.image.is_none() {
                    return field("files[].overImage", true, "there is no image that it could lie over");
                }
            }
            if !names.insert(kept.file()) {
                return field("files[]", kept.what(), "there is another one of this name");
            }
            if kept.qcow2().is_some_and(|bytes| bytes == 0 || bytes > MAX_SIZE) {
                return field("files[].bytes", kept.what(), "a disk of 1 byte to 4 TiB is expected");
            }
            if kept.qcow2().is_none() && *size > MOST_VARIABLES {
                return field("files[].size", size, "firmware variables have at most 64 MiB");
            }
            let Some(sum) = total.checked_add(*size) else { return field("files[].size", size, "it is too much") };
            total = sum;
        }
        // Checked as the keeper reads it.
        let added = serde_json::to_vec(&self.added())?;
        if parse_hotplug_list(&added).is_err() {
            return field("files[]", self.added().len(), "disks were added that cannot be together");
        }
        if names.contains(&format!("{VARIABLES}.qcow2")) != names.contains(VARIABLES) {
            return field("files", VARIABLES, "what was written lies over what was there before: both are expected");
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
            _ => field("mac", &self.mac, "the address of one station is expected, as in 02:00:00:00:00:01"),
        }
    }

    /// Returns the hot-plugged disks.
    pub fn added(&self) -> Vec<HotplugDisk> {
        let one = |file: &File| match &file.kept {
            Kept::AddedDisk { name, place, bytes } => {
                Some(HotplugDisk { name: name.clone(), slot: *place, bytes: *bytes })
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
    pub fn record(&self, fresh: VmRecord, new_identity: bool) -> Result<VmRecord, DocumentError> {
        let image = self.image.as_ref().map(|image| image.id);
        if new_identity {
            return Ok(VmRecord { image, ..fresh });
        }
        let mac = self.mac_address()?;
        Ok(VmRecord { image, uuid: self.uuid.clone(), mac, created_at: self.created_at, ..fresh })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::Chain;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn document() -> Document {
        let file = |kept| File { kept, size: 1 << 20, digest: Digest([3; 32]) };
        Document {
            namespace: "default".into(),
            name: "db".into(),
            uuid: "01020304-0506-4708-890a-0b0c0d0e0f10".into(),
            mac: "02:00:00:00:00:01".into(),
            created_at: 5,
            image: Some(Image { id: Digest([7; 32]), names: vec!["docker.io/library/a:1".into()] }),
            secure_boot: false,
            snapshots: vec!["before".into()],
            files: vec![
                file(Kept::Disk { name: "root".into(), bytes: 1 << 30, over_image: true }),
                file(Kept::AddedDisk { name: "more".into(), place: 3, bytes: 1 << 20 }),
                file(Kept::FirmwareVariables {}),
                file(Kept::FirmwareWritten { bytes: 1 << 20 }),
            ],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let text = document().write().unwrap();
        assert_eq!(Document::read(&text, 4).unwrap(), document());
        let shown: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(
            (&shown["version"], &shown["files"][0]["kind"], &shown["files"][0]["overImage"]),
            (&json!("1"), &json!("disk"), &json!(true)),
            "{shown}"
        );
        let fresh = VmRecord::new("other", "db2", &[9; 22], 8);
        let same = document().record(fresh.clone(), false).unwrap();
        assert_eq!((same.id.as_str(), &same.uuid, same.mac), ("other/db2", &document().uuid, [2, 0, 0, 0, 0, 1]));
        assert_eq!((same.uid.as_str(), same.image), (fresh.uid.as_str(), Some(Digest([7; 32]))));
        let new = document().record(fresh.clone(), true).unwrap();
        assert_eq!((&new.uuid, new.mac, new.created_at), (&fresh.uuid, fresh.mac, 8));
    }

    #[test]
    fn what_a_stranger_wrote_is_checked() {
        let told = |pointer: &str, value: Value| {
            let mut changed = serde_json::to_value(Stored::V1(document())).unwrap();
            *changed.pointer_mut(pointer).unwrap() = value;
            Chain(&Document::read(changed.to_string().as_bytes(), 4).unwrap_err()).to_string()
        };
        let disk = json!({ "kind": "disk", "name": "a", "bytes": 5, "overImage": false, "size": 1, "digest": Digest([1; 32]) });
        for (pointer, value, words) in [
            ("/version", json!("2"), "unknown variant `2`"),
            ("/namespace", json!("../etc"), "namespace is \"../etc\""),
            ("/name", json!(""), "name is \"\""),
            ("/uuid", json!("01020304-0506-4708-890a-0b0c0d0e0f1"), "uuid is"),
            ("/uuid", json!("01020304-0506-4708-890a-0B0c0d0e0f10"), "small letters"),
            ("/mac", json!("01:00:00:00:00:01"), "one station"),
            ("/mac", json!("+2:00:00:00:00:01"), "one station"),
            ("/mac", json!("02:00:00:00:00"), "one station"),
            ("/image/id", json!("sha256:0"), "digest"),
            ("/image/names/0", json!("a b"), "image.names[]"),
            ("/image/names", json!(vec!["a"; 17]), "at most 16"),
            ("/snapshots", json!(vec!["a"; 101]), "at most 100"),
            ("/snapshots", json!(["a\n"]), "at most 100"),
            ("/files/0/name", json!("../../root"), "files[].name"),
            ("/files/0/name", json!("a".repeat(64)), "files[].name"),
            ("/files/0/name", json!("efi-variables"), "another one of this name"),
            ("/files/0/bytes", json!(0), "1 byte to 4 TiB"),
            ("/files/0/bytes", json!(u64::MAX), "1 byte to 4 TiB"),
            ("/files/0/kind", json!("passwd"), "unknown variant `passwd`"),
            ("/files/0/size", json!(u64::MAX), "too much"),
            ("/files/0/size", json!(-1), "invalid value"),
            ("/files/2/size", json!((64 << 20) + 1), "at most 64 MiB"),
            ("/files/3", disk.clone(), "both are expected"),
            ("/files/2", disk.clone(), "both are expected"),
            (
                "/files/0",
                json!({ "kind": "added-disk", "name": "a.b", "place": 0, "bytes": 5, "size": 1, "digest": Digest([1; 32]) }),
                "cannot be together",
            ),
            ("/files", json!(vec![disk.clone(); 65]), "at most 64"),
            ("/files", json!([disk]), "1 files, and it has 4 layers"),
            ("/image", Value::Null, "no image"),
        ] {
            let told = told(pointer, value);
            assert!(told.contains(words), "{words:?} in {told}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(at in 0..900usize, byte: u8) {
            let mut text = document().write().unwrap();
            if let Some(place) = text.get_mut(at) { *place = byte; }
            if let Ok(read) = Document::read(&text, 4) {
                for file in &read.files {
                    prop_assert!(!file.kept.file().contains('/'));
                }
            }
        }
    }
}
