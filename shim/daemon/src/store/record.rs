//! Owns: what is stored of a pod and of a container: tagged with a version, golden files beside the tests.
//! A new field has a default; a new version is another variant and a conversion.

use crate::lifecycle::state;
use crate::nouns::{ContainerConfig, ImageOf, MachineSize, PodConfig, PodResources, Resources, User};
use nacelle_base::timeline::Step;
use nacelle_base::{ContainerId, PodId};
use nacelle_image::ImageId;
use nacelle_pod::client::Started;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::sync::Arc;

/// Something that could not be given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// "machine", "network".
    pub what: String,
    /// Why, on one line.
    pub why: String,
}

/// A pod. Times are nanoseconds since 1970; 0: not yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRecord {
    /// Its id.
    pub id: PodId,
    /// As it was asked for; shared, because records are copied with every change.
    pub config: Arc<PodConfig>,
    /// The handler that was chosen.
    pub handler: String,
    /// Its state.
    pub state: state::Pod,
    /// When it was asked for.
    pub created_at: i64,
    /// It was ready once.
    #[serde(default)]
    pub was_ready: bool,
    /// Its addresses, the default one first.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    /// `uname -r` of the guest.
    #[serde(default)]
    pub kernel_release: String,
    /// Why the machine is gone, if it ended by itself.
    #[serde(default)]
    pub failure: String,
    /// In state Unclean: what is still there.
    #[serde(default)]
    pub left: Vec<Left>,
    /// How it came up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<Step>,
    /// How it was given back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ending: Vec<Step>,
    /// What its machine was made with; none: before that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineSize>,
    /// What it may have, if that was said since it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<PodResources>,
    /// How its process is found again, from that process's start until all of it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Started>,
}

/// A container. Times are nanoseconds since 1970; 0: not yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// Its id.
    pub id: ContainerId,
    /// Its pod.
    pub pod: PodId,
    /// As it was asked for; shared, because records are copied with every change.
    pub config: Arc<ContainerConfig>,
    /// Its limits, if they were changed since it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Its image.
    pub image: ImageOf,
    /// Those of its volumes, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<ImageOf>,
    /// Its log file, absolute; none: no log.
    pub log_path: Option<std::path::PathBuf>,
    /// Its state.
    pub state: state::Container,
    /// When it was asked for.
    pub created_at: i64,
    /// When it started.
    #[serde(default)]
    pub started_at: i64,
    /// When it ended.
    #[serde(default)]
    pub finished_at: i64,
    /// With state Exited.
    #[serde(default)]
    pub exit_code: i32,
    /// The kernel's OOM killer ended it.
    #[serde(default)]
    pub oom_killed: bool,
    /// It could not be started.
    #[serde(default)]
    pub start_failed: bool,
    /// Why it could not be started or was lost.
    #[serde(default)]
    pub message: String,
    /// How it was made and started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<Step>,
    /// Whoever asked for it may know its id, though the guest still makes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub answered: bool,
    /// Who it runs as; none: not made yet.
    #[serde(default)]
    pub user: Option<User>,
}

impl ContainerRecord {
    /// Its limits as they are.
    pub fn resources(&self) -> &Resources {
        self.resources.as_ref().unwrap_or(&self.config.resources)
    }

    /// Whether anybody but us can know its id.
    pub fn is_known(&self) -> bool {
        self.answered || self.user.is_some()
    }
}

/// A machine that outlives its pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// Namespace and name, with a slash between them.
    pub id: String,
    /// Names what it keeps: 32 hexadecimal digits.
    pub uid: String,
    /// Its identity in SMBIOS.
    pub uuid: String,
    /// Of its first network card.
    pub mac: [u8; 6],
    /// When it was first named, in nanoseconds since 1970.
    pub created_at: i64,
    /// The image that its first disk was made of; none: of none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    /// Other images under its disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_images: Vec<ImageId>,
}

impl VmRecord {
    /// All images under its disks.
    pub fn images(&self) -> impl Iterator<Item = ImageId> {
        self.image.into_iter().chain(self.more_images.iter().copied())
    }

    /// A machine with an identity of these random bytes.
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
        }
    }
}

/// A record that this version cannot read or write.
#[derive(Debug, thiserror::Error)]
#[error("the record of {what} {id} is not one that this version of Nacelle knows")]
pub struct RecordError {
    /// "pod", "container", "machine".
    pub what: &'static str,
    /// Its key.
    pub id: String,
    /// Where and why.
    pub source: serde_json::Error,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "version")]
enum Stored<T> {
    #[serde(rename = "1")]
    V1(T),
}

#[derive(Serialize)]
#[serde(tag = "version")]
enum StoredRef<'a, T> {
    #[serde(rename = "1")]
    V1(&'a T),
}

macro_rules! stored {
    ($record:ty, $what:literal) => {
        impl $record {
            pub(super) fn encode(&self) -> Result<Vec<u8>, RecordError> {
                let id = self.id.to_string();
                serde_json::to_vec(&StoredRef::V1(self)).map_err(|source| RecordError { what: $what, id, source })
            }

            pub(super) fn decode(id: &str, bytes: &[u8]) -> Result<Self, RecordError> {
                let Stored::V1(record) = serde_json::from_slice(bytes).map_err(|source| RecordError {
                    what: $what,
                    id: id.to_owned(),
                    source,
                })?;
                Ok(record)
            }
        }
    };
}

