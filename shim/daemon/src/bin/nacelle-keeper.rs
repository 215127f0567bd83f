//! The binary of the keeper, which holds the VM of a machine pod. A pod process starts it.

use nacelle_daemon::log;
use std::process::ExitCode;

fn main() -> ExitCode {
    // The log lines become part of the pod's console, whose end the daemon shows.
    log::init_recorder_log();
    nacelle_keeper::run(std::env::args().skip(1))
}
