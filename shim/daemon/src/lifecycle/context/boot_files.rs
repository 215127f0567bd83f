//! Checks the files of the node from which a VM starts: kernel, initramfs, and what the engine needs. Without the check the VM would
//! end after its start, and its error would be that of the program that met the file.

use nacelle_base::machine::EngineKind;
use nacelle_base::{Classify, FailureKind};
use nacelle_engine::{InitrdError, KernelError, check_initrd, check_kernel};
use nacelle_pod::spec::{EngineSpec, PodSpec};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
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
    /// A file is of another kind.
    #[error("{what} {path} is not {expected}; {advice}", path = path.display())]
    OtherKind {
        /// The file: "the guest's kernel".
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// The kind that it must have: "a regular file".
        expected: &'static str,
        /// The remedy.
        advice: &'static str,
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
                open("the device of engine kvm", Path::new(KVM), FileRole::Device, advice)?;
            }
            EngineKind::Qemu => {
                open("QEMU", &self.qemu, FileRole::Program, "install qemu-system-x86")?;
            }
            EngineKind::Host => return Ok(()),
        }
        let kernel = open("the guest's kernel", &self.kernel, FileRole::Data, KERNEL_ADVICE)?;
        check_kernel(&kernel, self.memory_mib, self.engine)
            .map_err(|source| BootFileError::Kernel { path: self.kernel.clone(), source })?;
        let initrd = open("the guest's initramfs", &self.initrd, FileRole::Data, INITRD_ADVICE)?;
        check_initrd(&initrd).map_err(|source| BootFileError::Initrd { path: self.initrd.clone(), source })
    }
}

/// What a file must be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileRole {
    /// A regular file.
    Data,
    /// A regular file that can be executed.
    Program,
    /// A character device.
    Device,
}

/// Opens a file for reading. Does not wait for a writer if it is a FIFO.
fn open(what: &'static str, path: &Path, role: FileRole, advice: &'static str) -> Result<File, BootFileError> {
    let failed = |source| BootFileError::Open { what, path: path.to_owned(), advice, source };
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let (is_right, expected) = match role {
        FileRole::Data => (metadata.is_file(), "a regular file"),
        FileRole::Program => (metadata.is_file() && metadata.mode() & 0o111 != 0, "a program that can be executed"),
        FileRole::Device => (metadata.file_type().is_char_device(), "a character device"),
    };
    match is_right {
        true => Ok(file),
        false => Err(BootFileError::OtherKind { what, path: path.to_owned(), expected, advice }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_of_another_kind_is_refused_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let (fifo, file) = (directory.path().join("fifo"), directory.path().join("file"));
        nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        std::fs::write(&file, "").unwrap();
        let kind =
            |path: &Path, role| open("the file", path, role, "install it").map(drop).map_err(|error| error.to_string());
        for path in [fifo.as_path(), directory.path()] {
            let error = kind(path, FileRole::Data).unwrap_err();
            assert!(error.contains("is not a regular file; install it"), "{error}");
        }
        assert_eq!(kind(&file, FileRole::Data), Ok(()));
        assert!(kind(&file, FileRole::Program).unwrap_err().contains("executed"));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(kind(&file, FileRole::Program), Ok(()));
        assert!(kind(&file, FileRole::Device).unwrap_err().contains("a character device"));
        assert_eq!(kind(Path::new("/dev/null"), FileRole::Device), Ok(()));
    }
}
