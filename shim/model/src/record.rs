//! Defines the stored records of pods, containers and persistent VMs, and their encoding: JSON with a version tag.
//!
//! A new field needs a default. A change that an older record cannot express gets a new version. Golden files in `tests/golden` hold
//! the current versions. A record of another version is refused: a node is drained before an update that changes one.

use crate::checkpoint::{SavedContainer, SavedVolume};
use crate::container::{ContainerConfig, ContainerImage};
use crate::digest::{Digest, ImageId};
use crate::pod::PodConfig;
use crate::process::PodProcess;
use crate::resources::{PodResources, Resources, VmResources};
use crate::security::ContainerUser;
use crate::state;
use nacelle_base::timeline::TimelineStep;
use nacelle_base::{ContainerId, PodId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

/// A resource of a pod that could not be released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CleanupFailure {
    /// The resource: "machine", "network".
    pub what: String,
    /// The cause, on one line.
    pub why: String,
}

/// The record of a pod. Times are nanoseconds since 1970; 0 if the event has not happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRecord {
    /// The pod's id.
    pub id: PodId,
    /// The pod as requested; shared, because every change copies the record.
    pub config: Arc<PodConfig>,
    /// The runtime handler in use.
    pub handler: String,
    /// The pod's state.
    pub state: state::PodState,
    /// The time of the request.
    pub created_at: i64,
    /// The pod has been ready.
    #[serde(default)]
    pub was_ready: bool,
    /// The pod's agent applies AppArmor profiles: false in records from before it did.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub applies_profiles: bool,
    /// The IP addresses of the pod, the default one first.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    /// `uname -r` of the guest.
    #[serde(default)]
    pub kernel_release: String,
    /// The reason why the VM ended by itself; empty otherwise.
    #[serde(default)]
    pub failure: String,
    /// In state `Unclean`: the resources that remain.
    #[serde(default)]
    pub left: Vec<CleanupFailure>,
    /// The steps of the start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<TimelineStep>,
    /// The steps of the cleanup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ending: Vec<TimelineStep>,
    /// The resources of the VM; `None` in records from before this field existed and for pods without a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<VmResources>,
    /// The limits of the pod, if they changed after the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<PodResources>,
    /// The user id and the group id of the pod process, which no other pod has until this record is removed; `None` if it is root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// The pod process, from its start until all of its resources are released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<PodProcess>,
    /// The checkpoint from which the pod continues; `None` if it is a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<RestoredFrom>,
}

/// The checkpoint from which a pod continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredFrom {
    /// The id of the checkpoint.
    pub checkpoint: String,
    /// The containers that continue.
    pub containers: BTreeSet<ContainerId>,
    /// The names that the volumes of the node have in the guest, by what identifies the volume on the node.
    pub volumes: BTreeMap<String, String>,
    /// No request waits for all of the containers: the pod is no longer removed if the daemon ends.
    pub is_complete: bool,
    /// The containers that have not continued yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<WaitingContainer>,
}

/// A container of a checkpoint that is frozen in the VM of the pod. It continues as the first container of its name that is created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingContainer {
    /// Its id in this pod.
    pub id: ContainerId,
    /// The container as it was saved.
    pub saved: SavedContainer,
    /// How its images were laid out on the image disk; `None` if that is not known.
    pub layouts: Vec<(ImageId, Option<Digest>)>,
}

/// The record of a container. Times are nanoseconds since 1970; 0 if the event has not happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// The container's id.
    pub id: ContainerId,
    /// The pod of the container.
    pub pod: PodId,
    /// The container as requested; shared, because every change copies the record.
    pub config: Arc<ContainerConfig>,
    /// The limits, if they changed after the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// The image of the root file system.
    pub image: ContainerImage,
    /// The images of the image volumes, in the order of the volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<ContainerImage>,
    /// The absolute path of the log file; `None` if the container has no log.
    pub log_path: Option<std::path::PathBuf>,
    /// The container's state.
    pub state: state::ContainerState,
    /// The time of the request.
    pub created_at: i64,
    /// The time of the start.
    #[serde(default)]
    pub started_at: i64,
    /// The time of the exit.
    #[serde(default)]
    pub finished_at: i64,
    /// The exit code in state `Exited`.
    #[serde(default)]
    pub exit_code: i32,
    /// The kernel's OOM killer ended the container.
    #[serde(default)]
    pub oom_killed: bool,
    /// The start failed.
    #[serde(default)]
    pub start_failed: bool,
    /// The reason of a failed start or a loss; empty otherwise.
    #[serde(default)]
    pub message: String,
    /// The steps of creation and start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<TimelineStep>,
    /// The client received the id although the guest is still creating the container.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub answered: bool,
    /// The resolved user; `None` until the guest has created the container.
    #[serde(default)]
    pub user: Option<ContainerUser>,
    /// The number of the effective stop signal: that of the request, of the image, or SIGTERM. `None` until it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<u32>,
}

