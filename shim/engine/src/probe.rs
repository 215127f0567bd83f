//! Owns: what the node's KVM is worth, and the engine and accelerator that follow from it.
//! /dev/kvm may be there and interpret the guest kernel instruction by instruction: only running a guest tells.
//! Threads: the probe runs on a thread of its own, which is left alone if KVM does not come back.

use std::fmt;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nacelle_base::Chain;
use nacelle_base::machine::EngineKind;
use nacelle_vmm::machine::tiny::{TinyError, TinyGuest};

/// A processor needs well under a millisecond for the probe's guest, an interpreter forty-five. The best of several
/// runs is compared, so a busy node looks slower for a while but no interpreter looks faster than it is.
const HARDWARE_LIMIT: Duration = Duration::from_millis(15);
/// A run like this needs no second one.
const CLEARLY_HARDWARE: Duration = Duration::from_millis(2);
const RUNS: usize = 5;
/// For all of the probe. KVM modules have been seen that never return.
const DEADLINE: Duration = Duration::from_secs(2);

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

/// Finds out what /dev/kvm is worth; takes at most two seconds.
pub fn probe() -> KvmVerdict {
    let (tell, told) = mpsc::channel();
    let guest = move || {
        // Who asked may be gone: then nobody wants to know.
        let _ = tell.send(best_time());
    };
    if let Err(error) = thread::Builder::new().name("kvm-probe".into()).spawn(guest) {
        return KvmVerdict::Broken { why: format!("no thread for the probe: {error}") };
    }
    match told.recv_timeout(DEADLINE) {
        Ok(result) => judge(result),
        Err(_) => KvmVerdict::Interpreted { took: DEADLINE },
    }
}

fn best_time() -> Result<Duration, TinyError> {
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

fn judge(result: Result<Duration, TinyError>) -> KvmVerdict {
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

/// The engine for pods whose handler names none.
pub fn fitting(verdict: &KvmVerdict) -> EngineKind {
    match choose(verdict) {
        Accelerator::Kvm => EngineKind::Kvm,
        Accelerator::Tcg => EngineKind::Qemu,
    }
}

/// The accelerator for QEMU.
pub fn choose(verdict: &KvmVerdict) -> Accelerator {
    match verdict {
        KvmVerdict::Hardware { .. } => Accelerator::Kvm,
        _ => Accelerator::Tcg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(errno: i32) -> Result<Duration, TinyError> {
        Err(TinyError::Open { source: kvm_ioctls::Error::new(errno) })
    }

    #[test]
    fn only_a_fast_guest_is_hardware() {
        let table = [
            (Ok(Duration::from_micros(30)), Accelerator::Kvm, "on the processor"),
            (Ok(Duration::from_millis(14)), Accelerator::Kvm, "on the processor"),
            (Ok(Duration::from_millis(15)), Accelerator::Tcg, "interprets"),
            (Ok(Duration::from_millis(45)), Accelerator::Tcg, "interprets"),
            (open(libc::ENOENT), Accelerator::Tcg, "there is no /dev/kvm"),
            (open(libc::EACCES), Accelerator::Tcg, "may not be opened"),
            (open(libc::EBUSY), Accelerator::Tcg, "(cannot open /dev/kvm: "),
            (Err(TinyError::Version { got: 11 }), Accelerator::Tcg, "version 11"),
        ];
        for (result, accelerator, words) in table {
            let verdict = judge(result);
            assert_eq!(choose(&verdict), accelerator, "{verdict:?}");
            let engine = if accelerator == Accelerator::Kvm { EngineKind::Kvm } else { EngineKind::Qemu };
            assert_eq!(fitting(&verdict), engine, "{verdict:?}");
            assert!(verdict.to_string().contains(words), "{verdict}");
        }
    }

    #[test]
    fn this_node_gets_a_verdict() {
        let verdict = probe();
        // A node may have the file and nothing behind it, or be too busy to find out in time.
        let there = std::path::Path::new("/dev/kvm").exists();
        let late = KvmVerdict::Interpreted { took: DEADLINE };
        assert!(there || verdict == KvmVerdict::Absent || verdict == late, "{verdict}");
        println!("{verdict}");
    }
}
