//! Runs the contract tests on QEMU, with the guest kernel and the small init of this suite. Skipped, with the reason, where
//! QEMU, the kernel or a compiler is missing.

#[path = "../common/mod.rs"]
mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::LONG;
use nacelle_engine::contract::{TestedEngine, lock_suite, spec};
use nacelle_engine::qemu::{PROGRAM, QemuEngine};
use nacelle_engine::{
    Accelerator, BOOT_PORT, Engine, EngineError, ExitKind, MachineStatus, choose_accelerator, probe_kvm,
};

struct TestedQemu {
    accelerator: Accelerator,
    kernel: PathBuf,
    initrd: PathBuf,
}

impl TestedEngine for TestedQemu {
    fn engine(&self) -> Box<dyn Engine> {
        Box::new(QemuEngine::new(PROGRAM, self.accelerator))
    }

    fn kernel(&self) -> PathBuf {
        self.kernel.clone()
    }

    fn initrd(&self) -> PathBuf {
        self.initrd.clone()
    }

    fn kill_from_outside(&self, run_dir: &Path) -> bool {
        let [pid] = qemu_pids(run_dir)[..] else { panic!("one QEMU in {run_dir:?}") };
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
        true
    }

    fn reads_disks(&self) -> bool {
        true
    }
}

/// Returns the QEMU processes whose sockets lie in this directory.
fn qemu_pids(run_dir: &Path) -> Vec<i32> {
    let directory = run_dir.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes
        .filter(|pid: &i32| {
            let cmdline = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let cmdline = String::from_utf8_lossy(&cmdline);
            cmdline.starts_with(PROGRAM) && cmdline.contains(directory)
        })
        .collect()
}

fn find() -> Result<TestedQemu, String> {
    if !Path::new(PROGRAM).exists() {
        return Err(format!("no {PROGRAM}"));
    }
    static ACCELERATOR: OnceLock<Accelerator> = OnceLock::new();
    let accelerator = *ACCELERATOR.get_or_init(|| choose_accelerator(&probe_kvm()));
    Ok(TestedQemu { accelerator, kernel: common::kernel()?, initrd: common::initrd()? })
}

fn tested() -> Option<Box<TestedQemu>> {
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
fn qemus_error_output_is_reported() {
    let _suite_lock = lock_suite();
    let Some(tested) = tested() else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(&*tested, directory.path(), vec![]);
    spec.kernel = directory.path().join("no-kernel");
    fs::write(&spec.kernel, "this is no kernel").unwrap();
    let engine = tested.engine();
    let machine = engine.start(spec.check(&engine.limits()).unwrap()).unwrap();
    let exit = machine.wait(LONG).unwrap();
    let ExitKind::Died { code: Some(1), signal: None, message } = &exit.how else { panic!("{exit:?}") };
    assert!(!message.is_empty(), "QEMU says why");
    assert_eq!(machine.status(), MachineStatus::Exited(exit));
}

#[test]
fn errors_name_a_missing_program_or_kernel() {
    let _suite_lock = lock_suite();
    let Some(tested) = tested() else { return };
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let engine = QemuEngine::new(&missing, Accelerator::Tcg);
    let error = engine.start(spec(&*tested, directory.path(), vec![]).check(&engine.limits()).unwrap()).err().unwrap();
    assert!(matches!(&error, EngineError::Spawn { program, .. } if *program == missing), "{error:?}");
    let mut spec = spec(&*tested, directory.path(), vec![]);
    spec.kernel = missing.clone();
    let engine = tested.engine();
    let error = engine.start(spec.check(&engine.limits()).unwrap()).err().unwrap();
    assert!(matches!(&error, EngineError::File { path, .. } if *path == missing), "{error:?}");
}

#[test]
fn qemu_inherits_only_what_it_needs() {
    let _suite_lock = lock_suite();
    let Some(tested) = tested() else { return };
    let directory = tempfile::tempdir().unwrap();
    // A descriptor that is not marked close-on-exec by mistake.
    let secret = fs::File::create(directory.path().join("secret")).unwrap();
    nix::fcntl::fcntl(&secret, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let engine = tested.engine();
    let machine = engine.start(spec(&*tested, directory.path(), vec![]).check(&engine.limits()).unwrap()).unwrap();
    let link = machine.link();
    link.listen(BOOT_PORT).unwrap().accept(LONG).unwrap();
    let [pid] = qemu_pids(directory.path())[..] else { panic!("one QEMU") };
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let target = fs::read_link(entry.unwrap().path()).unwrap_or_default();
        assert!(!target.ends_with("secret"), "QEMU has {target:?}");
    }
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    assert!(environment.is_empty(), "{:?}", String::from_utf8_lossy(&environment));
}

#[test]
fn the_guest_uses_the_tap() {
    common::the_guest_uses_the_tap(tested(), 1);
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
fn qemu_dies_with_its_process() {
    let Some(directory) = common::kill_process_with_a_vm("qemu_dies_with_its_process", find) else { return };
    let until = Instant::now() + LONG;
    while !qemu_pids(directory.path()).is_empty() {
        assert!(Instant::now() < until, "QEMU outlives its process");
        std::thread::sleep(Duration::from_millis(20));
    }
}
