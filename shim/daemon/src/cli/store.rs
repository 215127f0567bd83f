//! Implements `nacelle store`: exports the records of the state store to a file, and replaces the store by such a file.

use crate::config::Config;
use crate::server::import_state_store;
use nacelle_store::{StoreCounts, export_store};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Subcommand)]
pub(super) enum StoreCommand {
    /// Writes all records of pods, containers and persistent VMs to a file of mode 0600. The daemon may run.
    Export {
        /// The file, which is replaced if it exists. It contains the environment of containers.
        file: PathBuf,
    },
    /// Begins a new state store with the records of an exported file. The daemon must not run; its next start ends pods without a record.
    Import {
        /// The exported file.
        file: PathBuf,
        /// Sets an existing state store aside.
        #[arg(long)]
        replace: bool,
    },
}

pub(super) fn run(config: &Config, command: StoreCommand) -> anyhow::Result<ExitCode> {
    let store = config.paths.store();
    let (action, counts) = match command {
        StoreCommand::Export { file } => ("exported", export_store(&store, &file)?),
        StoreCommand::Import { file, replace } => ("imported", import_state_store(config, &file, replace)?),
    };
    let StoreCounts { pods, containers, vms } = counts;
    println!("{action} {pods} pods, {containers} containers, {vms} persistent VMs");
    Ok(ExitCode::SUCCESS)
}
