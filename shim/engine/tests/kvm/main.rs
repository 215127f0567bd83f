//! Runs the contract tests on Nacelle's own VMM, with the guest kernel and the small init of this suite. Skipped, with the
//! reason, where KVM does not run guests on hardware, or where the kernel or a compiler is missing. `NACELLE_TEST_BOOTS` is
//! the number of boots in a row of `boot_after_boot` (default 3).

#[path = "../common/mod.rs"]
mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use common::LONG;
use nacelle_engine::contract::{TestVm, TestedEngine, lock_suite, spec};
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{Engine, EngineError, ExitKind, KvmVerdict, LinkError, StopMode, probe_kvm};

struct TestedKvm {
    kernel: PathBuf,
    initrd: PathBuf,
}

impl TestedEngine for TestedKvm {
    fn engine(&self) -> Box<dyn Engine> {
        Box::new(KvmEngine::new())
    }

    fn kernel(&self) -> PathBuf {
        self.kernel.clone()
    }

    fn initrd(&self) -> PathBuf {
        self.initrd.clone()
    }

    /// The VM runs in this process: see `a_kernel_that_faults_at_once_has_died` and `nothing_outlives_a_killed_process`.
    fn kill_from_outside(&self, _run_dir: &Path) -> bool {
        false
    }

    fn reads_disks(&self) -> bool {
        true
    }
}

/// Builds the guest, so that a node without a compiler finds it.
#[test]
fn the_suites_guest_is_made() {
    common::initrd().unwrap();
}

fn find() -> Result<TestedKvm, String> {
    let initrd = common::initrd()?;
    static VERDICT: OnceLock<KvmVerdict> = OnceLock::new();
    match VERDICT.get_or_init(probe_kvm) {
        KvmVerdict::Hardware { .. } => Ok(TestedKvm { kernel: common::kernel()?, initrd }),
        verdict => Err(verdict.to_string()),
    }
}

fn tested() -> Option<Box<TestedKvm>> {
    match find() {
        Ok(tested) => Some(Box::new(tested)),
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

nacelle_engine::contract_tests!(tested);

#[test]
fn the_guest_uses_the_tap() {
    common::the_guest_uses_the_tap(tested(), 1);
    common::the_guest_uses_the_tap(tested(), 2);
}

#[test]
fn a_virtio_console_logs_all_messages() {
    common::a_virtio_console_logs_all_messages_in_order(tested());
}

#[test]
fn huge_pages_are_allocated_and_released() {
    common::a_vm_allocates_and_releases_huge_pages(tested());
}

#[test]
fn errors_name_a_missing_or_invalid_kernel() {
    let _suite_lock = lock_suite();
    let Some(tested) = tested() else { return };
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let strange = directory.path().join("strange");
    fs::write(&strange, "this is no kernel").unwrap();
    let start = |change: &dyn Fn(&mut nacelle_engine::MachineSpec)| {
        let mut spec = spec(&*tested, directory.path(), vec![]);
        change(&mut spec);
        let engine = tested.engine();
        engine.start(spec.check(&engine.limits()).unwrap()).err().unwrap()
    };
    for error in [start(&|spec| spec.kernel = missing.clone()), start(&|spec| spec.initrd = missing.clone())] {
        assert!(matches!(&error, EngineError::File { what: "open", path, .. } if *path == missing), "{error:?}");
    }
    let error = start(&|spec| spec.kernel = strange.clone());
    assert!(matches!(&error, EngineError::Machine { .. }), "{error:?}");
    let text = nacelle_base::Chain(&error).to_string();
    assert!(text.contains("strange"), "{text}");
}

/// Returns an ELF file with one segment at 16 MiB, which is also its entry point.
fn tiny_kernel(code: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    const AT: u64 = 16 << 20;
    let length = code.len() as u64;
    // 64 bits, little-endian, version 1; an executable for x86-64.
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    let words = |file: &mut Vec<u8>, words: &[u64]| words.iter().for_each(|word| file.extend(word.to_le_bytes()));
    words(&mut file, &[AT, 64, 0]); // entry, program headers, no section headers
    // Flags; the size of the header; size and number of program headers; no section headers.
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    file.extend([1, 0, 0, 0, 7, 0, 0, 0]); // type LOAD; readable, writable, executable
    words(&mut file, &[HEADERS, AT, AT, length, length, 4096]);
    file.extend(code);
    file
}

/// A triple fault is not a shutdown: the VM is lost, and there is no panic message to read.
#[test]
fn a_kernel_that_faults_at_once_has_died() {
    let _suite_lock = lock_suite();
    let Some(tested) = tested() else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(&*tested, directory.path(), vec![]);
    spec.kernel = directory.path().join("kernel");
    fs::write(&spec.kernel, tiny_kernel(b"\x0f\x0b")).unwrap(); // ud2
    let engine = tested.engine();
    let machine = engine.start(spec.check(&engine.limits()).unwrap()).unwrap();
    let link = machine.link();
    let exit = machine.wait(LONG).unwrap();
    let ExitKind::Died { code: None, signal: None, message } = &exit.how else { panic!("{exit:?}") };
    assert!(message.contains("triple fault"), "{message}");
    assert_eq!(machine.stop(StopMode::Kill).unwrap(), exit, "what has died stays dead");
    assert!(matches!(link.connect(1025, LONG), Err(LinkError::Stopped)));
}

/// VMs can be started repeatedly in one process.
#[test]
fn boot_after_boot() {
    let _suite_lock = lock_suite();
    let Some(tested) = tested() else { return };
    let boots = std::env::var("NACELLE_TEST_BOOTS").map_or(3, |text| text.parse::<u32>().unwrap());
    for boot in 0..boots {
        let vcpus = [1, 2, 4][boot as usize % 3];
        let vm = TestVm::start(&*tested, vec![], |spec| spec.vcpus = vcpus);
        assert_eq!(vm.query("cpus"), vcpus.to_string(), "boot {boot}");
        let exit = vm.machine.stop(StopMode::Kill).unwrap();
        assert_eq!(exit.how, ExitKind::Killed, "boot {boot}: {exit:?}");
    }
}

/// The VM ends with its process, and leaves no file but its log.
#[test]
fn nothing_outlives_a_killed_process() {
    let Some(directory) = common::kill_process_with_a_vm("nothing_outlives_a_killed_process", find) else { return };
    let names: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["console.log"]);
}
