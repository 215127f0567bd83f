//! Measures the lower bound of a boot: a VMM that only loads the same kernel and initramfs (this program again, as `nacelle-bench
//! --minimal DESCRIPTION`), from the start of its process until an init that only reports that it runs. A serial port is its only
//! device.

use crate::machines::{START_LIMIT, VmDescription, monotonic_nanos};
use crate::microvm::contains_mark;
use nacelle_e2e::path_from_env;
use nacelle_vmm::machine::{VmBuilder, VmConfig};
use std::process::{Command, ExitCode};
use std::sync::mpsc::channel;

/// The first argument of `nacelle-bench --minimal DESCRIPTION`.
pub const CHILD_ARGUMENT: &str = "--minimal";
/// The parameters of our engine, and the init that is in the agent's initramfs.
const CMDLINE: [&str; 5] = ["console=ttyS0", "quiet", "panic=-1", "noreplace-smp", "rdinit=/floor"];

/// The durations of a boot in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct BootFloor {
    /// Until the guest ran.
    pub vmm: f64,
    /// From then until its init ran.
    pub kernel: f64,
}

impl BootFloor {
    /// Returns the time from the start of the process until the guest's init ran.
    pub fn total(&self) -> f64 {
        self.vmm + self.kernel
    }
}

/// Boots once.
pub fn boot(vm: &VmDescription) -> BootFloor {
    let vm = VmDescription { initrd: path_from_env("NACELLE_FLOOR_INITRD"), ..vm.clone() };
    let description = serde_json::to_string(&vm).expect("a description is plain data");
    let started = monotonic_nanos();
    let this = std::env::current_exe().expect("this program has a path");
    let output = Command::new(this).args([CHILD_ARGUMENT, &description]).output().expect("this program can be started");
    let (running, init_ran): (u64, u64) =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("the floor: {error}: {output:?}"));
    let ms = |from: u64, to: u64| (to - from) as f64 / 1e6;
    BootFloor { vmm: ms(started, running), kernel: ms(running, init_ran) }
}

/// Runs the child: boots, and prints when the guest ran and when its init ran (CLOCK_MONOTONIC, nanoseconds).
pub fn run_minimal_child(description: &str) -> ExitCode {
    let VmDescription { kernel, initrd, memory_mib, .. } = serde_json::from_str(description).expect("a description");
    let cmdline = CMDLINE.map(str::to_owned).to_vec();
    let config = VmConfig { kernel, initrd: Some(initrd), memory_mib, cmdline, ..VmConfig::default() };
    let (init_ran, init_reports) = channel();
    let mut output = Vec::new();
    let console = move |bytes: &[u8]| {
        output.extend_from_slice(bytes);
        if contains_mark(&output) {
            // Only the first message is received.
            let _ = init_ran.send(monotonic_nanos());
        }
    };
    let mut builder = VmBuilder::new(config).expect("a machine");
    builder.serial(Box::new(console)).expect("a serial port");
    let machine = builder.start().expect("to start");
    let running = monotonic_nanos();
    let at = init_reports
        .recv_timeout(START_LIMIT)
        .unwrap_or_else(|_timeout| panic!("no init; {:?}", machine.wait(Default::default())));
    println!("{}", serde_json::json!([running, at]));
    ExitCode::SUCCESS
}
