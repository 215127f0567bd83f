//! Defines the files of a checkpoint and its manifest: what a restore must know before it starts a VM. The manifest is JSON with a
//! version. It has the environment of the containers, which may hold secrets, so only root may read it.
//!
//! Any change that an older Nacelle must not ignore gets a new version, also one of the types that the manifest takes from the records of
//! pods and containers. A golden file in `tests/golden` holds the current version.

use crate::container::{ContainerConfig, ContainerImage};
use crate::digest::{Digest, ImageId};
use crate::pod::PodConfig;
use crate::resources::{PodResources, Resources};
use crate::security::ContainerUser;
use nacelle_base::json::{MAX_VALUES, count_values};
use nacelle_base::machine::{ConsoleKind, CpuModel, Topology};
use nacelle_base::{ContainerId, PodId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// The file with the state of the VM's vCPUs and devices.
pub const STATE_FILE: &str = "state";
/// The file with the memory of the VM: sparse, as long as all memory that the VM can have.
pub const MEMORY_FILE: &str = "memory";
/// The file with the scratch disk: sparse, an ext4 file system.
pub const SCRATCH_FILE: &str = "scratch";
/// The file with the manifest.
pub const MANIFEST_FILE: &str = "pod";
/// The empty file that is written last. A directory without it has no complete checkpoint.
pub const COMPLETE_FILE: &str = "complete";

/// The version of the manifest's format.
pub const VERSION: u32 = 1;

/// The largest manifest in bytes. It has at most [`MAX_VALUES`] JSON values.
pub const MAX_MANIFEST_BYTES: usize = 16 << 20;

/// The manifest of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointManifest {
    /// The format version, [`VERSION`].
    pub version: u32,
    /// The random id of the checkpoint: 32 hexadecimal digits.
    pub id: String,
    /// The version of the Nacelle that has written the checkpoint.
    pub nacelle_version: String,
    /// The time of the request in nanoseconds since 1970.
    pub created_at: i64,
    /// The id of the pod that was saved.
    pub pod_id: PodId,
    /// The runtime handler of the pod.
    pub handler: String,
    /// The pod as requested.
    pub pod: Arc<PodConfig>,
    /// The limits of the pod, if they changed after the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_resources: Option<PodResources>,
    /// The VM.
    pub vm: SavedVm,
    /// The containers that ran.
    pub containers: Vec<SavedContainer>,
    /// The containers that did not run: they are not in the checkpoint.
    pub other_containers: Vec<ContainerId>,
    /// The images on the image disk of the VM.
    pub images: Vec<SavedImagePlacement>,
    /// The containers some of whose output is in the memory of the VM and not in their logs.
    pub undrained: Vec<ContainerId>,
    /// The sizes of the files.
    pub files: SavedFileSizes,
}

/// The devices and resources of a saved VM: a VM that continues must have the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVm {
    /// The version of the format of the file [`STATE_FILE`].
    pub state_version: u32,
    /// The lines of `/proc/cpuinfo` that tell CPUs apart, of the node's first CPU.
    pub node_cpu: Vec<String>,
    /// The number of vCPUs that were online when the VM started.
    pub vcpus: u32,
    /// The number of vCPUs with which the VM was created.
    pub max_vcpus: u32,
    /// The topology of the vCPUs; `None` for cores of one socket.
    pub topology: Option<Topology>,
    /// The CPU model of the guest; `None` for all features of the node's CPUs.
    pub cpu_model: Option<CpuModel>,
    /// The memory in MiB with which the kernel was started.
    pub booted_mib: u32,
    /// The memory in MiB that was added when the pod started.
    pub added_mib: u32,
    /// The reserve in MiB, which a resize brings into use.
    pub reserve_mib: u32,
    /// The bytes of the reserve that were in use.
    pub reserve_used_bytes: u64,
    /// The size of the scratch disk in MiB.
    pub scratch_mib: u64,
    /// The kind of the console device.
    pub console: ConsoleKind,
    /// The names of the pod's network interfaces, each with one network card in this order.
    pub interfaces: Vec<String>,
    /// The path of the guest's kernel on the node. The kernel itself is in the memory.
    pub kernel: PathBuf,
    /// `uname -r` of the guest.
    pub kernel_release: String,
    /// The additional kernel command-line parameters.
    pub kernel_args: Vec<String>,
}

