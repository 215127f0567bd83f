//! Owns: what a pod process is told at its start: `DIR/spec.json`, written by the daemon, read once.
//! May use: nouns of `base`. No effects but reading and writing that one file.

use nacelle_base::files::{FileError, at, write_whole};
use nacelle_base::machine::{ConsoleKind, CpuModel, MemoryPages, Topology};
use nacelle_base::{Classify, Kind, PodId};
pub use nacelle_jail::Mode as Seccomp;
use nacelle_model::namespace::{NodeNamespaces, UserNamespace};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The version of this file's format.
pub const VERSION: u32 = 1;

/// Name of the file in the pod's run directory.
pub const FILE: &str = "spec.json";

/// The smallest guest that this process starts, in MiB.
pub const MIN_MEMORY_MIB: u32 = 64;

/// One PodSandbox as its process must make it. Fields are public data; [`PodSpec::check`] is the door to use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodSpec {
    /// [`VERSION`].
    pub version: u32,
    /// The PodSandbox.
    pub id: PodId,
    /// Who gives it its kernel.
    pub engine: EngineSpec,
    /// Number of virtual processors that run from the start, 1 or more.
    pub vcpus: u32,
    /// How many the machine is made with, if that is more: the others wait until they are asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_vcpus: Option<u32>,
    /// How they are arranged; none: as cores of one socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
    /// What they are to the guest; none: all that the node can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<CpuModel>,
    /// Guest memory, [`MIN_MEMORY_MIB`] or more.
    pub memory_mib: u32,
    /// What the machine has beside it, in MiB, for when it is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_memory_mib: Option<u32>,
    /// What lies under it on the node.
    #[serde(default)]
    pub memory_pages: MemoryPages,
    /// What the guest prints on.
    #[serde(default)]
    pub console: ConsoleKind,
    /// The guest's kernel, absolute.
    pub kernel: PathBuf,
    /// The guest's initramfs, absolute.
    pub initrd: PathBuf,
    /// Further words for the kernel's command line.
    #[serde(default)]
    pub kernel_args: Vec<String>,
    /// The network namespace; none: a pod without network.
    #[serde(default)]
    pub network: Option<NetworkSpec>,
    /// The guest's host name.
    pub hostname: String,
    /// Sysctls of the pod: "net.ipv4.ip_forward" -> "1".
    #[serde(default)]
    pub sysctls: BTreeMap<String, String>,
    /// All containers share one PID namespace.
    #[serde(default)]
    pub shared_pid: bool,
    /// The containers' user namespace; none: they have that of the machine, or of the node.
    #[serde(default)]
    pub user_namespace: Option<UserNamespace>,
    /// Size of the pod's /dev/shm in bytes; 0: the agent's default.
    #[serde(default)]
    pub shm_bytes: u64,
    /// The folder below which containers' log files lie (PodSandboxConfig.log_directory), absolute; none: no logs.
    #[serde(default)]
    pub log_directory: Option<PathBuf>,
    /// The disk on which writable layers lie.
    pub scratch: ScratchSpec,
    /// Seconds for which the guest may believe what it was told of names and attributes on volumes of the node.
    #[serde(default)]
    pub volume_cache_seconds: u64,
    /// How long to wait for what.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// What the process gives up before the machine starts; none: nothing.
    #[serde(default)]
    pub jail: Option<JailSpec>,
}

/// The pod process's jail. What is not named here follows from the rest of the specification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JailSpec {
    /// What happens at a system call that is not on its list.
    pub seccomp: Seccomp,
    /// Folders and files from which images come, absolute.
    pub images: Vec<PathBuf>,
    /// The process's control group, below the root of each tree; none: it stays where it is.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
}

/// The engine and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum EngineSpec {
    /// Nacelle's own VMM.
    Kvm {},
    /// QEMU.
    Qemu {
        /// Its program.
        binary: PathBuf,
        /// What the daemon's probe chose for this node.
        accelerator: Accelerator,
    },
    /// No guest: the agent in namespaces of the node.
    Host {
        /// The agent's program, absolute.
        agent: PathBuf,
        /// What of the node the pod sees as its own.
        #[serde(default)]
        shares: NodeNamespaces,
    },
    /// The pod's container is a machine of its own making, in QEMU.
    Keeper {
        /// The keeper's program, absolute.
        program: PathBuf,
        /// QEMU's.
        qemu: PathBuf,
        /// What the daemon's probe chose for this node.
        accelerator: Accelerator,
        /// What the machine keeps, if it outlives the pod.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        keep: Option<PathBuf>,
        /// How many folders of the node it shares with its guest.
        #[serde(default, skip_serializing_if = "none_of_them")]
        shares: usize,
    },
}

