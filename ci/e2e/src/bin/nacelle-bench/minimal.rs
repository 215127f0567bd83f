//! Measures the lower bound of a boot: a VMM that only loads the same kernel and initramfs (this program again, as `nacelle-bench
//! --minimal DESCRIPTION`), from the start of its process until an init that only reports that it runs. A serial port is its only
//! device.

use crate::machines::{LIMIT, Setup, now};
use crate::microvm::says_mark;
use nacelle_e2e::part;
use nacelle_vmm::machine::{Builder, Config};
use std::process::{Command, ExitCode};
use std::sync::mpsc::channel;

/// The first argument of `nacelle-bench --minimal DESCRIPTION`.
pub const SERVE: &str = "--minimal";
/// The parameters of our engine, and the init that is in the agent's initramfs.
const CMDLINE: [&str; 5] = ["console=ttyS0", "quiet", "panic=-1", "noreplace-smp", "rdinit=/floor"];

/// The durations of a boot in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Floor {
    /// Until the guest ran.
    pub vmm: f64,
    /// From then until its init ran.
    pub kernel: f64,
}

impl Floor {
    /// Returns the time from the start of the process until the guest's init ran.
    pub fn total(&self) -> f64 {
        self.vmm + self.kernel
    }
}

/// Boots once.
pub fn boot(setup: &Setup) -> Floor {
    let setup = Setup { initrd: part("NACELLE_FLOOR_INITRD"), ..setup.clone() };
    let description = serde_json::to_string(&setup).expect("a description is plain data");
    let started = now();
    let this = std::env::current_exe().expect("this program has a path");
    let output = Command::new(this).args([SERVE, &description]).output().expect("this program can be started");
    let (running, there): (u64, u64) =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("the floor: {error}: {output:?}"));
    let ms = |from: u64, to: u64| (to - from) as f64 / 1e6;
    Floor { vmm: ms(started, running), kernel: ms(running, there) }
}

/// Runs the child: boots, and prints when the guest ran and when its init ran (CLOCK_MONOTONIC, nanoseconds).
pub fn serve(description: &str) -> ExitCode {
    let Setup { kernel, initrd, memory_mib, .. } = serde_json::from_str(description).expect("a description");
    let cmdline = CMDLINE.map(str::to_owned).to_vec();
    let config = Config { kernel, initrd: Some(initrd), memory_mib, cmdline, ..Config::default() };
    let (there, seen) = channel();
    let mut said = Vec::new();
    let console = move |bytes: &[u8]| {
        said.extend_from_slice(bytes);
        if says_mark(&said) {
            // Only the first message is received.
            let _ = there.send(now());
        }
    };
    let mut builder = Builder::new(config).expect("a machine");
    builder.serial(Box::new(console)).expect("a serial port");
    let machine = builder.start().expect("to start");
    let running = now();
    let at =
        seen.recv_timeout(LIMIT).unwrap_or_else(|_timeout| panic!("no init; {:?}", machine.wait(Default::default())));
    println!("{}", serde_json::json!([running, at]));
    ExitCode::SUCCESS
}
