//! Starts a VM in a process and kills that process.

use std::fs;
use std::path::Path;
use std::process::Command;

use nacelle_engine::BOOT_PORT;
use nacelle_engine::contract::{TestedEngine, lock_suite, spec};
use tempfile::TempDir;

use super::LONG;

/// Returns the run directory of a VM whose process was killed once its guest had said hello; `None` where VMs cannot run.
/// The process runs the test named `test` again, which must call this first.
pub fn kill_process_with_a_vm<W: TestedEngine>(test: &str, find: fn() -> Result<W, String>) -> Option<TempDir> {
    const DIRECTORY: &str = "NACELLE_TEST_DIE_WITH_A_MACHINE";
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        start_a_vm_and_die(&find().unwrap(), Path::new(&directory));
    }
    let _suite_lock = lock_suite();
    if let Err(why) = find() {
        println!("skipped: {why}");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(DIRECTORY, directory.path());
    let output = command.output().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(9), "{output:?}");
    fs::remove_file(directory.path().join("it-ran"))
        .unwrap_or_else(|error| panic!("it had no machine: {error}; {output:?}"));
    Some(directory)
}

fn start_a_vm_and_die(tested: &dyn TestedEngine, directory: &Path) -> ! {
    let engine = tested.engine();
    let machine = engine.start(spec(tested, directory, vec![]).check(&engine.limits()).unwrap()).unwrap();
    machine.link().listen(BOOT_PORT).unwrap().accept(LONG).unwrap();
    fs::write(directory.join("it-ran"), "").unwrap();
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
    unreachable!("killed")
}
