//! Defines the commands of `nacelle` and their arguments.

mod admission;
mod check;
mod image;
mod machines;
mod overhead;
mod pods;
mod serve;
mod vm;

use crate::program::{LogFormat, log, more_files};
use crate::supervision::Supervisor;
use clap::{Parser, Subcommand};
use hyper_util::rt::TokioIo;
use nacelle_pod::client::connect_unix;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tonic::transport::{Channel, Endpoint, Uri};

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
    Check {
        #[command(flatten)]
        config: Config,
        /// Measures what a machine of each handler costs beside its containers, with a pod of each by the daemon, and prints RuntimeClasses.
        #[arg(long)]
        overhead: bool,
    },
    /// Works with the images of this node, through the daemon if it runs.
    Image {
        #[command(flatten)]
        config: Config,
        #[command(subcommand)]
        command: image::Image,
    },
    /// Lists the pods of this node and what they use and cost.
    Pods {
        #[command(flatten)]
        config: Config,
        /// Draws what took how long at the start of this pod and its containers.
        #[arg(long, value_name = "ID")]
        timeline: Option<String>,
    },
    /// Works with machines, and with their specifications, for which it needs no daemon.
    Vm {
        #[command(flatten)]
        config: Config,
        #[command(subcommand)]
        command: vm::Vm,
    },
    /// Tells a cluster's API server whether pods and machines are right, before they are stored: admission webhooks over https.
    Admission(Box<admission::Admission>),
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
    let done = match cli.command {
        Command::Serve(config) => {
            more_files();
            // Before any file is opened and any thread is started.
            let supervisor = Supervisor::of_environment();
            config.load().and_then(|config| serve::serve(config, supervisor?))
        }
        Command::Check { config, overhead: false } => config.load().and_then(check::check),
        Command::Check { config, overhead: true } => config.load().and_then(|config| overhead::run(&config)),
        Command::Image { config, command } => config.load().and_then(|config| image::run(config, command)),
        Command::Pods { config, timeline } => config.load().and_then(|config| pods::run(&config, timeline)),
        Command::Vm { config, command } => vm::run(&config, command),
        Command::Admission(admission) => {
            more_files();
            admission::run(*admission)
        }
        Command::Version => {
            println!("nacelle {}", env!("CARGO_PKG_VERSION"));
            Ok(ExitCode::SUCCESS)
        }
    };
    done.unwrap_or_else(|error| {
        // With its causes: the first line names the failure, the others the reasons.
        eprintln!("nacelle: {error:#}");
        ExitCode::FAILURE
    })
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

/// A channel to the daemon, if one serves.
async fn connect(socket: &Path) -> Option<Channel> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(connect_unix(&path).await?)) }
    });
    // The connector ignores this address: it knows the path of the socket.
    let endpoint = Endpoint::from_static("http://nacelle");
    endpoint.connect_with_connector(connector).await.ok()
}

/// A CNI DEL that is owed, for a person.
fn owed_line(owed: &nacelle_net::OwedDelete) -> String {
    let since = now_seconds().saturating_sub(owed.since);
    let (pod, network) = (owed.pod.short(), &owed.network);
    let tried = if owed.attempts == 1 { "once".to_owned() } else { format!("{} times", owed.attempts) };
    format!(
        "pod {pod} is gone, and its CNI DEL from network {network:?} has failed for {since} s (tried {tried}, goes on): {}",
        owed.error
    )
}

fn now_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Code and message of a status, as a person reads them.
fn told(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{:?}: {}", status.code(), status.message())
}
