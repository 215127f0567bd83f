//! The binary of a pod process: `nacelle-pod --dir DIR`. The daemon starts one for each pod, and one to build a template
//! (`nacelle-pod --template DIR`). It is a binary of its own because
//! each pod holds it in memory: code that it does not contain costs no pod anything.

use nacelle_daemon::log::{self, LogFormat};
use nacelle_daemon::program;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(status) =
        program::answer_usual_flags("nacelle-pod", "The process of one pod: it starts the VM and serves the daemon.")
    {
        return status;
    }
    let json = std::env::var_os(LogFormat::VARIABLE).is_some_and(|format| format == "json");
    log::init_pod_log(if json { LogFormat::Json } else { LogFormat::Text });
    program::raise_file_limit();
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [flag, dir] if flag == "--dir" => {
            if nacelle_pod::wait_for_admission() {
                nacelle_pod::run(dir.as_ref())
            } else {
                ExitCode::FAILURE
            }
        }
        [flag, dir] if flag == "--template" => nacelle_pod::template::build(dir.as_ref()),
        _ => {
            eprintln!("nacelle-pod: usage: nacelle-pod --dir DIR | --template DIR (the daemon starts this program)");
            ExitCode::from(2)
        }
    }
}
