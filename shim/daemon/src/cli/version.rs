//! Implements `nacelle version`.

use super::ExitStatus;
use super::output::{OutputArgument, TableView};
use serde::Serialize;

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct VersionView {
    version: &'static str,
    commit: Option<&'static str>,
}

impl TableView for VersionView {
    fn table(&self) -> String {
        format!("nacelle {}\n", crate::program::version())
    }
}

pub(super) fn run(output: OutputArgument) -> anyhow::Result<ExitStatus> {
    output.print(&view())?;
    Ok(ExitStatus::Success)
}

/// Returns the version of this program.
pub(super) fn view() -> VersionView {
    VersionView { version: crate::program::RELEASE, commit: crate::program::COMMIT }
}
