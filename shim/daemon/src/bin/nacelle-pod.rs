//! Owns: the start of the program that is a pod's process: `nacelle-pod --dir DIR`. The daemon starts it; it is a
//! program of its own because there is one for each pod: what is not in it, no pod has in memory.

use nacelle_daemon::program::{self, LogFormat};
use std::process::ExitCode;

fn main() -> ExitCode {
    let json = std::env::var_os(LogFormat::VARIABLE).is_some_and(|format| format == "json");
    program::log(if json { LogFormat::Json } else { LogFormat::Text });
    program::more_files();
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [flag, dir] if flag == "--dir" => {
            if nacelle_pod::told() {
                nacelle_pod::run(dir.as_ref())
            } else {
                ExitCode::FAILURE
            }
        }
        _ => {
            eprintln!("nacelle-pod: the daemon starts this, as: nacelle-pod --dir DIR");
            ExitCode::FAILURE
        }
    }
}
