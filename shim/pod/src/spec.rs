//! Defines the pod process's specification: `DIR/spec.json`, which the daemon writes and the process reads once at its
//! start. This module performs no I/O besides reading and writing that file.

pub use crate::restore::{CheckpointBase, CheckpointImage, CheckpointedContainer};
use crate::template::PodTemplate;
use nacelle_base::disk_limits::DiskLimits;
use nacelle_base::files::{FileError, at, write_whole};
use nacelle_base::machine::{ConsoleKind, CpuModel, MemoryPages, Topology};
use nacelle_base::{Classify, FailureKind, PodId};
pub use nacelle_jail::Mode as Seccomp;
use nacelle_model::namespace::{NodeNamespaces, UserNamespace};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The version of this file's format.
pub const VERSION: u32 = 1;

/// The name of the file in the pod's run directory.
pub const FILE: &str = "spec.json";

/// The smallest memory of a guest in MiB.
pub const MIN_MEMORY_MIB: u32 = 64;

/// The specification of one PodSandbox. The fields are public data; callers must validate them with [`PodSpec::check`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodSpec {
    /// The format version, [`VERSION`].
    pub version: u32,
    /// The id of the PodSandbox.
    pub id: PodId,
    /// The engine that runs the pod.
    pub engine: EngineSpec,
    /// The number of vCPUs that are online from the start, 1 or more.
    pub vcpus: u32,
    /// The number of vCPUs with which the VM is created, if larger; the further ones are offline until a resize.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_vcpus: Option<u32>,
    /// The topology of the vCPUs; `None` for cores of one socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
    /// The CPU model that the guest sees; `None` for all features of the node's CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<CpuModel>,
    /// The memory of the guest in MiB, [`MIN_MEMORY_MIB`] or more.
    pub memory_mib: u32,
    /// The hot-plug memory of the VM in MiB, which a resize brings into use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_memory_mib: Option<u32>,
    /// The page size that backs the VM's memory on the node.
    #[serde(default)]
    pub memory_pages: MemoryPages,
    /// The kind of the guest's console device.
    #[serde(default)]
    pub console: ConsoleKind,
    /// The absolute path of the guest's kernel.
    pub kernel: PathBuf,
    /// The absolute path of the guest's initramfs.
    pub initrd: PathBuf,
    /// Additional kernel command-line parameters.
    #[serde(default)]
    pub kernel_args: Vec<String>,
    /// The template from which the VM is restored if it can be used; `None`: the VM boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
    /// The checkpoint from which the VM continues; `None`: the pod is a new one. vCPUs, memory, console and scratch disk are those of the
    /// saved VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointBase>,
    /// The network namespace and its interfaces; `None` for a pod without network.
    #[serde(default)]
    pub network: Option<NetworkSpec>,
    /// The host name of the guest.
    pub hostname: String,
    /// The sysctls of the pod: "net.ipv4.ip_forward" -> "1".
    #[serde(default)]
    pub sysctls: BTreeMap<String, String>,
    /// All containers share one PID namespace.
    #[serde(default)]
    pub shared_pid: bool,
    /// The containers' user namespace; `None` if they use that of the guest or of the node.
    #[serde(default)]
    pub user_namespace: Option<UserNamespace>,
    /// The size of the pod's /dev/shm in bytes; 0 for the agent's default.
    #[serde(default)]
    pub shm_bytes: u64,
    /// The disk for writable layers.
    pub scratch: ScratchSpec,
    /// The limits of the pod on the disk of its scratch disk; `None` for none.
    #[serde(default)]
    pub disk_limits: Option<DiskLimits>,
    /// The number of seconds for which the guest may cache names and attributes of files on volumes of the node.
    #[serde(default)]
    pub volume_cache_seconds: u64,
    /// Containers may have socket volumes: the guest may open connections, and `nacelle-fs` may connect sockets.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_sockets: bool,
    /// The time limits.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// The jail of the process, entered before the VM starts; `None` for no jail.
    #[serde(default)]
    pub jail: Option<JailSpec>,
}

/// The jail of the pod process. Whatever is not named here follows from the rest of the specification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JailSpec {
    /// The reaction to a system call that is not on the list.
    pub seccomp: Seccomp,
    /// The directory of the image store's layers, which QEMU of a machine pod reads by path; `None` for other pods.
    #[serde(alias = "image_store")]
    pub image_layers: Option<PathBuf>,
    /// The process's cgroup, relative to the root of each hierarchy; `None` if it stays where it is.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// The user id and the group id of the process; `None` if it stays root. Only for a VM of a container pod.
    #[serde(default)]
    pub user: Option<u32>,
}

