//! Checks the files of the node from which a VM starts: kernel, initramfs, and what the engine needs. Without the check the VM would
//! end after its start, and its error would be that of the program that met the file.

use nacelle_base::machine::EngineKind;
use nacelle_base::{Classify, FailureKind};
use nacelle_engine::{InitrdError, KernelError, check_initrd, check_kernel};
use nacelle_pod::spec::{EngineSpec, PodSpec};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The device of engine `kvm`.
const KVM: &str = "/dev/kvm";

/// The files from which VMs of a handler start.
#[derive(Clone, Debug)]
pub struct BootFiles {
    /// The engine.
    pub engine: EngineKind,
    /// The QEMU binary, which engine `qemu` needs.
    pub qemu: PathBuf,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// The guest's initramfs.
    pub initrd: PathBuf,
    /// The VM's memory in MiB.
    pub memory_mib: u32,
}

/// The reason why no VM can start from these files.
#[derive(Debug, thiserror::Error)]
pub enum BootFileError {
    /// A file cannot be opened.
    #[error("cannot open {what} {path}; {advice}", path = path.display())]
    Open {
        /// The file: "the guest's kernel".
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// The remedy.
        advice: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a kernel that the engine can start.
    #[error("the guest's kernel {path} cannot be started; {KERNEL_ADVICE}", path = path.display())]
    Kernel {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: KernelError,
    },
    /// The file is not an initramfs, or not a whole one.
    #[error("the guest's initramfs {path} cannot be used; {INITRD_ADVICE}", path = path.display())]
    Initrd {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: InitrdError,
    },
}

const KERNEL_ADVICE: &str = "install it again, or correct kernel of the handler";
const INITRD_ADVICE: &str = "install it again, or correct initrd of the handler";

impl Classify for BootFileError {
    fn kind(&self) -> FailureKind {
        // The node lacks something, whatever the pod requests.
        FailureKind::Conflict
    }
}

impl BootFiles {
    /// Returns the files of a pod; `None` if its VM is not started from a kernel of the node's.
    pub fn of_pod(spec: &PodSpec) -> Option<BootFiles> {
        let (engine, qemu) = match &spec.engine {
            _ if spec.template.is_some() => return None,
            EngineSpec::Kvm {} => (EngineKind::Kvm, PathBuf::new()),
            EngineSpec::Qemu { binary, .. } => (EngineKind::Qemu, binary.clone()),
            EngineSpec::Keeper { .. } | EngineSpec::Host { .. } => return None,
        };
        let (kernel, initrd) = (spec.kernel.clone(), spec.initrd.clone());
        Some(BootFiles { engine, qemu, kernel, initrd, memory_mib: spec.memory_mib })
    }

    /// Checks the files. Blocks: it opens them and reads their headers.
    pub fn check(&self) -> Result<(), BootFileError> {
        match self.engine {
            EngineKind::Kvm => {
                let advice = "load the module kvm_intel or kvm_amd, or set engine = \"auto\" for the handler";
                open("the device of engine kvm", Path::new(KVM), advice)?;
            }
            EngineKind::Qemu => {
                open("QEMU", &self.qemu, "install qemu-system-x86")?;
            }
            EngineKind::Host => return Ok(()),
        }
        let kernel = open("the guest's kernel", &self.kernel, KERNEL_ADVICE)?;
        check_kernel(&kernel, self.memory_mib, self.engine)
            .map_err(|source| BootFileError::Kernel { path: self.kernel.clone(), source })?;
        let initrd = open("the guest's initramfs", &self.initrd, INITRD_ADVICE)?;
        check_initrd(&initrd).map_err(|source| BootFileError::Initrd { path: self.initrd.clone(), source })
    }
}

fn open(what: &'static str, path: &Path, advice: &'static str) -> Result<File, BootFileError> {
    File::open(path).map_err(|source| BootFileError::Open { what, path: path.to_owned(), advice, source })
}
