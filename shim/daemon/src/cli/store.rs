//! Implements `nacelle store`: exports the records of the state store to a file, and replaces the store by such a file.

use super::ExitStatus;
use super::output::{OutputArgument, TableView};
use crate::config::Config;
use crate::server::import_state_store;
use nacelle_store::{StoreCounts, export_store};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Subcommand)]
pub(super) enum StoreCommand {
    /// Writes all records of pods, containers and persistent VMs to a file of mode 0600. The daemon may run.
    Export {
        /// The file, which is replaced if it exists. It contains the environment of containers.
        file: PathBuf,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Begins a new state store with the records of an exported file. The daemon must not run; its next start ends pods without a record.
    Import {
        /// The exported file.
        file: PathBuf,
        /// Sets an existing state store aside.
        #[arg(long)]
        replace: bool,
        #[command(flatten)]
        output: OutputArgument,
    },
}

/// The numbers of records.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct StoreCountsView {
    pods: usize,
    containers: usize,
    vms: usize,
}

impl From<StoreCounts> for StoreCountsView {
    fn from(StoreCounts { pods, containers, vms }: StoreCounts) -> StoreCountsView {
        StoreCountsView { pods, containers, vms }
    }
}

impl TableView for StoreCountsView {
    fn table(&self) -> String {
        format!("{} pods, {} containers, {} persistent VMs\n", self.pods, self.containers, self.vms)
    }
}

pub(super) fn run(config: &Config, command: StoreCommand) -> anyhow::Result<ExitStatus> {
    let (counts, output) = match command {
        StoreCommand::Export { file, output } => (export_store(&config.paths.store(), &file)?, output),
        StoreCommand::Import { file, replace, output } => (import_state_store(config, &file, replace)?, output),
    };
    output.print(&StoreCountsView::from(counts))?;
    Ok(ExitStatus::Success)
}