/// A container that ran when its pod was saved. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedContainer {
    /// The id of the container, also in the guest.
    pub id: ContainerId,
    /// The container as requested.
    pub config: Arc<ContainerConfig>,
    /// The limits, if they changed after the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// The image of the root file system.
    pub image: ContainerImage,
    /// The images of the image volumes, in the order of the volumes.
    pub volumes: Vec<ContainerImage>,
    /// The volumes of the node whose content is in the VM.
    pub guest_volumes: Vec<SavedVolume>,
    /// The resolved user.
    pub user: Option<ContainerUser>,
    /// The number of the stop signal.
    pub stop_signal: Option<u32>,
    /// The time of the request.
    pub created_at: i64,
    /// The time of the start.
    pub started_at: i64,
}

/// A volume of the node that was copied into the VM, or that is an emptyDir in its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVolume {
    /// The path in the container.
    pub container_path: String,
    /// The name in the guest.
    pub name: String,
}

/// The longest name of a volume in a guest in bytes.
const MAX_VOLUME_NAME: usize = 128;

impl SavedVolume {
    /// Whether the name can be that of a volume in a guest, which becomes the name of a directory.
    pub fn is_valid(&self) -> bool {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let name = &self.name;
        (1..=MAX_VOLUME_NAME).contains(&name.len()) && !name.starts_with('.') && name.chars().all(plain)
    }
}

/// The range of the image disk that has an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedImagePlacement {
    /// The id of the image.
    pub image: ImageId,
    /// The number of the partition, 1 to 255.
    pub partition: u32,
    /// The position on the disk in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
    /// The digest of how the image is laid out there: the guest has mounted it, and finds it again only in an image with the same. `None`
    /// if the node did not have the image any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Digest>,
}

/// The lengths of the three files of the VM in bytes, holes included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFileSizes {
    /// The length of [`STATE_FILE`].
    pub state: u64,
    /// The length of [`MEMORY_FILE`].
    pub memory: u64,
    /// The length of [`SCRATCH_FILE`].
    pub scratch: u64,
}

/// A manifest cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointManifestError {
    /// Another version of Nacelle has written the manifest.
    #[error("cannot read a checkpoint of version {got}: this version of Nacelle reads version {VERSION} only")]
    Version {
        /// The version in the manifest.
        got: u64,
    },
    /// The manifest is too long.
    #[error(
        "the manifest of a checkpoint has {bytes} bytes (maximum {MAX_MANIFEST_BYTES}) and {values} values (maximum {MAX_VALUES})"
    )]
    TooLong {
        /// The length in bytes.
        bytes: usize,
        /// The number of JSON values, keys included.
        values: usize,
    },
    /// The text is not a manifest.
    #[error("the manifest of a checkpoint is damaged")]
    Format(#[from] serde_json::Error),
}

impl CheckpointManifest {
    /// Encodes the manifest as indented JSON.
    ///
    /// # Errors
    /// The manifest is so long that it could not be read.
    pub fn encode(&self) -> Result<Vec<u8>, CheckpointManifestError> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        check_length(&bytes)?;
        Ok(bytes)
    }

    /// Decodes a manifest. Its values are not trusted: a restore must check them like those of a request.
    ///
    /// # Errors
    /// The text is too long, damaged, or of another version.
    pub fn decode(bytes: &[u8]) -> Result<CheckpointManifest, CheckpointManifestError> {
        check_length(bytes)?;
        let value: serde_json::Value = nacelle_base::json::read(bytes)?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(got) if got != u64::from(VERSION) => Err(CheckpointManifestError::Version { got }),
            _ => Ok(serde_json::from_value(value)?),
        }
    }
}