stored!(PodRecord, "pod");
stored!(ContainerRecord, "container");
stored!(VmRecord, "machine");

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::nouns::*;
    use nacelle_image::Digest;

    pub(crate) fn pod(n: u8) -> PodRecord {
        PodRecord {
            id: PodId::from_bytes([n; 32]),
            config: Arc::new(PodConfig {
                name: PodName { name: "web".into(), namespace: "default".into(), uid: format!("u{n}"), attempt: 1 },
                handler: String::new(),
                hostname: "web".into(),
                log_directory: Some("/var/log/pods/web".into()),
                dns: Some(nacelle_net::Dns { servers: vec!["10.0.0.10".into()], searches: vec![], options: vec![] }),
                ports: vec![nacelle_net::PortMapping {
                    host_port: 8080,
                    container_port: 80,
                    protocol: nacelle_net::Protocol::Tcp,
                    host_ip: None,
                }],
                labels: [("app".to_owned(), "web".to_owned())].into(),
                annotations: Pairs::new(),
                sysctls: Pairs::new(),
                shared_pid: true,
                node_namespaces: Default::default(),
                on_host: false,
                user_namespace: None,
                empty_dirs: None,
                machine: None,
                shape: None,
                vm: None,
                privileged: false,
                memory_limit: Some(1 << 28),
                overhead_memory: None,
                overhead_cpu_milli: None,
                cpu_limit_milli: None,
                cgroup_parent: None,
            }),
            handler: "nacelle".into(),
            state: state::Pod::Ready,
            created_at: 5,
            was_ready: true,
            ips: vec![IpAddr::from([10, 1, 2, 3])],
            kernel_release: "6.12.0".into(),
            failure: String::new(),
            left: vec![],
            timeline: vec![],
            ending: vec![],
            machine: None,
            resources: None,
            process: None,
        }
    }

    pub(crate) fn container(n: u8, of: u8) -> ContainerRecord {
        ContainerRecord {
            id: ContainerId::from_bytes([n; 32]),
            pod: PodId::from_bytes([of; 32]),
            config: Arc::new(ContainerConfig {
                name: "c".into(),
                attempt: 0,
                image: "busybox".into(),
                user_image: "busybox".into(),
                command: vec!["/bin/sh".into()],
                args: vec!["-c".into(), "true".into()],
                working_dir: String::new(),
                envs: vec![("A".into(), "b".into())],
                labels: Pairs::new(),
                annotations: Pairs::new(),
                log_path: "c/0.log".into(),
                stdin: false,
                stdin_once: false,
                tty: false,
                stop_signal: None,
                resources: Resources::default(),
                privileged: false,
                capabilities: Capabilities::default(),
                pid: PidMode::Pod,
                run_as: RunAs::default(),
                readonly_rootfs: false,
                no_new_privs: true,
                masked_paths: vec!["/proc/kcore".into()],
                readonly_paths: vec![],
                seccomp: Seccomp::RuntimeDefault,
                volumes: vec![],
                node_volumes: vec![],
                devices: vec![],
            }),
            resources: None,
            image: ImageOf { id: Digest([7; 32]), reference: "docker.io/library/busybox@sha256:aa".into() },
            volumes: vec![],
            log_path: Some("/var/log/pods/web/c/0.log".into()),
            state: state::Container::Exited,
            created_at: 6,
            started_at: 7,
            finished_at: 8,
            exit_code: 3,
            oom_killed: false,
            start_failed: false,
            message: String::new(),
            timeline: vec![],
            answered: false,
            user: Some(User { uid: 1000, gid: 1000, groups: vec![5] }),
        }
    }

    /// The files were written once and never change: what a node has stored stays readable.
    #[test]
    fn version_1_stays_readable() {
        let text = include_str!("../../tests/golden/pod-v1.json");
        assert_eq!(PodRecord::decode("x", text.as_bytes()).unwrap(), pod(1));
        let text = include_str!("../../tests/golden/container-v1.json");
        assert_eq!(ContainerRecord::decode("x", text.as_bytes()).unwrap(), container(2, 1));
        let text = include_str!("../../tests/golden/machine-v1.json");
        assert_eq!(VmRecord::decode("x", text.as_bytes()).unwrap(), machine());
    }

    fn machine() -> VmRecord {
        let random = std::array::from_fn(|n| u8::try_from(n).unwrap());
        VmRecord { image: Some(Digest([7; 32])), ..VmRecord::new("default", "db", &random, 9) }
    }

    #[test]
    fn what_is_written_is_what_version_1_says() {
        let value = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
        let text = include_str!("../../tests/golden/pod-v1.json");
        assert_eq!(value(&pod(1).encode().unwrap()), value(text.as_bytes()));
        let text = include_str!("../../tests/golden/container-v1.json");
        assert_eq!(value(&container(2, 1).encode().unwrap()), value(text.as_bytes()));
        let text = include_str!("../../tests/golden/machine-v1.json");
        assert_eq!(value(&machine().encode().unwrap()), value(text.as_bytes()));
    }

    #[test]
    fn a_pod_is_stored_with_how_its_process_is_found() {
        let mut value: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/golden/pod-v1.json")).unwrap();
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
    fn another_version_is_refused_by_name() {
        let text = include_str!("../../tests/golden/pod-v1.json").replace(r#""version": "1""#, r#""version": "9""#);
        let error = PodRecord::decode("abc", text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("pod abc"), "{error}");
    }
}
