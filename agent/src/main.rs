//! Boots the agent, serves, and powers the VM off.

use nacelle_agent::boot::{BootError, BootedAgent, guest, host};
use nacelle_agent::server;
use nacelle_base::Chain;
use nix::sys::reboot::{RebootMode, reboot};
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some(host::FLAG) => {
            return match host::HostArguments::parse(arguments) {
                // When this process ends, the kernel kills everything in its PID namespace.
                Some(arguments) => boot_and_serve(|| host::boot(arguments)),
                None => usage(),
            };
        }
        // The kernel passes parameters that it does not know to PID 1.
        Some("-h" | "--help") if std::process::id() != 1 => return answer(HELP),
        Some("-V" | "--version") if std::process::id() != 1 => return answer(""),
        _ => {}
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

/// The text of `--help` below the version.
const HELP: &str = "\nStarts the containers of a pod in its VM, and for engine host on the node.\n\
                    Nacelle starts this program; it has no options for people except --help and --version.\n";

/// Prints the version and `text`.
fn answer(text: &str) -> ExitCode {
    // A closed pipe is no failure of this program.
    let _ = writeln!(std::io::stdout(), "nacelle-agent {}{text}", version());
    ExitCode::SUCCESS
}

/// Returns the version, and the commit if the build knew it.
fn version() -> String {
    let commit = option_env!("NACELLE_COMMIT").map(|commit| format!(" ({commit})")).unwrap_or_default();
    format!("{}{commit}", env!("CARGO_PKG_VERSION"))
}

fn usage() -> ExitCode {
    eprintln!("nacelle-agent {} runs only as PID 1 of a VM or started by nacelle-pod", version());
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
