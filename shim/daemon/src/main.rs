//! The binary `nacelle`.

fn main() -> std::process::ExitCode {
    nacelle_daemon::cli::run()
}
