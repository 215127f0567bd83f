//! Measures the lower bound of a pod's start: plain QEMU microvm with the same kernel and an init that only prints a line.

use crate::cri::milliseconds;
use nacelle_e2e::{eventually, path_from_env, run};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// The source of an init that only prints [`INIT_LINE`].
const INIT_SOURCE: &str = include_str!("init.c");
/// The line that the init prints.
pub const INIT_LINE: &[u8] = b"init is here";

/// Builds an initramfs with that init below `directory`, unless `NACELLE_PLAIN_INITRD` names one (the node has no compiler).
pub fn initramfs(directory: &Path) -> PathBuf {
    if let Some(made) = std::env::var_os("NACELLE_PLAIN_INITRD") {
        return made.into();
    }
    let root = directory.join("plain");
    fs::create_dir_all(&root).expect("the bench's directory is writable");
    fs::write(directory.join("init.c"), INIT_SOURCE).expect("the bench's directory is writable");
    let compiled = Command::new("gcc")
        .args(["-static", "-O1", "-o"])
        .arg(root.join("init"))
        .arg(directory.join("init.c"))
        .status();
    assert!(compiled.expect("gcc is installed").success());
    let archive = directory.join("plain.cpio");
    let pack = format!("cd {} && echo init | cpio --quiet -o -H newc > {}", root.display(), archive.display());
    run::run_program("sh", ["-c", &pack]).ok();
    archive
}

/// Measures the milliseconds from the start of QEMU to the line of the init; `tuning` are further kernel parameters.
pub fn boot(initramfs: &Path, tuning: &[String]) -> f64 {
    let (mut machine, took) = start_qemu(initramfs, "tcg", tuning);
    machine.kill().expect("QEMU is our child");
    machine.wait().expect("QEMU is our child");
    took
}

/// Like `boot`, for a VM that keeps running, with this accelerator.
pub fn start_qemu(initramfs: &Path, accel: &str, tuning: &[String]) -> (Child, f64) {
    let parameters = format!("console=ttyS0 quiet reboot=t panic=-1 {}", tuning.join(" "));
    let start = Instant::now();
    let mut machine = Command::new("qemu-system-x86_64")
        .args(["-M", &format!("microvm,acpi=off,pit=on,pic=on,isa-serial=on,accel={accel}")])
        .args(["-cpu", "max", "-m", "128", "-smp", "1"])
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"])
        .args(["-append", &parameters])
        .arg("-kernel")
        .arg(path_from_env("NACELLE_KERNEL"))
        .arg("-initrd")
        .arg(initramfs)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("QEMU is installed");
    let mut console = machine.stdout.take().expect("its console is ours");
    let mut output = Vec::new();
    let took = eventually("init prints its line", || {
        let mut some = [0; 256];
        let length = console.read(&mut some).expect("the console is readable");
        output.extend_from_slice(&some[..length]);
        assert!(length > 0, "QEMU ended: {}", String::from_utf8_lossy(&output));
        contains_mark(&output).then(|| milliseconds(start))
    });
    (machine, took)
}

/// Returns whether the console output contains the line of the init.
pub fn contains_mark(output: &[u8]) -> bool {
    output.windows(INIT_LINE.len()).any(|window| window == INIT_LINE)
}
