//! The binary of the workers that decode layers of images. The daemon starts them; they log nothing.

use std::process::ExitCode;

fn main() -> ExitCode {
    nacelle_image::run_worker_program(std::env::args().skip(1))
}
