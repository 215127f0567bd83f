//! Prints the results of commands. A command returns or prints a value that implements [`TableView`], so each result has all
//! formats. Nothing else in this module's siblings writes to standard output: a closed pipe must not panic.

use super::exit::CommandError;
use anyhow::Context;
use clap::ValueEnum;
use serde::Serialize;
use std::io::{self, Write};

/// The format of a command's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum OutputFormat {
    /// Text for people. It may change with any version.
    #[default]
    #[value(alias = "text")]
    Table,
    /// JSON, for programs.
    Json,
    /// The same fields as YAML.
    Yaml,
}

/// The option for the format.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct OutputArgument {
    /// The format of the output.
    #[arg(long, short, value_enum, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
    /// The same as --output json.
    #[arg(long, hide = true, conflicts_with = "output")]
    json: bool,
}

/// The result of a command: its fields are the JSON, and it can be read as text.
pub(super) trait TableView: Serialize {
    /// Returns the text of `--output table`, which ends with a newline unless it is empty.
    fn table(&self) -> String;
}

impl OutputArgument {
    /// Prints a result in the chosen format.
    pub(super) fn print(self, result: &impl TableView) -> anyhow::Result<()> {
        print(&self.format(result)?)
    }

    /// Returns whether the output is text for people.
    pub(super) fn is_table(self) -> bool {
        !self.json && self.output == OutputFormat::Table
    }

    fn format(self, result: &impl TableView) -> anyhow::Result<String> {
        let format = if self.json { OutputFormat::Json } else { self.output };
        Ok(match format {
            OutputFormat::Table => result.table(),
            OutputFormat::Json => {
                serde_json::to_string_pretty(result).context("cannot format the result as JSON")? + "\n"
            }
            OutputFormat::Yaml => serde_saphyr::to_string(result).context("cannot format the result as YAML")?,
        })
    }
}

/// Writes text to standard output.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// Writes bytes to standard output.
pub(super) fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(bytes).and_then(|()| output.flush()).map_err(output_error)
}

/// Writes a line to standard error. An error is ignored: there is no other place to report it.
pub(super) fn warn(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Converts an error of standard output: a closed pipe is no failure that a person must read.
pub(super) fn output_error(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => CommandError::OutputClosed.into(),
        _ => anyhow::Error::new(error).context("cannot write to standard output"),
    }
}

#[cfg(test)]
impl OutputArgument {
    /// Returns a result in a format.
    pub(super) fn text(format: OutputFormat, result: &impl TableView) -> String {
        OutputArgument { output: format, json: false }.format(result).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Sample {
        size_bytes: u64,
    }

    impl TableView for Sample {
        fn table(&self) -> String {
            "SIZE\n".to_owned()
        }
    }

    #[test]
    fn a_result_has_all_formats() {
        let sample = Sample { size_bytes: 5 };
        let of = |format| OutputArgument::text(format, &sample);
        assert_eq!(of(OutputFormat::Table), "SIZE\n");
        assert_eq!(of(OutputFormat::Json), "{\n  \"sizeBytes\": 5\n}\n");
        assert_eq!(of(OutputFormat::Yaml).trim_end(), "sizeBytes: 5");
        let json = OutputArgument { output: OutputFormat::Table, json: true };
        assert_eq!(json.format(&sample).unwrap(), of(OutputFormat::Json));
    }
}