impl ContainerRecord {
    /// Returns the current limits.
    pub fn resources(&self) -> &Resources {
        self.resources.as_ref().unwrap_or(&self.config.resources)
    }

    /// Returns what a checkpoint has of the container, with these volumes in its VM.
    pub fn saved(&self, guest_volumes: Vec<SavedVolume>) -> SavedContainer {
        SavedContainer {
            guest_volumes,
            id: self.id.clone(),
            config: Arc::clone(&self.config),
            resources: self.resources.clone(),
            image: self.image.clone(),
            volumes: self.volumes.clone(),
            user: self.user.clone(),
            stop_signal: self.stop_signal,
            created_at: self.created_at,
            started_at: self.started_at,
        }
    }

    /// Returns whether a client can know the id.
    pub fn is_known(&self) -> bool {
        self.answered || self.user.is_some()
    }
}

/// The record of a persistent VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// Namespace and name, separated by a slash.
    pub id: String,
    /// The name of the directory with the VM's data: 32 hexadecimal digits.
    pub uid: String,
    /// The system UUID in SMBIOS.
    pub uuid: String,
    /// The MAC address of the first network card.
    pub mac: [u8; 6],
    /// The time at which a pod first named the VM, in nanoseconds since 1970.
    pub created_at: i64,
    /// The image under the first disk; `None` while the VM has no disk from an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    /// Further images under the disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_images: Vec<ImageId>,
    /// The id that pods expect of the VM (`vm.nacelle.dev/machine-id`); `None` if no pod has given one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
}

impl VmRecord {
    /// Returns all images under the disks.
    pub fn images(&self) -> impl Iterator<Item = ImageId> {
        self.image.into_iter().chain(self.more_images.iter().copied())
    }

    /// Creates the record of a VM whose identity is made of these random bytes.
    pub fn new(namespace: &str, name: &str, random: &[u8; 22], created_at: i64) -> VmRecord {
        let [a, b, c, d, e, f, identity @ ..] = *random;
        let mut uuid = identity;
        // RFC 9562, version 4.
        uuid[6] = (uuid[6] & 0x0f) | 0x40;
        uuid[8] = (uuid[8] & 0x3f) | 0x80;
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let [p, q, r, s, t] = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex);
        VmRecord {
            id: format!("{namespace}/{name}"),
            uid: hex(&uuid),
            uuid: format!("{p}-{q}-{r}-{s}-{t}"),
            mac: [(a & 0xfc) | 2, b, c, d, e, f],
            created_at,
            image: None,
            more_images: Vec::new(),
            machine_id: None,
        }
    }
}

/// A record cannot be decoded or encoded.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the record of {what} {id}{}", describe_version(other_version.as_deref()))]
pub struct RecordError {
    /// The kind of record: "pod", "container", "machine".
    pub what: &'static str,
    /// The key of the record.
    pub id: String,
    /// The version of the record if it is not the current one; `None` if the record is damaged.
    pub other_version: Option<String>,
    /// The cause.
    pub source: serde_json::Error,
}

fn describe_version(other: Option<&str>) -> String {
    other.map_or(": it is damaged".to_owned(), |version| {
        format!(
            ": another version of Nacelle wrote it (version {version} of the record); start that version, and drain the node before the update"
        )
    })
}

/// The version of a record of any version.
#[derive(Deserialize)]
struct VersionTag {
    version: String,
}

/// Returns the version of a record if it has one that is not `current`.
fn other_version(bytes: &[u8], current: &str) -> Option<String> {
    let tag: VersionTag = serde_json::from_slice(bytes).ok()?;
    (tag.version != current).then_some(tag.version)
}

macro_rules! stored {
    ($record:ident, $what:literal, $version:literal) => {
        const _: () = {
            #[derive(Deserialize)]
            #[serde(tag = "version")]
            enum Stored {
                #[serde(rename = $version)]
                Current($record),
            }

            #[derive(Serialize)]
            #[serde(tag = "version")]
            enum StoredRef<'a> {
                #[serde(rename = $version)]
                Current(&'a $record),
            }

            impl $record {
                /// Encodes the record with its version.
                pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
                    let id = self.id.to_string();
                    serde_json::to_vec(&StoredRef::Current(self)).map_err(|source| RecordError {
                        what: $what,
                        id,
                        other_version: None,
                        source,
                    })
                }

                /// Decodes the record that is stored under this key.
                pub fn decode(id: &str, bytes: &[u8]) -> Result<Self, RecordError> {
                    let Stored::Current(record) = serde_json::from_slice(bytes).map_err(|source| RecordError {
                        what: $what,
                        id: id.to_owned(),
                        other_version: other_version(bytes, $version),
                        source,
                    })?;
                    Ok(record)
                }
            }
        };
    };
}