/// The engine and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum EngineSpec {
    /// Nacelle's own VMM.
    Kvm {},
    /// QEMU.
    Qemu {
        /// The absolute path of the QEMU program.
        binary: PathBuf,
        /// The accelerator that the daemon's probe chose for this node.
        accelerator: Accelerator,
    },
    /// No guest: the agent runs in namespaces of the node.
    Host {
        /// The absolute path of the agent's program.
        agent: PathBuf,
        /// The namespaces that the pod shares with the node.
        #[serde(default)]
        shares: NodeNamespaces,
    },
    /// A machine pod: the keeper runs the pod's own machine in QEMU.
    Keeper {
        /// The absolute path of the keeper's program.
        program: PathBuf,
        /// The absolute path of the QEMU program.
        qemu: PathBuf,
        /// The accelerator that the daemon's probe chose for this node.
        accelerator: Accelerator,
        /// The directory of the machine's persistent state, if the machine outlives the pod.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        keep: Option<PathBuf>,
        /// The number of directories of the node that are shared with the guest.
        #[serde(default, skip_serializing_if = "is_zero")]
        shares: usize,
    },
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl EngineSpec {
    /// Returns whether the pod has a VM, and so vCPUs and memory of its own.
    pub fn has_vm(&self) -> bool {
        !matches!(self, EngineSpec::Host { .. })
    }

    /// Returns whether the pod is a container VM, which has disks for images, writable layers and volumes.
    pub fn has_disks(&self) -> bool {
        matches!(self, EngineSpec::Kvm {} | EngineSpec::Qemu { .. })
    }
}

/// What executes the guest's instructions under QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The CPU, through /dev/kvm.
    Kvm,
    /// QEMU's emulator (TCG).
    Tcg,
}

/// The pod's network namespace and interfaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// The absolute path of the network namespace's file.
    pub netns: PathBuf,
    /// The names of the interfaces that CNI creates ("eth0"), each with one tap and one guest NIC, in this order.
    pub interfaces: Vec<String>,
    /// The number of queues of each tap, for machine pods; 1 where a number is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<u32>,
}

/// The scratch disk: a sparse ext4 file, copied from a template that is made once per size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScratchSpec {
    /// The size in MiB; blocks are allocated when they are written.
    pub size_mib: u64,
    /// The absolute path of the directory for templates and disks; created if missing. It should be on a file system with
    /// space for what containers write.
    pub templates: PathBuf,
}

/// Time limits in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// The limit from the start of the VM to the agent's hello.
    pub boot_ms: u64,
    /// The limit from sending the configuration to the agent's report.
    pub configure_ms: u64,
    /// The limit for one request to the agent that waits for nothing in the guest.
    pub call_ms: u64,
    /// The limit from the Shutdown request to the end of the VM.
    pub shutdown_ms: u64,
}

impl Default for Timeouts {
    /// The defaults are generous, because software emulation on a busy node is slow.
    fn default() -> Self {
        Self { boot_ms: 120_000, configure_ms: 60_000, call_ms: 60_000, shutdown_ms: 10_000 }
    }
}

impl Timeouts {
    /// Returns `boot_ms` as a duration.
    pub fn boot(&self) -> Duration {
        Duration::from_millis(self.boot_ms)
    }

    /// Returns `configure_ms` as a duration.
    pub fn configure(&self) -> Duration {
        Duration::from_millis(self.configure_ms)
    }

    /// Returns `call_ms` as a duration.
    pub fn call(&self) -> Duration {
        Duration::from_millis(self.call_ms)
    }

    /// Returns `shutdown_ms` as a duration.
    pub fn shutdown(&self) -> Duration {
        Duration::from_millis(self.shutdown_ms)
    }
}

