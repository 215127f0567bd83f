//! Owns: the start of the program that keeps the machine of a machine pod. A pod process starts it.

use nacelle_daemon::program;
use std::process::ExitCode;

fn main() -> ExitCode {
    // What it prints is the end of the pod's console that the daemon shows.
    program::log_for_the_recorder();
    nacelle_keeper::run(std::env::args().skip(1))
}
