//! Owns: the floor of a boot: a VMM that does nothing but load the same kernel and initramfs (this program once more, as
//! `nacelle-bench --minimal DESCRIPTION`), from the start of its process until an init that only says that it is there. A
//! serial port is its only device.

use crate::machines::{LIMIT, Setup, now};
use crate::microvm::says_mark;
use nacelle_e2e::part;
use nacelle_vmm::machine::{Builder, Config};
use std::process::{Command, ExitCode};
use std::sync::mpsc::channel;

/// The first word of `nacelle-bench --minimal DESCRIPTION`.
pub const SERVE: &str = "--minimal";
/// As our engine has them, and the init that lies beside the agent.
const CMDLINE: [&str; 5] = ["console=ttyS0", "quiet", "panic=-1", "noreplace-smp", "rdinit=/floor"];

/// A boot, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Floor {
    /// Until the guest ran.
    pub vmm: f64,
    /// From then until its init was there.
    pub kernel: f64,
}

impl Floor {
    /// From the start of the process until the guest's init was there.
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

/// The child's half: boots, and says when the guest ran and when its init was there (CLOCK_MONOTONIC, nanoseconds).
pub fn serve(description: &str) -> ExitCode {
    let Setup { kernel, initrd, memory_mib, .. } = serde_json::from_str(description).expect("a description");
    let cmdline = CMDLINE.map(str::to_owned).to_vec();
    let config = Config { kernel, initrd: Some(initrd), memory_mib, cmdline, ..Config::default() };
    let (there, seen) = channel();
    let mut said = Vec::new();
    let console = move |bytes: &[u8]| {
        said.extend_from_slice(bytes);
        if says_mark(&said) {
            // Once is enough: then nobody listens any more.
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
