//! Defines the commands of `nacelle` and their arguments.

mod admission;
mod check;
mod finding;
mod hardening;
mod image;
mod jail_report;
mod log;
mod machines;
mod overhead;
mod pods;
mod serve;
mod store;
mod table;
mod templates;
mod vm;

use crate::log::{LogFormat, init_log};
use crate::program::raise_file_limit;
use crate::supervision::Supervisor;
use anyhow::Context;
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
    /// The format of the log on standard error.
    #[arg(long, global = true, value_enum, default_value = "text", env = LogFormat::VARIABLE)]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the daemon, which serves CRI on a Unix socket.
    Serve(ConfigArgument),
    /// Checks whether this node can run pods, and reports what is missing.
    Check {
        #[command(flatten)]
        config: ConfigArgument,
        /// Measures the overhead of a VM of each handler with a test pod, and prints RuntimeClasses. Needs the daemon.
        #[arg(long)]
        overhead: bool,
        /// Reports the rights of this running pod's process; fails if it has more than its jail leaves.
        #[arg(long, value_name = "POD", conflicts_with = "overhead")]
        jail: Option<String>,
    },
    /// Manages the images of this node, through the daemon if it runs.
    Image {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(subcommand)]
        command: image::ImageCommand,
    },
    /// Lists the pods of this node with their resource use and the overhead of their VMs.
    Pods {
        #[command(flatten)]
        config: ConfigArgument,
        /// Draws how long each step of the start of this pod and its containers took.
        #[arg(long, value_name = "ID")]
        timeline: Option<String>,
    },
    /// Shows and manages the templates from which VMs start, through the daemon.
    Templates {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(subcommand)]
        command: templates::TemplateCommand,
    },
    /// Manages VMs through the daemon, and checks and converts VM manifests without it.
    Vm {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(subcommand)]
        command: vm::VmCommand,
    },
    /// Shows which events the daemon logs, or changes it until the daemon is restarted or reads its configuration again (SIGHUP).
    Log {
        #[command(flatten)]
        config: ConfigArgument,
        /// Levels and MODULE=LEVEL, divided by commas: "debug", "warn,nacelle_image=trace".
        filter: Option<crate::log::LogFilter>,
    },
    /// Exports and imports the records of the state store.
    Store {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(subcommand)]
        command: store::StoreCommand,
    },
    /// Serves admission webhooks over https, which check pods and VMs before the API server stores them.
    Admission(Box<admission::AdmissionArguments>),
    /// Prints the version.
    Version,
}

#[derive(Clone, clap::Args)]
struct ConfigArgument {
    /// The configuration file [default: /etc/nacelle/config.toml, if it exists].
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl ConfigArgument {
    fn load(&self) -> anyhow::Result<crate::config::Config> {
        Ok(crate::config::Config::load(self.config.as_deref())?)
    }
}

/// Parses the command line and runs the command.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let log = init_log(cli.log_format);
    let result = match cli.command {
        Command::Serve(config) => {
            raise_file_limit();
            // Before any file is opened and any thread is started.
            let supervisor = Supervisor::from_environment();
            supervisor.map_err(Into::into).and_then(|supervisor| serve::serve(&config, supervisor, log))
        }
        Command::Check { config, overhead, jail } => config.load().and_then(|config| match jail {
            Some(pod) => jail_report::check_jail(&config, &pod),
            None if overhead => overhead::run(&config),
            None => check::check(config),
        }),
        Command::Image { config, command } => config.load().and_then(|config| image::run(config, command)),
        Command::Pods { config, timeline } => config.load().and_then(|config| pods::run(&config, timeline)),
        Command::Templates { config, command } => config.load().and_then(|config| templates::run(&config, command)),
        Command::Vm { config, command } => vm::run(&config, command),
        Command::Log { config, filter } => config.load().and_then(|config| log::run(&config, filter)),
        Command::Store { config, command } => config.load().and_then(|config| store::run(&config, command)),
        Command::Admission(admission) => {
            raise_file_limit();
            admission::run(*admission)
        }
        Command::Version => {
            println!("nacelle {}", crate::program::version());
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        // The alternate format contains the causes.
        eprintln!("nacelle: {error:#}");
        ExitCode::FAILURE
    })
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

/// Connects to the daemon; `None` if no daemon listens on the socket.
async fn try_connect(socket: &Path) -> Option<Channel> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(connect_unix(&path).await?)) }
    });
    // The connector ignores this address: it knows the path of the socket.
    let endpoint = Endpoint::from_static("http://nacelle");
    endpoint.connect_with_connector(connector).await.ok()
}

/// Connects to the daemon.
async fn connect_to_daemon(socket: &Path) -> anyhow::Result<Channel> {
    let channel = try_connect(socket).await;
    channel.with_context(|| format!("cannot connect to the daemon on {}: is it running?", socket.display()))
}

/// Returns the line that reports a CNI DEL which is still to be done.
fn owed_delete_line(owed: &nacelle_net::OwedDelete) -> String {
    let since = now_seconds().saturating_sub(owed.since);
    let (pod, network) = (owed.pod.short(), &owed.network);
    let tried = if owed.attempts == 1 { "once".to_owned() } else { format!("{} times", owed.attempts) };
    format!(
        "pod {pod} was removed, but its CNI DEL from network {network:?} has failed for {since} s (tried {tried}, will be retried): {}",
        owed.error
    )
}

fn now_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Converts the status of a failed request into an error with its code and message.
fn status_error(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{:?}: {}", status.code(), status.message())
}
