//! The binary of the workers that decode layers of images. The daemon starts them; they log nothing.

use nacelle_daemon::program;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(status) = program::answer_usual_flags("nacelle-unpack", "Decodes the layers of images, in a jail.") {
        return status;
    }
    nacelle_image::run_worker_program(std::env::args().skip(1))
}
