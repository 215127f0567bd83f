//! Defines the errors of creating, driving and saving a VM.

use super::kernel::KernelError;
use super::memory::MemoryError;
use nacelle_base::{Classify, FailureKind};
use std::path::PathBuf;

/// An operation on a VM failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The number of vCPUs is 0 or exceeds the maximum.
    #[error("cannot create a VM with {got} vCPUs: KVM supports 1 to {max} on this node")]
    Vcpus {
        /// The requested number.
        got: u8,
        /// The maximum of the host.
        max: usize,
    },
    /// `/dev/kvm` cannot be opened.
    #[error("cannot open /dev/kvm")]
    Open {
        /// The cause.
        source: kvm_ioctls::Error,
    },
    /// KVM has an unsupported API version.
    #[error("KVM has API version {got}, but version 12 is needed")]
    Version {
        /// The version that KVM reports.
        got: i32,
    },
    /// KVM lacks a capability that a VM needs.
    #[error("KVM on this node lacks {capability}")]
    Missing {
        /// The capability, by its name in `linux/kvm.h`.
        capability: &'static str,
    },
    /// A call to KVM failed.
    #[error("KVM cannot {what}")]
    Call {
        /// The operation that KVM should perform.
        what: &'static str,
        /// The cause.
        source: kvm_ioctls::Error,
    },
    /// Guest memory cannot be allocated.
    #[error("cannot allocate {mib} MiB of guest memory")]
    Memory {
        /// The requested size in MiB.
        mib: u32,
        /// The cause.
        source: MemoryError,
    },
    /// The kernel or its initramfs cannot be loaded.
    #[error("cannot load {path:?}")]
    Load {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: KernelError,
    },
    /// There are more devices than register windows.
    #[error("cannot attach another device: the maximum is {max}")]
    Devices {
        /// The maximum number of devices.
        max: usize,
    },
    /// A device cannot be attached.
    #[error("cannot attach a {device} device")]
    Attach {
        /// The kind of the device.
        device: crate::DeviceKind,
        /// The cause.
        source: std::io::Error,
    },
    /// A device cannot be restored from its saved state.
    #[error("cannot restore the {device} device")]
    Restore {
        /// The kind of the device.
        device: crate::DeviceKind,
        /// The cause.
        source: crate::mmio::RestoreError,
    },
    /// A device cannot resume after a pause.
    #[error("cannot resume the {device} device")]
    Resume {
        /// The kind of the device.
        device: crate::DeviceKind,
        /// The cause.
        source: crate::StartError,
    },
    /// A resource of the process cannot be created: an eventfd, an interrupt, a thread, a signal handler, a generation id.
    #[error("cannot create {what}")]
    Create {
        /// The object to create.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The VM has ended: it can no longer be paused, resumed or saved.
    #[error("the VM has ended: {exit}")]
    Ended {
        /// How the VM ended.
        exit: super::VmExit,
    },
    /// The VM is running; its state can only be saved while it is paused.
    #[error("the VM is not paused")]
    NotPaused,
    /// A vCPU did not stop in time.
    #[error("a vCPU did not stop within {seconds} s")]
    Stuck {
        /// The timeout in seconds.
        seconds: u64,
    },
    /// KVM rejects the saved value of a register.
    #[error("KVM rejects the value {value:#x} for the model-specific register {index:#x}")]
    Msr {
        /// The number of the register.
        index: u32,
        /// The saved value.
        value: u64,
    },
    /// The VM was saved on a CPU with features that this CPU lacks.
    #[error("the VM was saved on a CPU with {missing}, which this node's CPU lacks")]
    Processor {
        /// The first missing feature.
        missing: String,
    },
    /// The saved state does not match the VM's configuration.
    #[error("cannot restore a state with {saved} {what} in a VM with {here}")]
    Mismatch {
        /// The property that differs: "vCPUs", "devices".
        what: &'static str,
        /// The number in the state.
        saved: usize,
        /// The number in the VM.
        here: usize,
    },
}

impl Error {
    /// Returns a function for `map_err` that reports that KVM refused to do `what`.
    pub(super) fn kvm_call(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Error {
        move |source| Error::Call { what, source }
    }
}

impl Classify for Error {
    fn kind(&self) -> FailureKind {
        match self {
            Error::Vcpus { .. } | Error::Mismatch { .. } | Error::Msr { .. } => FailureKind::Invalid,
            Error::Open { source } | Error::Call { source, .. } => match source.errno() {
                libc::EACCES | libc::EPERM => FailureKind::Denied,
                libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::ENOSPC => FailureKind::Exhausted,
                libc::ENOENT | libc::ENODEV | libc::ENXIO => FailureKind::Unsupported,
                _ => FailureKind::Internal,
            },
            Error::Version { .. } | Error::Missing { .. } | Error::Processor { .. } => FailureKind::Unsupported,
            Error::Memory { source, .. } => source.kind(),
            Error::Load { source, .. } => source.kind(),
            Error::Devices { .. } | Error::Create { .. } => FailureKind::Exhausted,
            Error::Restore { source, .. } => source.kind(),
            Error::Resume { source, .. } => source.kind(),
            Error::Attach { .. } => FailureKind::Internal,
            Error::Ended { .. } | Error::NotPaused => FailureKind::Conflict,
            Error::Stuck { .. } => FailureKind::Timeout,
        }
    }
}
