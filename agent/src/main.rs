//! Owns: the order of the agent's life: boot, serve, end the machine.

use nacelle_agent::boot::{BootError, Ready, guest, host};
use nacelle_agent::server;
use nacelle_base::Chain;
use nix::sys::reboot::{RebootMode, reboot};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(host::FLAG) {
        return match host::Place::parse(arguments) {
            // With this process its PID namespace ends, and with that everything in it.
            Some(place) => live(|| host::boot(place)),
            None => usage(),
        };
    }
    if std::process::id() != 1 {
        return usage();
    }
    live(guest::boot);
    nix::unistd::sync();
    // A machine without ACPI cannot switch itself off; its VMM ends at a reset instead.
    let acpi = std::path::Path::new("/sys/firmware/acpi").exists();
    let mode = if acpi { RebootMode::RB_POWER_OFF } else { RebootMode::RB_AUTOBOOT };
    let Err(error) = reboot(mode);
    tracing::error!(%error, "cannot end the machine");
    ExitCode::FAILURE
}

fn usage() -> ExitCode {
    eprintln!(
        "nacelle-agent {} is PID 1 of a machine, or is started by nacelle-pod, and runs nowhere else",
        env!("CARGO_PKG_VERSION")
    );
    ExitCode::from(2)
}

/// Boots and serves, until it is told to end.
fn live(boot: impl FnOnce() -> Result<Ready, BootError>) -> ExitCode {
    match boot() {
        Ok(ready) => match server::serve(ready) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => tracing::error!(error = %Chain(&error), "the agent cannot serve"),
        },
        Err(error) => {
            tracing::error!(error = %Chain(&error), "the pod does not become ready");
            eprintln!("nacelle-agent: {}", Chain(&error));
        }
    }
    ExitCode::FAILURE
}
