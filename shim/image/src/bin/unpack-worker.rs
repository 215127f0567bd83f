//! The worker of this crate's own tests. Nodes have `nacelle-unpack` (`shim/daemon/src/bin`), which does the same.

use std::process::ExitCode;

fn main() -> ExitCode {
    nacelle_image::run_worker_program(std::env::args().skip(1))
}
