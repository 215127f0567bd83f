//! Owns: the commands of `nacelle` and what each of them reads from the command line.

mod check;
mod image;
mod serve;

use crate::program::{LogFormat, log, more_files};
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// The Kubernetes container runtime in which every pod is a virtual machine.
#[derive(Parser)]
#[command(name = "nacelle", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    /// How log lines are written to standard error.
    #[arg(long, global = true, value_enum, default_value = "text", env = LogFormat::VARIABLE)]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Serves CRI on a unix socket.
    Serve(Config),
    /// Says what this node can do, and what is missing.
    Check(Config),
    /// Works with the images of this node, through the daemon if it runs.
    Image {
        #[command(flatten)]
        config: Config,
        #[command(subcommand)]
        command: image::Image,
    },
    /// Prints the version.
    Version,
}

#[derive(clap::Args)]
struct Config {
    /// The configuration; without it /etc/nacelle/config.toml, if that is there.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Config {
    fn load(&self) -> anyhow::Result<crate::config::Config> {
        Ok(crate::config::Config::load(self.config.as_deref())?)
    }
}

/// Does what the command line says.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    log(cli.log_format);
    if matches!(cli.command, Command::Serve(_)) {
        more_files();
    }
    let done = match cli.command {
        Command::Serve(config) => config.load().and_then(serve::serve),
        Command::Check(config) => config.load().and_then(check::check),
        Command::Image { config, command } => config.load().and_then(|config| image::run(config, command)),
        Command::Version => {
            println!("nacelle {}", env!("CARGO_PKG_VERSION"));
            Ok(ExitCode::SUCCESS)
        }
    };
    done.unwrap_or_else(|error| {
        // With its causes: the first line says what, the others why.
        eprintln!("nacelle: {error:#}");
        ExitCode::FAILURE
    })
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}