fn none_of_them(count: &usize) -> bool {
    *count == 0
}

impl EngineSpec {
    /// There is a machine, and with it memory and processors of the pod's own.
    pub fn has_machine(&self) -> bool {
        !matches!(self, EngineSpec::Host { .. })
    }

    /// The machine is one for containers: it has disks for images, layers and volumes.
    pub fn has_disks(&self) -> bool {
        matches!(self, EngineSpec::Kvm {} | EngineSpec::Qemu { .. })
    }
}

/// What runs the guest's instructions under QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor, through /dev/kvm.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// Where the pod's interfaces are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// The network namespace's file, absolute.
    pub netns: PathBuf,
    /// The interfaces that CNI will make ("eth0"): one tap and one guest NIC each, in this order.
    pub interfaces: Vec<String>,
    /// For machines with a system of their own: so many queues the taps have; one, where nothing is said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<u32>,
}

/// The scratch disk: a sparse ext4 file, copied from a template that is made once per size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScratchSpec {
    /// Its size; blocks are taken when they are written.
    pub size_mib: u64,
    /// The folder in which templates are kept and disks are made, absolute; made if missing. It is to be on a real
    /// file system: what containers write takes its space.
    pub templates: PathBuf,
}

/// Limits on waiting, in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// From the start of the machine to the agent's hello.
    pub boot_ms: u64,
    /// From the configuration's sending to the agent's report.
    pub configure_ms: u64,
    /// For one request to the agent that has nothing to wait for.
    pub call_ms: u64,
    /// From the agent's Shutdown to the end of the machine.
    pub shutdown_ms: u64,
}

impl Default for Timeouts {
    /// Generous: software emulation on a busy node is slow.
    fn default() -> Self {
        Self { boot_ms: 120_000, configure_ms: 60_000, call_ms: 60_000, shutdown_ms: 10_000 }
    }
}

impl Timeouts {
    /// See the field.
    pub fn boot(&self) -> Duration {
        Duration::from_millis(self.boot_ms)
    }

    /// See the field.
    pub fn configure(&self) -> Duration {
        Duration::from_millis(self.configure_ms)
    }

    /// See the field.
    pub fn call(&self) -> Duration {
        Duration::from_millis(self.call_ms)
    }

    /// See the field.
    pub fn shutdown(&self) -> Duration {
        Duration::from_millis(self.shutdown_ms)
    }
}

/// Why a specification is of no use.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Not the JSON of a specification.
    #[error("{} is no pod specification", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// Of another version.
    #[error("the pod specification has version {got}; this program knows {VERSION}")]
    Version {
        /// The file's.
        got: u32,
    },
    /// Fewer processors than run from the start.
    #[error("reserved_vcpus is {got}; vcpus is {vcpus}, and is among them")]
    TooFewReserved {
        /// As asked.
        got: u32,
        /// That run from the start.
        vcpus: u32,
    },
    /// No processor.
    #[error("vcpus is 0; a machine needs at least one")]
    NoVcpus,
    /// Too small to boot.
    #[error("memory_mib is {got}; a machine needs at least {MIN_MEMORY_MIB}")]
    TooLittleMemory {
        /// As asked.
        got: u32,
    },
    /// No disk to write on.
    #[error("scratch.size_mib is {got}; 16 is the least")]
    TooLittleScratch {
        /// As asked.
        got: u64,
    },
    /// A path that depends on the working directory.
    #[error("{field} is {path:?}; an absolute path is needed")]
    Relative {
        /// The field's name.
        field: &'static str,
        /// Its value.
        path: PathBuf,
    },
}

impl Classify for SpecError {
    fn kind(&self) -> Kind {
        match self {
            SpecError::File(error) => error.kind(),
            _ => Kind::Invalid,
        }
    }
}

impl PodSpec {
    /// How many virtual processors the machine is made with.
    pub fn max_vcpus(&self) -> u32 {
        self.reserved_vcpus.unwrap_or(self.vcpus)
    }

    /// As much memory as the machine can get.
    pub fn max_memory_mib(&self) -> u32 {
        self.memory_mib.saturating_add(self.reserved_memory_mib.unwrap_or(0))
    }

    /// The scratch disk of this pod while it has a name: from its making until the machine has it open. Where a machine has
    /// no such disk: a folder, as long as there is the pod.
    pub fn scratch_file(&self) -> PathBuf {
        if !self.engine.has_disks() {
            return self.scratch.templates.join(format!("{}{}", crate::scratch::FOLDER, self.id));
        }
        self.scratch.templates.join(format!("{}{}.ext4", crate::scratch::DISK, self.id))
    }

