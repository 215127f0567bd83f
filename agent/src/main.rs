//! Boots the agent, serves, and powers the VM off.

use nacelle_agent::boot::{BootError, BootedAgent, guest, host};
use nacelle_agent::server;
use nacelle_base::Chain;
use nix::sys::reboot::{RebootMode, reboot};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(host::FLAG) {
        return match host::HostArguments::parse(arguments) {
            // When this process ends, the kernel kills everything in its PID namespace.
            Some(arguments) => boot_and_serve(|| host::boot(arguments)),
            None => usage(),
        };
    }
    if std::process::id() != 1 {
        return usage();
    }
    boot_and_serve(guest::boot);
    nix::unistd::sync();
    // A VM without ACPI cannot power itself off; its VMM ends at a reset instead.
    let acpi = std::path::Path::new("/sys/firmware/acpi").exists();
    let mode = if acpi { RebootMode::RB_POWER_OFF } else { RebootMode::RB_AUTOBOOT };
    let Err(error) = reboot(mode);
    tracing::error!(%error, "cannot power off the VM");
    ExitCode::FAILURE
}

fn usage() -> ExitCode {
    eprintln!("nacelle-agent {} runs only as PID 1 of a VM or started by nacelle-pod", env!("CARGO_PKG_VERSION"));
    ExitCode::from(2)
}

/// Boots and serves until the host sends Shutdown.
fn boot_and_serve(boot: impl FnOnce() -> Result<BootedAgent, BootError>) -> ExitCode {
    match boot() {
        Ok(ready) => match server::serve(ready) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => tracing::error!(error = %Chain(&error), "the agent cannot serve"),
        },
        Err(error) => {
            tracing::error!(error = %Chain(&error), "the guest cannot be configured");
            eprintln!("nacelle-agent: {}", Chain(&error));
        }
    }
    ExitCode::FAILURE
}
