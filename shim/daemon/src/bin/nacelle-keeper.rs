//! The binary of the keeper, which holds the VM of a machine pod. A pod process starts it.

use nacelle_daemon::{log, program};
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(status) =
        program::answer_usual_flags("nacelle-keeper", "Runs the VM of a machine pod, in the process of that pod.")
    {
        return status;
    }
    // The log lines become part of the pod's console, whose end the daemon shows.
    log::init_recorder_log();
    nacelle_keeper::run(std::env::args().skip(1))
}
