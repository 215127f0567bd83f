//! Owns: what the node's KVM is worth, and the accelerator that follows from it.
//! /dev/kvm may be there and interpret the guest kernel instruction by instruction: only running a guest tells.
//! Threads: the probe runs on a thread of its own, which is left alone if KVM does not come back.

use std::fmt;
use std::time::Duration;

/// What /dev/kvm is worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvmVerdict {
    /// There is no /dev/kvm.
    Absent,
    /// There is one, and this process may not open it.
    NoPermission,
    /// It runs a guest kernel on the node's processors.
    Hardware {
        /// The best time of the probe's guest.
        took: Duration,
    },
    /// It interprets the guest kernel: slower than QEMU does.
    Interpreted {
        /// The best time of the probe's guest, or how long we waited for it.
        took: Duration,
    },
    /// It does not run a guest at all.
    Broken {
        /// What failed, in one line.
        why: String,
    },
}

/// How QEMU runs the guest's processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// On the node's processors.
    Kvm,
    /// In software, by translation.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        })
    }
}

/// The verdict and what follows from it, in one sentence.
impl fmt::Display for KvmVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvmVerdict::Absent => {
                f.write_str("there is no /dev/kvm: guests run in software (tcg); enable virtualization for speed")
            }
            KvmVerdict::NoPermission => f.write_str(
                "/dev/kvm may not be opened: guests run in software (tcg); give this process access to /dev/kvm",
            ),
            KvmVerdict::Hardware { took } => {
                write!(f, "KVM runs guest kernels on the processor (probe: {took:?}): guests run with kvm")
            }
            KvmVerdict::Interpreted { took } => write!(
                f,
                "KVM interprets guest kernels (probe: {took:?}): guests run in software (tcg), which is faster and complete"
            ),
            KvmVerdict::Broken { why } => {
                write!(f, "KVM cannot run a guest ({why}): guests run in software (tcg)")
            }
        }
    }
}

/// The accelerator for QEMU.
pub fn choose(verdict: &KvmVerdict) -> Accelerator {
    match verdict {
        KvmVerdict::Hardware { .. } => Accelerator::Kvm,
        _ => Accelerator::Tcg,
    }
}
