//! Tests that the program exits at once, with an exit code and a message of its own, if KVM does not run guests on hardware.

use nacelle_engine::{KvmVerdict, probe_kvm};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn without_hardware_nothing_is_measured() {
    if let KvmVerdict::Hardware { .. } = probe_kvm() {
        return println!("skipped: KVM runs guests on hardware here");
    }
    let begun = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_nacelle-hardware")).stdin(Stdio::null()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert!(errors.contains("nothing is measured on this machine: "), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(output.stdout.is_empty(), "no figures");
    // The probe times out after two seconds.
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}
