//! Owns: the commands of `nacelle` and what each of them reads from the command line.

mod check;
mod image;
mod serve;

use clap::{Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// The Kubernetes container runtime in which every pod is a virtual machine.
#[derive(Parser)]
#[command(name = "nacelle", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    /// How log lines are written to standard error.
    #[arg(long, global = true, value_enum, default_value = "text", env = "NACELLE_LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Serves CRI on a unix socket.
    Serve(Config),
    /// Runs one pod. The daemon starts this.
    Pod {
        /// The pod's folder, with its spec.json.
        #[arg(long)]
        dir: PathBuf,
    },
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
    if matches!(cli.command, Command::Serve(_) | Command::Pod { .. }) {
        more_files();
    }
    let done = match cli.command {
        Command::Serve(config) => config.load().and_then(serve::serve),
        Command::Pod { dir } => return nacelle_pod::run(&dir),
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

/// Allows as many open files as the hard limit does: a connection of a pod takes two, and the usual soft limit of 1024
/// is a guess about programs that use select(2).
fn more_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) });
    if let Err(error) = raised {
        tracing::warn!("the limit on open files stays as it is: {error}");
    }
}

fn log(format: LogFormat) {
    let filter = EnvFilter::try_from_env("NACELLE_LOG").unwrap_or_else(|_unset| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    match format {
        LogFormat::Text => lines.with_target(false).init(),
        LogFormat::Json => lines.json().init(),
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}
