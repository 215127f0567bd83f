//! Determines whether the node's KVM runs guests on hardware, and chooses engine and accelerator. /dev/kvm may exist and
//! interpret the guest kernel instruction by instruction, so only a test run of a guest is conclusive. The probe runs on a
//! thread of its own, which is abandoned if KVM does not return.

use std::fmt;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nacelle_base::Chain;
use nacelle_base::machine::EngineKind;
use nacelle_vmm::machine::tiny::{TinyError, TinyGuest};

/// The limit for hardware. A CPU needs well under a millisecond for the probe's guest, an interpreter 45 ms. The best of
/// several runs counts, so that a busy node may look slow for a while, but no interpreter looks fast.
const HARDWARE_LIMIT: Duration = Duration::from_millis(15);
/// A run of at most this time is not repeated.
const CLEARLY_HARDWARE: Duration = Duration::from_millis(2);
const RUNS: usize = 5;
/// The limit for the whole probe. There are KVM modules that never return.
const DEADLINE: Duration = Duration::from_secs(2);

/// The result of the probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvmVerdict {
    /// /dev/kvm does not exist.
    Absent,
    /// This process may not open /dev/kvm.
    NoPermission,
    /// KVM runs a guest kernel on the node's CPUs.
    Hardware {
        /// The best time of the probe's guest.
        took: Duration,
    },
    /// KVM interprets the guest kernel: it is slower than QEMU's emulation.
    Interpreted {
        /// The best time of the probe's guest, or the time until the probe was abandoned.
        took: Duration,
    },
    /// KVM does not run a guest.
    Broken {
        /// The failure, on one line.
        why: String,
    },
}

/// What executes the vCPUs under QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The node's CPUs, through KVM.
    Kvm,
    /// QEMU's binary translation (TCG).
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

/// Prints the result and its consequence in one sentence.
impl fmt::Display for KvmVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvmVerdict::Absent => f.write_str(
                "there is no /dev/kvm: pods run in QEMU, in software (tcg); for speed, enable virtualization in the \
                 firmware or the hypervisor of this node and load the module kvm_intel or kvm_amd",
            ),
            KvmVerdict::NoPermission => f.write_str(
                "/dev/kvm may not be opened: pods run in QEMU, in software (tcg); give this process access to /dev/kvm",
            ),
            KvmVerdict::Hardware { took } => write!(
                f,
                "KVM runs guest kernels on the processor (probe: {took:?}): pods run in Nacelle's own VMM (engine kvm)"
            ),
            KvmVerdict::Interpreted { took } => write!(
                f,
                "KVM interprets guest kernels (probe: {took:?}): pods run in QEMU, in software (tcg), which is faster \
                 and complete; engine kvm does not work here"
            ),
            KvmVerdict::Broken { why } => {
                write!(f, "KVM cannot run a guest ({why}): pods run in QEMU, in software (tcg)")
            }
        }
    }
}

/// Probes /dev/kvm; takes at most two seconds.
pub fn probe_kvm() -> KvmVerdict {
    let (sender, receiver) = mpsc::channel();
    let guest = move || {
        // The caller may have abandoned the probe.
        let _ = sender.send(measure_best_time());
    };
    if let Err(error) = thread::Builder::new().name("kvm-probe".into()).spawn(guest) {
        return KvmVerdict::Broken { why: format!("no thread for the probe: {error}") };
    }
    match receiver.recv_timeout(DEADLINE) {
        Ok(result) => classify_result(result),
        Err(_) => KvmVerdict::Interpreted { took: DEADLINE },
    }
}

fn measure_best_time() -> Result<Duration, TinyError> {
    let mut guest = TinyGuest::new()?;
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        best = best.min(guest.run()?);
        if best < CLEARLY_HARDWARE {
            break;
        }
    }
    Ok(best)
}

fn classify_result(result: Result<Duration, TinyError>) -> KvmVerdict {
    match result {
        Ok(took) if took < HARDWARE_LIMIT => KvmVerdict::Hardware { took },
        Ok(took) => KvmVerdict::Interpreted { took },
        Err(TinyError::Open { source }) => match source.errno() {
            libc::ENOENT | libc::ENXIO | libc::ENODEV => KvmVerdict::Absent,
            libc::EACCES | libc::EPERM => KvmVerdict::NoPermission,
            _ => KvmVerdict::Broken { why: Chain(&TinyError::Open { source }).to_string() },
        },
        Err(error) => KvmVerdict::Broken { why: Chain(&error).to_string() },
    }
}

/// Returns the engine for pods whose handler names none.
pub fn default_engine(verdict: &KvmVerdict) -> EngineKind {
    match choose_accelerator(verdict) {
        Accelerator::Kvm => EngineKind::Kvm,
        Accelerator::Tcg => EngineKind::Qemu,
    }
}

/// Returns the accelerator for QEMU.
pub fn choose_accelerator(verdict: &KvmVerdict) -> Accelerator {
    match verdict {
        KvmVerdict::Hardware { .. } => Accelerator::Kvm,
        _ => Accelerator::Tcg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_error(errno: i32) -> Result<Duration, TinyError> {
        Err(TinyError::Open { source: kvm_ioctls::Error::new(errno) })
    }

    #[test]
    fn only_a_fast_guest_is_hardware() {
        let table = [
            (Ok(Duration::from_micros(30)), Accelerator::Kvm, "on the processor"),
            (Ok(Duration::from_millis(14)), Accelerator::Kvm, "on the processor"),
            (Ok(Duration::from_millis(15)), Accelerator::Tcg, "interprets"),
            (Ok(Duration::from_millis(45)), Accelerator::Tcg, "interprets"),
            (open_error(libc::ENOENT), Accelerator::Tcg, "there is no /dev/kvm"),
            (open_error(libc::EACCES), Accelerator::Tcg, "may not be opened"),
            (open_error(libc::EBUSY), Accelerator::Tcg, "(cannot open /dev/kvm: "),
            (Err(TinyError::Version { got: 11 }), Accelerator::Tcg, "version 11"),
        ];
        for (result, accelerator, text) in table {
            let verdict = classify_result(result);
            assert_eq!(choose_accelerator(&verdict), accelerator, "{verdict:?}");
            let engine = if accelerator == Accelerator::Kvm { EngineKind::Kvm } else { EngineKind::Qemu };
            assert_eq!(default_engine(&verdict), engine, "{verdict:?}");
            assert!(verdict.to_string().contains(text), "{verdict}");
        }
    }

    #[test]
    fn this_node_is_probed() {
        let verdict = probe_kvm();
        // The file may exist without a working KVM, or the node may be too busy to finish the probe in time.
        let there = std::path::Path::new("/dev/kvm").exists();
        let late = KvmVerdict::Interpreted { took: DEADLINE };
        assert!(there || verdict == KvmVerdict::Absent || verdict == late, "{verdict}");
        println!("{verdict}");
    }
}
