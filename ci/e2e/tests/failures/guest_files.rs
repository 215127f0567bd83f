//! Handlers whose guests cannot start: each has a kernel or an initramfs that is missing or damaged.

use nacelle_e2e::failure_answer::{check_request, try_run_pod};
use nacelle_e2e::node::{SMALL_VM, engine};
use nacelle_e2e::{TestNode, path_from_env};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// The rows that [`check`] causes. The n-th one has the handler `fails-n`.
pub const ROWS: [&str; 8] = [
    "kernel missing",
    "kernel corrupt",
    "kernel cut off",
    "kernel too old",
    "initramfs missing",
    "initramfs cut off",
    "initramfs corrupt",
    "initramfs without an agent",
];

/// The rows of a node without QEMU and KVM.
pub const MISSING_ON_THE_NODE: [&str; 2] = ["QEMU missing", "no /dev/kvm with engine kvm"];

/// A cpio archive without files.
const EMPTY_ARCHIVE: &str = "070701000000000000000000000000000000000000000100000000000000000000000000000000\
                             00000000000000000000000B00000000TRAILER!!!\0";

/// Writes the files into a directory, and returns the configuration of the handlers.
pub fn handlers(directory: &Path) -> String {
    let [kernel, initrd] = ["NACELLE_KERNEL", "NACELLE_INITRD"].map(path_from_env);
    let write = |name: &str, content: &[u8]| {
        let path = directory.join(name);
        fs::write(&path, content).expect("the directory is writable");
        path
    };
    let half = |name: &str, path: &Path| {
        let whole = fs::read(path).expect("ci/test has made it");
        write(name, &whole[..whole.len() / 2])
    };
    let noise: Vec<u8> = (0..1_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let noise = write("noise", &noise);
    // A bzImage of boot protocol 2.0.
    let mut old = vec![0; 4096];
    old[0x202..0x208].copy_from_slice(b"HdrS\x00\x02");
    let old = write("old", &old);
    let missing = directory.join("missing");
    let kernels = [missing.clone(), noise.clone(), half("half-kernel", &kernel), old];
    let initrds = [missing, half("half-initrd", &initrd), noise, write("empty", EMPTY_ARCHIVE.as_bytes())];
    let files = kernels.into_iter().map(|bad| (bad, initrd.clone()));
    let files = files.chain(initrds.into_iter().map(|bad| (kernel.clone(), bad)));
    files
        .enumerate()
        .fold(String::new(), |text, (number, files)| text + &handler(&format!("fails-{number}"), &engine(), files))
}

/// Returns a handler of this engine with the name of the engine.
pub fn handler_of_engine(engine: &str) -> String {
    handler(engine, engine, (path_from_env("NACELLE_KERNEL"), path_from_env("NACELLE_INITRD")))
}

fn handler(name: &str, engine: &str, (kernel, initrd): (PathBuf, PathBuf)) -> String {
    let mut text = format!("[handlers.{name}]\n{SMALL_VM}");
    writeln!(text, "engine = {engine:?}\nkernel = {kernel:?}\ninitrd = {initrd:?}").expect("a String");
    text
}

/// Runs a pod with each of the handlers.
pub fn check(node: &TestNode) {
    for (number, failure) in ROWS.into_iter().enumerate() {
        check_request(node, failure, &try_run_pod(node, &format!("fails-{number}")));
    }
}