stored!(PodRecord, "pod", "2");
stored!(ContainerRecord, "container", "1");
stored!(VmRecord, "machine", "1");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::namespace::NodeNamespaces;
    use crate::pod::PodKind;
    use crate::testing::{container, pod};

    /// The files were written once and never change: what a node has stored stays readable.
    #[test]
    fn current_versions_stay_readable() {
        let text = include_str!("../tests/golden/pod-v2.json");
        assert_eq!(PodRecord::decode("x", text.as_bytes()).unwrap(), pod(1));
        let text = include_str!("../tests/golden/container-v1.json");
        assert_eq!(ContainerRecord::decode("x", text.as_bytes()).unwrap(), container(2, 1));
        let text = include_str!("../tests/golden/machine-v1.json");
        assert_eq!(VmRecord::decode("x", text.as_bytes()).unwrap(), machine());
    }

    fn machine() -> VmRecord {
        let random = std::array::from_fn(|n| u8::try_from(n).unwrap());
        VmRecord { image: Some(Digest([7; 32])), ..VmRecord::new("default", "db", &random, 9) }
    }

    #[test]
    fn what_is_written_is_what_the_golden_files_say() {
        let value = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
        let text = include_str!("../tests/golden/pod-v2.json");
        assert_eq!(value(&pod(1).encode().unwrap()), value(text.as_bytes()));
        let text = include_str!("../tests/golden/container-v1.json");
        assert_eq!(value(&container(2, 1).encode().unwrap()), value(text.as_bytes()));
        let text = include_str!("../tests/golden/machine-v1.json");
        assert_eq!(value(&machine().encode().unwrap()), value(text.as_bytes()));
    }

    #[test]
    fn a_pod_is_stored_with_how_its_process_is_found() {
        let mut value: serde_json::Value = serde_json::from_str(include_str!("../tests/golden/pod-v2.json")).unwrap();
        let process = serde_json::json!({
            "identity": { "pid": 7, "start_time": 8, "boot_id": "b" },
            "cgroup": "nacelle/a",
            "scratch": "/var/lib/nacelle/scratch/pod-a.ext4",
        });
        value.as_object_mut().unwrap().insert("process".to_owned(), process);
        let record = PodRecord::decode("x", value.to_string().as_bytes()).unwrap();
        assert_eq!(record.process.as_ref().map(|process| process.identity.pid), Some(7));
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&record.encode().unwrap()).unwrap(), value);
    }

    #[test]
    fn a_persistent_vm_is_stored_with_its_machine_id() {
        let record = VmRecord { machine_id: Some("one".into()), ..machine() };
        let bytes = record.encode().unwrap();
        let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(value["machine_id"], "one");
        assert_eq!(VmRecord::decode("x", &bytes).unwrap(), record);
    }

    #[test]
    fn a_machine_pod_is_stored_with_its_machine() {
        let text = include_str!("../tests/golden/machine-pod-v2.json");
        let record = PodRecord::decode("x", text.as_bytes()).unwrap();
        let machine = record.config.kind.machine().unwrap();
        assert_eq!((machine.memory_mib, machine.processors.count(), machine.disks.len()), (512, 2, 1));
        assert_eq!(record.config.kind.persistent_vm(), Some("default/db"));
        let value = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
        assert_eq!(value(&record.encode().unwrap()), value(text.as_bytes()));
    }

    #[test]
    fn kinds_of_pods_are_stored_by_name() {
        let kind = |text: &str| serde_json::from_str::<PodKind>(text).unwrap();
        assert_eq!(kind(r#"{ "containers": {} }"#), PodKind::default());
        let namespaces = NodeNamespaces { network: true, ..NodeNamespaces::default() };
        assert_eq!(kind(r#"{ "host": { "namespaces": { "network": true } } }"#), PodKind::Host { namespaces });
        assert_eq!(
            serde_json::to_value(PodKind::Host { namespaces: NodeNamespaces::default() }).unwrap(),
            serde_json::json!({ "host": {} })
        );
        assert!(serde_json::from_str::<PodKind>(r#"{ "machine": {} }"#).is_err(), "a machine pod has a machine");
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let text = include_str!("../tests/golden/pod-v2.json").replace(r#""version": "2""#, r#""version": "9""#);
        let error = PodRecord::decode("abc", text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("pod abc") && error.to_string().contains("version 9"), "{error}");
        assert_eq!(error.other_version.as_deref(), Some("9"));
        let damaged = PodRecord::decode("abc", b"{\"version\": \"2\"").unwrap_err();
        assert!(damaged.other_version.is_none() && damaged.to_string().contains("damaged"), "{damaged}");
        // Version 1 had no `kind`: its fields must not be misread.
        let text = include_str!("../tests/golden/pod-v1.json");
        assert!(PodRecord::decode("abc", text.as_bytes()).is_err());
    }
}
