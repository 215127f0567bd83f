//! Owns: the start of the program.

fn main() -> std::process::ExitCode {
    nacelle_daemon::cli::run()
}