/// A specification is invalid.
#[derive(Debug, thiserror::Error)]
pub enum PodSpecError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not the JSON of a specification.
    #[error("{} is not a pod specification", path.display())]
    Format {
        /// The path of the file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// The file has another format version.
    #[error("the pod specification has version {got}; this program supports only version {VERSION}")]
    Version {
        /// The version of the file.
        got: u32,
    },
    /// `reserved_vcpus` is smaller than `vcpus`.
    #[error("reserved_vcpus {got} is invalid: it includes the {vcpus} of vcpus, so it must not be smaller")]
    TooFewReserved {
        /// The value of `reserved_vcpus`.
        got: u32,
        /// The value of `vcpus`.
        vcpus: u32,
    },
    /// The number of vCPUs is 0.
    #[error("vcpus 0 is invalid: a VM needs at least one vCPU")]
    NoVcpus,
    /// The memory is too small to boot.
    #[error("memory_mib {got} is invalid: a VM needs at least {MIN_MEMORY_MIB} MiB")]
    TooLittleMemory {
        /// The requested memory in MiB.
        got: u32,
    },
    /// The scratch disk is too small.
    #[error("scratch.size_mib {got} is invalid: the minimum is 16 MiB")]
    TooLittleScratch {
        /// The requested size in MiB.
        got: u64,
    },
    /// A path is relative.
    #[error("{field} {path:?} is invalid: the path must be absolute")]
    Relative {
        /// The field's name.
        field: &'static str,
        /// The field's value.
        path: PathBuf,
    },
}

impl Classify for PodSpecError {
    fn kind(&self) -> FailureKind {
        match self {
            PodSpecError::File(error) => error.kind(),
            _ => FailureKind::Invalid,
        }
    }
}

impl PodSpec {
    /// Returns the number of vCPUs with which the VM is created.
    pub fn max_vcpus(&self) -> u32 {
        self.reserved_vcpus.unwrap_or(self.vcpus)
    }

    /// Returns the path of this pod's scratch disk, which has a name from its creation until the VM has opened it. Where
    /// there is no such disk it is the path of a directory that exists as long as the pod.
    pub fn scratch_file(&self) -> PathBuf {
        if !self.engine.has_disks() {
            return self.scratch.templates.join(format!("{}{}", crate::scratch::DIRECTORY_PREFIX, self.id));
        }
        self.scratch.templates.join(format!("{}{}.ext4", crate::scratch::DISK_PREFIX, self.id))
    }

