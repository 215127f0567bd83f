//! Implements `nacelle config`: prints the default configuration, and checks a file.

use super::ExitStatus;
use super::output::{OutputArgument, TableView, print};
use crate::config::{Config, ConfigError, ConfigProblem, DEFAULT_PATH};
use clap::Subcommand;
use serde::Serialize;
use std::path::PathBuf;

/// The commented file that packages install: all of it is comments and section names.
const DEFAULT_CONFIGURATION: &str = include_str!("../../../../ci/package.d/config.toml");

#[derive(Subcommand)]
pub(super) enum ConfigCommand {
    /// Prints a complete, commented configuration: the defaults are commented out.
    Default,
    /// Checks a configuration file as `nacelle serve` does, and reports all errors with their lines.
    Check {
        /// The file [default: /etc/nacelle/config.toml].
        file: Option<PathBuf>,
        #[command(flatten)]
        output: OutputArgument,
    },
}

/// The result of a check.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct ConfigReport {
    file: PathBuf,
    valid: bool,
    errors: Vec<ConfigProblem>,
}

impl TableView for ConfigReport {
    /// Returns a line for each error, in the form of compilers, which editors understand.
    fn table(&self) -> String {
        let file = self.file.display();
        if self.valid {
            return format!("{file}: valid\n");
        }
        let line = |problem: &ConfigProblem| match (problem.line, problem.column) {
            (Some(line), Some(column)) => format!("{file}:{line}:{column}: {}\n", problem.reason()),
            _ => format!("{file}: {}\n", problem.reason()),
        };
        self.errors.iter().map(line).collect()
    }
}

pub(super) fn run(command: ConfigCommand) -> anyhow::Result<ExitStatus> {
    match command {
        ConfigCommand::Default => {
            print(DEFAULT_CONFIGURATION)?;
            Ok(ExitStatus::Success)
        }
        ConfigCommand::Check { file, output } => {
            let errors = match Config::load_with_files(file.as_deref()) {
                Ok(_) => Vec::new(),
                Err(ConfigError::Invalid { source, .. }) => source.list().to_vec(),
                Err(error) => return Err(error.into()),
            };
            let file = file.unwrap_or_else(|| DEFAULT_PATH.into());
            let report = ConfigReport { file, valid: errors.is_empty(), errors };
            output.print(&report)?;
            Ok(ExitStatus::of(report.valid))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_file_line_and_key() {
        let text = "[handlers.nacelle]\nvcpus = 0\n";
        let Err(ConfigError::Invalid { source, .. }) = Config::parse(text, "c.toml".as_ref()) else { panic!() };
        let report = ConfigReport { file: "c.toml".into(), valid: false, errors: source.list().to_vec() };
        assert_eq!(report.table(), "c.toml:2:9: handlers.nacelle.vcpus = 0: 1 to 64 are allowed\n");
        let json = serde_json::to_value(&report).unwrap();
        let expected = serde_json::json!({
            "line": 2, "column": 9, "key": "handlers.nacelle.vcpus", "value": "0", "message": "1 to 64 are allowed",
        });
        assert_eq!(json["errors"][0], expected);
    }

    #[test]
    fn the_default_configuration_is_valid() {
        assert!(Config::parse(DEFAULT_CONFIGURATION, "c.toml".as_ref()).is_ok());
    }
}