fn check_length(text: &[u8]) -> Result<(), CheckpointManifestError> {
    match (text.len(), count_values(text)) {
        (bytes, values) if bytes > MAX_MANIFEST_BYTES || values > MAX_VALUES => {
            Err(CheckpointManifestError::TooLong { bytes, values })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{container, pod};

    const GOLDEN: &str = include_str!("../tests/golden/checkpoint-v1.json");

    fn sample() -> CheckpointManifest {
        let pod = pod(1);
        let volume = SavedVolume { container_path: "/config".into(), name: "configmap.conf.0123456789abcdef".into() };
        CheckpointManifest {
            version: VERSION,
            id: "0123456789abcdef0123456789abcdef".into(),
            nacelle_version: "0.2.0".into(),
            created_at: 9,
            pod_id: pod.id,
            handler: pod.handler,
            pod: pod.config,
            pod_resources: None,
            vm: SavedVm {
                state_version: 1,
                node_cpu: vec!["flags\t\t: fpu".into()],
                vcpus: 1,
                max_vcpus: 2,
                topology: None,
                cpu_model: None,
                booted_mib: 256,
                added_mib: 128,
                reserve_mib: 512,
                reserve_used_bytes: 128 << 20,
                scratch_mib: 64,
                console: ConsoleKind::Virtio,
                interfaces: vec!["eth0".into()],
                kernel: "/usr/lib/nacelle/vmlinux".into(),
                kernel_release: pod.kernel_release,
                kernel_args: vec!["quiet".into()],
            },
            containers: vec![container(2, 1).saved(vec![volume])],
            other_containers: vec![ContainerId::from_bytes([3; 32])],
            images: vec![SavedImagePlacement {
                image: Digest([7; 32]),
                partition: 1,
                offset: 1 << 20,
                length: 4096,
                layout: Some(Digest([8; 32])),
            }],
            undrained: vec![ContainerId::from_bytes([2; 32])],
            files: SavedFileSizes { state: 1000, memory: 896 << 20, scratch: 64 << 20 },
        }
    }

    /// The file never changes once a release has written it: a checkpoint stays readable.
    #[test]
    fn the_current_version_stays_readable() {
        assert_eq!(String::from_utf8(sample().encode().unwrap()).unwrap(), GOLDEN);
        assert_eq!(CheckpointManifest::decode(GOLDEN.as_bytes()).unwrap(), sample());
    }

    #[test]
    fn the_name_of_a_volume_is_that_of_a_directory() {
        let is_valid = |name: &str| SavedVolume { container_path: "/v".into(), name: name.into() }.is_valid();
        assert!(is_valid("configmap.conf.0123456789abcdef") && is_valid("0a.1") && is_valid(&"x".repeat(128)));
        for name in ["", ".", "..", ".x", "a/b", "../x", "a b", "\u{e4}", "a\0", &"x".repeat(129)] {
            assert!(!is_valid(name), "{name:?}");
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(256))]
        #[test]
        fn a_damaged_manifest_is_read_or_refused(at in 0..GOLDEN.len(), byte in 0..=255_u8) {
            let mut bytes = GOLDEN.as_bytes().to_vec();
            bytes[at] = byte;
            if let Ok(manifest) = CheckpointManifest::decode(&bytes) {
                let encoded = manifest.encode().unwrap();
                proptest::prop_assert_eq!(CheckpointManifest::decode(&encoded).unwrap(), manifest);
            }
            let _ = CheckpointManifest::decode(&bytes[..at]);
        }
    }

    #[test]
    fn other_versions_and_unknown_fields_are_refused() {
        let newer = GOLDEN.replace("\"version\": 1,", "\"version\": 2, \"more\": true,");
        let error = CheckpointManifest::decode(newer.as_bytes()).unwrap_err();
        assert!(matches!(error, CheckpointManifestError::Version { got: 2 }), "{error}");
        for (text, replacement) in [
            ("\"handler\":", "\"more\": true, \"handler\":"),
            ("\"state_version\":", "\"more\": true, \"state_version\":"),
            ("\"version\": 1,", ""),
        ] {
            let other = GOLDEN.replacen(text, replacement, 1);
            assert_ne!(other, GOLDEN);
            let error = CheckpointManifest::decode(other.as_bytes()).unwrap_err();
            assert!(matches!(error, CheckpointManifestError::Format(_)), "{text}: {error}");
        }
        let long = vec![b' '; MAX_MANIFEST_BYTES + 1];
        assert!(matches!(CheckpointManifest::decode(&long), Err(CheckpointManifestError::TooLong { .. })));
    }
}
