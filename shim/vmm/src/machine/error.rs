//! Owns: the ways in which a machine cannot be made, driven or saved.

use super::kernel::KernelError;
use super::memory::MemoryError;
use nacelle_base::{Classify, Kind};
use std::path::PathBuf;

/// A machine cannot be made, driven or saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No or too many processors.
    #[error("a machine with {got} vCPUs: KVM gives 1 to {max} here")]
    Vcpus {
        /// Asked for.
        got: u8,
        /// The most that the host gives.
        max: usize,
    },
    /// `/dev/kvm` cannot be opened.
    #[error("cannot open /dev/kvm")]
    Open {
        /// Why not.
        source: kvm_ioctls::Error,
    },
    /// A KVM of another time.
    #[error("KVM has API version {got}, not 12")]
    Version {
        /// What it says.
        got: i32,
    },
    /// KVM cannot do something that a machine needs.
    #[error("this KVM has no {capability}")]
    Missing {
        /// The capability, by its name in `linux/kvm.h`.
        capability: &'static str,
    },
    /// A call to KVM failed.
    #[error("KVM does not {what}")]
    Call {
        /// What it should do.
        what: &'static str,
        /// Why not.
        source: kvm_ioctls::Error,
    },
    /// Guest memory cannot be made.
    #[error("cannot make {mib} MiB of guest memory")]
    Memory {
        /// Asked for.
        mib: u32,
        /// Why not.
        source: MemoryError,
    },
    /// The kernel or its initial file system cannot be loaded.
    #[error("cannot load {path:?}")]
    Load {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: KernelError,
    },
    /// More devices than there are windows.
    #[error("room for {max} devices only")]
    Devices {
        /// The most.
        max: usize,
    },
    /// A device cannot be attached.
    #[error("cannot attach a {device} device")]
    Attach {
        /// What it is.
        device: crate::DeviceKind,
        /// Why not.
        source: std::io::Error,
    },
    /// A device cannot go on from its saved state.
    #[error("cannot restore the {device} device")]
    Restore {
        /// What it is.
        device: crate::DeviceKind,
        /// Why not.
        source: crate::mmio::RestoreError,
    },
    /// A device cannot go on after a pause.
    #[error("cannot resume the {device} device")]
    Resume {
        /// What it is.
        device: crate::DeviceKind,
        /// Why not.
        source: crate::StartError,
    },
    /// An eventfd or a thread cannot be made.
    #[error("cannot make {what}")]
    Make {
        /// What.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// The machine has ended: it cannot be paused, resumed or saved any more.
    #[error("the machine has ended: {exit}")]
    Ended {
        /// How.
        exit: super::Exit,
    },
    /// The machine runs; its state can only be taken while it is paused.
    #[error("the machine is not paused")]
    NotPaused,
    /// A processor did not stop in time.
    #[error("a processor of the machine did not stop within {seconds} s")]
    Stuck {
        /// The time it had.
        seconds: u64,
    },
    /// A saved register that KVM does not take.
    #[error("KVM does not take {value:#x} for the model-specific register {index:#x}")]
    Msr {
        /// Its number.
        index: u32,
        /// The value saved.
        value: u64,
    },
    /// A machine that was saved on a processor with features that this one does not have.
    #[error("the machine was saved on a processor that has {missing}, which this one has not")]
    Processor {
        /// The first difference.
        missing: String,
    },
    /// A saved state that does not fit the machine.
    #[error("a saved state with {saved} {what} for a machine with {here}")]
    Mismatch {
        /// Of what: "vCPUs", "devices".
        what: &'static str,
        /// How many the state has.
        saved: usize,
        /// How many the machine has.
        here: usize,
    },
}

impl Error {
    /// For `map_err`: KVM refused to do `what`.
    pub(super) fn call(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Error {
        move |source| Error::Call { what, source }
    }
}

impl Classify for Error {
    fn kind(&self) -> Kind {
        match self {
            Error::Vcpus { .. } | Error::Mismatch { .. } | Error::Msr { .. } => Kind::Invalid,
            Error::Open { source } | Error::Call { source, .. } => match source.errno() {
                libc::EACCES | libc::EPERM => Kind::Denied,
                libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::ENOSPC => Kind::Exhausted,
                libc::ENOENT | libc::ENODEV | libc::ENXIO => Kind::Unsupported,
                _ => Kind::Internal,
            },
            Error::Version { .. } | Error::Missing { .. } | Error::Processor { .. } => Kind::Unsupported,
            Error::Memory { source, .. } => source.kind(),
            Error::Load { source, .. } => source.kind(),
            Error::Devices { .. } | Error::Make { .. } => Kind::Exhausted,
            Error::Restore { source, .. } => source.kind(),
            Error::Resume { source, .. } => source.kind(),
            Error::Attach { .. } => Kind::Internal,
            Error::Ended { .. } | Error::NotPaused => Kind::Conflict,
            Error::Stuck { .. } => Kind::Timeout,
        }
    }
}
