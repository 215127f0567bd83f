//! Defines the commands of `nacelle` and their arguments. Results go through `output`, errors through `exit`.

// A closed pipe makes the macros of the standard library panic.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod admission;
mod bundle;
mod check;
mod checkpoint;
mod completion;
mod config;
mod daemon;
mod exit;
mod finding;
mod hardening;
mod help;
mod image;
#[cfg(test)]
mod interfaces;
mod jail_report;
mod log;
mod machines;
mod output;
mod overhead;
mod owed_deletes;
mod pods;
mod progress;
mod serve;
mod shell;
mod store;
mod table;
mod templates;
mod terminal;
mod timeline;
mod top;
mod units;
mod version;
mod vm;

use crate::log::{LogFormat, init_log};
use crate::program::raise_file_limit;
use crate::supervision::Supervisor;
use clap::{FromArgMatches, Parser, Subcommand};
use exit::ExitStatus;
use output::OutputArgument;
use std::path::PathBuf;
use std::process::ExitCode;

/// The Kubernetes container runtime in which every pod is a virtual machine.
#[derive(Parser)]
#[command(name = "nacelle", version = crate::program::version(), propagate_version = true)]
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
        #[command(flatten)]
        output: OutputArgument,
        /// Measures the overhead of a VM of each handler with a test pod, and prints RuntimeClasses. Needs the daemon.
        #[arg(long)]
        overhead: bool,
        /// Reports the rights of this running pod's process; fails if it has more than its jail leaves.
        #[arg(long, value_name = "POD", conflicts_with = "overhead")]
        jail: Option<String>,
    },
    /// Saves running pods, and lists and removes what was saved, from which other pods can continue.
    Checkpoint {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(subcommand)]
        command: checkpoint::CheckpointCommand,
    },
    /// Prints the default configuration, or checks a configuration file.
    Config {
        #[command(subcommand)]
        command: config::ConfigCommand,
    },
    /// Collects what a report of a fault needs.
    Debug {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(subcommand)]
        command: bundle::DebugCommand,
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
        #[command(flatten)]
        output: OutputArgument,
        /// Draws how long each step of the start of this pod and its containers took.
        #[arg(long, value_name = "ID")]
        timeline: Option<String>,
    },
    /// Runs a command, by default a shell, in the guest of a pod: next to its containers, with all rights in the guest.
    Shell {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(flatten)]
        arguments: shell::ShellArguments,
    },
    /// Shows the CPU time and the memory that pods use at the moment; on a terminal again and again.
    Top {
        #[command(flatten)]
        config: ConfigArgument,
        #[command(flatten)]
        arguments: top::TopArguments,
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
        #[command(flatten)]
        output: OutputArgument,
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
    /// Prints a script that completes command lines in a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Writes the man pages of all commands into a directory.
    #[command(hide = true)]
    Man {
        /// The directory, which exists.
        directory: PathBuf,
    },
    /// Prints the version, and the commit if the build knew it.
    Version {
        #[command(flatten)]
        output: OutputArgument,
    },
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
    let matches = help::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let status = execute(cli).unwrap_or_else(|error| {
        let status = ExitStatus::of_error(&error);
        if status != ExitStatus::OutputClosed {
            // The alternate format contains the causes.
            output::warn(&format!("nacelle: {error:#}"));
        }
        status
    });
    status.into()
}

fn execute(cli: Cli) -> anyhow::Result<ExitStatus> {
    let log = init_log(cli.log_format);
    match cli.command {
        Command::Serve(config) => {
            raise_file_limit();
            // Before any file is opened and any thread is started.
            let supervisor = Supervisor::from_environment()?;
            serve::serve(&config, supervisor, log)
        }
        Command::Check { config, output, overhead, jail } => {
            let config = config.load()?;
            match jail {
                Some(pod) => jail_report::check_jail(&config, &pod, output),
                None if overhead => overhead::run(&config, output),
                None => check::check(config, output),
            }
        }
        Command::Checkpoint { config, command } => checkpoint::run(&config.load()?, command),
        Command::Config { command } => config::run(command),
        Command::Debug { config, command: bundle::DebugCommand::Bundle { output } } => bundle::run(&config, output),
        Command::Image { config, command } => image::run(config.load()?, command),
        Command::Pods { config, output, timeline: None } => pods::run(&config.load()?, output),
        Command::Pods { config, output, timeline: Some(pod) } => timeline::run(&config.load()?, pod, output),
        Command::Shell { config, arguments } => shell::run(&config.load()?, arguments),
        Command::Top { config, arguments } => top::run(&config.load()?, &arguments),
        Command::Templates { config, command } => templates::run(&config.load()?, command),
        Command::Vm { config, command } => vm::run(&config, command),
        Command::Log { config, output, filter } => log::run(&config.load()?, filter, output),
        Command::Store { config, command } => store::run(&config.load()?, command),
        Command::Admission(admission) => {
            raise_file_limit();
            admission::run(*admission)
        }
        Command::Completion { shell } => completion::print_script(shell),
        Command::Man { directory } => completion::write_man_pages(&directory),
        Command::Version { output } => version::run(output),
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}
