//! Writes the tables of the reference pages that follow from the code (`cargo xtask docs`).
//!
//! The tests that compare these tables with the code write them when `NACELLE_WRITE_DOCS` is set, so this only runs those tests.

use std::path::Path;
use std::process::{Command, ExitCode};

/// The arguments of `cargo test` for the tests that write: the field reference, and the other pages.
const TESTS: [&[&str]; 2] = [
    &["-p", "nacelle-machines", "--lib", "the_field_reference_matches_the_code"],
    &["-p", "nacelle-vmi", "--test", "docs"],
];

pub fn write(root: &Path) -> ExitCode {
    for arguments in TESTS {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let status = Command::new(cargo)
            .args(["test", "--quiet", "--locked"])
            .args(arguments)
            .env("NACELLE_WRITE_DOCS", "1")
            .current_dir(root)
            .status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => {
                eprintln!("docs: cannot write the tables: cargo test {} failed: {status}", arguments.join(" "));
                return ExitCode::FAILURE;
            }
            Err(error) => {
                eprintln!("docs: cannot write the tables: cannot run cargo: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
