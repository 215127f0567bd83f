//! Owns: the order of the agent's life: boot, serve, end the machine.

use nacelle_agent::{boot, serve};
use nacelle_base::Chain;
use nix::sys::reboot::{RebootMode, reboot};

fn main() {
    if std::process::id() != 1 {
        eprintln!("nacelle-agent {} is PID 1 of a machine and runs nowhere else", env!("CARGO_PKG_VERSION"));
        std::process::exit(2);
    }
    match boot::boot() {
        Ok(ready) => {
            if let Err(error) = serve::serve(ready) {
                tracing::error!(error = %Chain(&error), "the agent cannot serve");
            }
        }
        Err(error) => {
            tracing::error!(error = %Chain(&error), "the guest does not become ready");
            eprintln!("nacelle-agent: {}", Chain(&error));
        }
    }
    nix::unistd::sync();
    // A machine without ACPI cannot switch itself off; its VMM ends at a reset instead.
    let acpi = std::path::Path::new("/sys/firmware/acpi").exists();
    let mode = if acpi { RebootMode::RB_POWER_OFF } else { RebootMode::RB_AUTOBOOT };
    let Err(error) = reboot(mode);
    tracing::error!(%error, "cannot end the machine");
}