    /// As [`PodSpec::read`]; none if there is no such file.
    pub fn read_if_there(dir: &Path) -> Result<Option<PodSpec>, SpecError> {
        match PodSpec::read(dir) {
            Err(SpecError::File(error)) if error.source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    /// Reads `DIR/spec.json` and checks it.
    pub fn read(dir: &Path) -> Result<PodSpec, SpecError> {
        let path = dir.join(FILE);
        let bytes = std::fs::read(&path).map_err(at("read", &path))?;
        let spec: PodSpec = nacelle_base::json::read(&bytes).map_err(|source| SpecError::Format { path, source })?;
        spec.check()?;
        Ok(spec)
    }

    /// Writes `DIR/spec.json`, whole, after a check.
    pub fn write(&self, dir: &Path) -> Result<(), SpecError> {
        self.check()?;
        let path = dir.join(FILE);
        let bytes =
            serde_json::to_vec_pretty(self).map_err(|source| SpecError::Format { path: path.clone(), source })?;
        Ok(write_whole(&path, &bytes)?)
    }

    /// Whether a machine can be made of it.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.version != VERSION {
            return Err(SpecError::Version { got: self.version });
        }
        if self.vcpus == 0 {
            return Err(SpecError::NoVcpus);
        }
        if let Some(got) = self.reserved_vcpus.filter(|count| *count < self.vcpus) {
            return Err(SpecError::TooFewReserved { got, vcpus: self.vcpus });
        }
        if self.memory_mib < MIN_MEMORY_MIB {
            return Err(SpecError::TooLittleMemory { got: self.memory_mib });
        }
        if self.scratch.size_mib < 16 {
            return Err(SpecError::TooLittleScratch { got: self.scratch.size_mib });
        }
        let paths = [
            ("kernel", Some(&self.kernel)),
            ("initrd", Some(&self.initrd)),
            ("network.netns", self.network.as_ref().map(|network| &network.netns)),
            ("log_directory", self.log_directory.as_ref()),
            ("scratch.templates", Some(&self.scratch.templates)),
        ];
        for (field, path) in paths {
            if let Some(path) = path.filter(|path| !path.is_absolute()) {
                return Err(SpecError::Relative { field, path: path.clone() });
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
            topology: Some(Topology::flat(1)),
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
            log_directory: Some("/var/log/pods/a".into()),
            scratch: ScratchSpec { size_mib: 64, templates: "/var/lib/nacelle/scratch".into() },
            timeouts: Timeouts::default(),
            jail: None,
        }
    }

    #[test]
    fn comes_back_from_its_file() {
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
    fn an_engine_is_written_as_it_always_was() {
        let text = r#"{"kind":"qemu","binary":"/usr/bin/qemu-system-x86_64","accelerator":"tcg"}"#;
        assert_eq!(serde_json::from_str::<EngineSpec>(text).unwrap(), sample().engine);
        assert_eq!(serde_json::to_string(&sample().engine).unwrap(), text);
        assert_eq!(serde_json::to_string(&EngineSpec::Kvm {}).unwrap(), r#"{"kind":"kvm"}"#);
        assert!(serde_json::from_str::<EngineSpec>(r#"{"kind":"kvm","binary":"/q"}"#).is_err());
    }

    #[test]
    fn unknown_fields_and_versions_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut value = serde_json::to_value(sample()).unwrap();
        value["colour"] = "red".into();
        std::fs::write(dir.path().join(FILE), value.to_string()).unwrap();
        assert!(matches!(PodSpec::read(dir.path()), Err(SpecError::Format { .. })));
        value.as_object_mut().unwrap().remove("colour");
        value["version"] = 2.into();
        std::fs::write(dir.path().join(FILE), value.to_string()).unwrap();
        assert!(matches!(PodSpec::read(dir.path()), Err(SpecError::Version { got: 2 })));
    }

    #[test]
    fn each_rule_is_checked() {
        let broken: [fn(&mut PodSpec); 7] = [
            |spec| spec.vcpus = 0,
            |spec| spec.vcpus = 2,
            |spec| spec.memory_mib = MIN_MEMORY_MIB - 1,
            |spec| spec.scratch.size_mib = 1,
            |spec| spec.kernel = "vmlinux".into(),
            |spec| spec.log_directory = Some("logs".into()),
            |spec| spec.network.as_mut().unwrap().netns = "ns".into(),
        ];
        for (row, change) in broken.into_iter().enumerate() {
            let mut spec = sample();
            change(&mut spec);
            assert_eq!(spec.check().unwrap_err().kind(), Kind::Invalid, "row {row}");
        }
    }
}
