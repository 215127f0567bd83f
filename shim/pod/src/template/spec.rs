//! Defines the specification of a template: `DIR/template.json`, which the daemon writes and the building process reads. The file stays
//! beside the saved VM, as a record of what it is.

use crate::spec::{PodSpec, PodSpecError, VERSION};
use nacelle_base::files::{at, write_whole};
use nacelle_base::machine::ConsoleKind;
use nacelle_jail::Mode;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The name of the file in the template's directory.
pub const FILE: &str = "template.json";

/// What a VM must have in common with its template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateShape {
    /// The number of vCPUs that are online, 1 or more.
    pub vcpus: u32,
    /// The number of vCPUs with which the VM is created.
    pub max_vcpus: u32,
    /// The memory with which the kernel has booted, in MiB. A clone may have more.
    pub memory_mib: u32,
    /// The kind of the guest's console device.
    pub console: ConsoleKind,
    /// The absolute path of the guest's kernel.
    pub kernel: PathBuf,
    /// The absolute path of the guest's initramfs.
    pub initrd: PathBuf,
    /// Additional kernel command-line parameters.
    pub kernel_args: Vec<String>,
}

/// The template that a pod starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodTemplate {
    /// The absolute path of its directory.
    pub directory: PathBuf,
    /// Its memory in MiB; the rest of the pod's memory is added.
    pub memory_mib: u32,
}

/// The specification of a template that is to be built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateSpec {
    /// The format version, [`VERSION`].
    pub version: u32,
    /// The VM.
    pub shape: TemplateShape,
    /// The only Kubernetes namespace whose pods start from it; `None` for those of all namespaces.
    #[serde(default)]
    pub namespace: Option<String>,
    /// The limit from the start of a VM to the agent's hello, in milliseconds.
    pub boot_ms: u64,
    /// The reaction of the building process to a system call that is not on its list.
    pub seccomp: Mode,
    /// The cgroup of the building process, to which the template's memory is charged.
    pub cgroup: PathBuf,
    /// The user id and the group id of the building process; `None` if it stays root.
    pub user: Option<u32>,
}

impl TemplateSpec {
    /// Returns `boot_ms` as a duration.
    pub fn boot(&self) -> Duration {
        Duration::from_millis(self.boot_ms)
    }

    /// Reads `DIR/template.json`.
    pub fn read(dir: &Path) -> Result<TemplateSpec, PodSpecError> {
        let path = dir.join(FILE);
        let bytes = std::fs::read(&path).map_err(at("read", &path))?;
        let spec: TemplateSpec =
            nacelle_base::json::read(&bytes).map_err(|source| PodSpecError::Format { path, source })?;
        match spec.version {
            VERSION => Ok(spec),
            got => Err(PodSpecError::Version { got }),
        }
    }

    /// Writes `DIR/template.json` atomically.
    pub fn write(&self, dir: &Path) -> Result<(), PodSpecError> {
        let path = dir.join(FILE);
        let bytes =
            serde_json::to_vec_pretty(self).map_err(|source| PodSpecError::Format { path: path.clone(), source })?;
        Ok(write_whole(&path, &bytes)?)
    }
}

impl TemplateShape {
    /// Returns the shape of the template for a pod, which has `memory_mib` of the pod's memory.
    pub fn of(spec: &PodSpec, memory_mib: u32) -> TemplateShape {
        TemplateShape {
            vcpus: spec.vcpus,
            max_vcpus: spec.max_vcpus(),
            memory_mib,
            console: spec.console,
            kernel: spec.kernel.clone(),
            initrd: spec.initrd.clone(),
            kernel_args: spec.kernel_args.clone(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    pub(crate) fn sample() -> TemplateSpec {
        TemplateSpec {
            version: VERSION,
            shape: TemplateShape {
                vcpus: 1,
                max_vcpus: 2,
                memory_mib: 256,
                console: ConsoleKind::Serial,
                kernel: "/k/vmlinux".into(),
                initrd: "/k/initrd".into(),
                kernel_args: vec!["debug".into()],
            },
            namespace: None,
            boot_ms: 1_000,
            seccomp: Mode::Kill,
            cgroup: "nacelle/templates".into(),
            user: Some(70_000),
        }
    }

    #[test]
    fn a_specification_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        sample().write(dir.path()).unwrap();
        assert_eq!(TemplateSpec::read(dir.path()).unwrap(), sample());
        TemplateSpec { version: 2, ..sample() }.write(dir.path()).unwrap();
        assert!(matches!(TemplateSpec::read(dir.path()), Err(PodSpecError::Version { got: 2 })));
        let mut value = serde_json::to_value(sample()).unwrap();
        value["colour"] = "red".into();
        std::fs::write(dir.path().join(FILE), value.to_string()).unwrap();
        assert_eq!(TemplateSpec::read(dir.path()).unwrap_err().kind(), FailureKind::Invalid);
    }
}