    /// Like [`PodSpec::read`], but returns `None` if the file does not exist.
    pub fn read_if_present(dir: &Path) -> Result<Option<PodSpec>, PodSpecError> {
        match PodSpec::read(dir) {
            Err(PodSpecError::File(error)) if error.source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    /// Reads `DIR/spec.json` and checks it.
    pub fn read(dir: &Path) -> Result<PodSpec, PodSpecError> {
        let path = dir.join(FILE);
        let bytes = std::fs::read(&path).map_err(at("read", &path))?;
        let spec: PodSpec = nacelle_base::json::read(&bytes).map_err(|source| PodSpecError::Format { path, source })?;
        spec.check()?;
        Ok(spec)
    }

    /// Checks the specification and writes `DIR/spec.json` atomically.
    pub fn write(&self, dir: &Path) -> Result<(), PodSpecError> {
        self.check()?;
        let path = dir.join(FILE);
        let bytes =
            serde_json::to_vec_pretty(self).map_err(|source| PodSpecError::Format { path: path.clone(), source })?;
        Ok(write_whole(&path, &bytes)?)
    }

    /// Checks the values.
    pub fn check(&self) -> Result<(), PodSpecError> {
        if self.version != VERSION {
            return Err(PodSpecError::Version { got: self.version });
        }
        if self.vcpus == 0 {
            return Err(PodSpecError::NoVcpus);
        }
        if let Some(got) = self.reserved_vcpus.filter(|count| *count < self.vcpus) {
            return Err(PodSpecError::TooFewReserved { got, vcpus: self.vcpus });
        }
        if self.memory_mib < MIN_MEMORY_MIB {
            return Err(PodSpecError::TooLittleMemory { got: self.memory_mib });
        }
        if self.scratch.size_mib < 16 {
            return Err(PodSpecError::TooLittleScratch { got: self.scratch.size_mib });
        }
        let paths = [
            ("kernel", Some(&self.kernel)),
            ("initrd", Some(&self.initrd)),
            ("network.netns", self.network.as_ref().map(|network| &network.netns)),
            ("scratch.templates", Some(&self.scratch.templates)),
            ("template.directory", self.template.as_ref().map(|template| &template.directory)),
            ("checkpoint.directory", self.checkpoint.as_ref().map(|checkpoint| &checkpoint.directory)),
        ];
        for (field, path) in paths {
            if let Some(path) = path.filter(|path| !path.is_absolute()) {
                return Err(PodSpecError::Relative { field, path: path.clone() });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> PodSpec {
        PodSpec {
            version: VERSION,
            id: PodId::from_bytes([1; 32]),
            engine: EngineSpec::Qemu { binary: "/usr/bin/qemu-system-x86_64".into(), accelerator: Accelerator::Tcg },
            vcpus: 1,
            reserved_vcpus: Some(1),
            topology: Some(Topology::single_socket(1)),
            cpu_model: Some(CpuModel {
                name: Some("max".into()),
                features: vec![("avx".into(), false)],
                strict: false,
            }),
            memory_mib: 128,
            reserved_memory_mib: Some(256),
            memory_pages: MemoryPages::Hugetlb,
            console: ConsoleKind::Virtio,
            kernel: "/k/vmlinux".into(),
            initrd: "/k/initrd".into(),
            kernel_args: vec![],
            template: Some(PodTemplate { directory: "/run/nacelle/templates/a".into(), memory_mib: 128 }),
            checkpoint: None,
            network: Some(NetworkSpec {
                netns: "/run/netns/a".into(),
                interfaces: vec!["eth0".into()],
                queues: vec![],
            }),
            hostname: "web".into(),
            sysctls: BTreeMap::new(),
            shared_pid: false,
            user_namespace: None,
            shm_bytes: 0,
            volume_cache_seconds: 0,
            has_sockets: false,
            scratch: ScratchSpec { size_mib: 64, templates: "/var/lib/nacelle/scratch".into() },
            disk_limits: None,
            timeouts: Timeouts::default(),
            jail: None,
        }
    }

    #[test]
    fn a_specification_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = EngineSpec::Keeper {
            program: "/usr/bin/nacelle-keeper".into(),
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            accelerator: Accelerator::Kvm,
            keep: Some("/var/lib/nacelle/machines/a".into()),
            shares: 2,
        };
        for engine in [sample().engine, EngineSpec::Kvm {}, keeper] {
            let spec = PodSpec { engine, ..sample() };
            spec.write(dir.path()).unwrap();
            assert_eq!(PodSpec::read(dir.path()).unwrap(), spec);
        }
    }

    #[test]
    fn the_json_of_an_engine_does_not_change() {
        let text = r#"{"kind":"qemu","binary":"/usr/bin/qemu-system-x86_64","accelerator":"tcg"}"#;
        assert_eq!(serde_json::from_str::<EngineSpec>(text).unwrap(), sample().engine);
        assert_eq!(serde_json::to_string(&sample().engine).unwrap(), text);
        assert_eq!(serde_json::to_string(&EngineSpec::Kvm {}).unwrap(), r#"{"kind":"kvm"}"#);
        assert!(serde_json::from_str::<EngineSpec>(r#"{"kind":"kvm","binary":"/q"}"#).is_err());
    }

    #[test]
    fn unknown_fields_and_versions_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let mut value = serde_json::to_value(sample()).unwrap();
        value["colour"] = "red".into();
        std::fs::write(dir.path().join(FILE), value.to_string()).unwrap();
        assert!(matches!(PodSpec::read(dir.path()), Err(PodSpecError::Format { .. })));
        value.as_object_mut().unwrap().remove("colour");
        value["version"] = 2.into();
        std::fs::write(dir.path().join(FILE), value.to_string()).unwrap();
        assert!(matches!(PodSpec::read(dir.path()), Err(PodSpecError::Version { got: 2 })));
    }

    #[test]
    fn each_rule_is_checked() {
        let broken: [fn(&mut PodSpec); 6] = [
            |spec| spec.vcpus = 0,
            |spec| spec.vcpus = 2,
            |spec| spec.memory_mib = MIN_MEMORY_MIB - 1,
            |spec| spec.scratch.size_mib = 1,
            |spec| spec.kernel = "vmlinux".into(),
            |spec| spec.network.as_mut().unwrap().netns = "ns".into(),
        ];
        for (row, change) in broken.into_iter().enumerate() {
            let mut spec = sample();
            change(&mut spec);
            assert_eq!(spec.check().unwrap_err().kind(), FailureKind::Invalid, "row {row}");
        }
    }
}
