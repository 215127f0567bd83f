//! Implements `nacelle admission`: the webhook server that a cluster's API server calls, and the manifests that install it.

use super::vm::Documents;
use anyhow::Context;
use clap::Subcommand;
use nacelle_admission::manifests::{Cluster, manifests};
use nacelle_admission::{Options, Policy, Server};
use nacelle_stream::Tls;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// No certificate of an authority is larger.
const MAX_AUTHORITY: u64 = 1 << 20;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Admission {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where it listens.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8443")]
    listen: SocketAddr,
    /// The server's certificate and those between it and its authority's, as PEM. Read again when it changes.
    #[arg(long, value_name = "FILE", required = true)]
    tls_cert: Option<PathBuf>,
    /// Its private key, as PEM. Read again when it changes.
    #[arg(long, value_name = "FILE", required = true)]
    tls_key: Option<PathBuf>,
    /// Looks only at pods of these RuntimeClasses; an empty name: at those that name none.
    #[arg(long, value_name = "NAME")]
    runtime_class: Vec<String>,
    /// Writes defaults into the documents of machine pods, too.
    #[arg(long)]
    defaults: bool,
    #[command(flatten)]
    catalogue: Documents,
}

#[derive(Subcommand)]
enum Command {
    /// Prints what a cluster needs to run the server and to ask it.
    Manifests {
        /// The certificate of the authority that has signed the server's, as PEM.
        #[arg(long, value_name = "FILE")]
        ca_file: PathBuf,
        /// The image with this program.
        #[arg(long, value_name = "REFERENCE", default_value = concat!("registry.example/nacelle:", env!("CARGO_PKG_VERSION")))]
        image: String,
        /// Where the server runs.
        #[arg(long, short, default_value = "nacelle-system")]
        namespace: String,
    },
}

pub(super) fn run(admission: Admission) -> anyhow::Result<ExitCode> {
    if let Some(Command::Manifests { ca_file, image, namespace }) = admission.command {
        print!("{}", manifests(&Cluster { namespace, image, authority: authority(&ca_file)? })?);
        return Ok(ExitCode::SUCCESS);
    }
    let file = |file: Option<PathBuf>, name| file.with_context(|| format!("{name} is missing"));
    let tls = Tls { certificate: file(admission.tls_cert, "--tls-cert")?, key: file(admission.tls_key, "--tls-key")? };
    let policy = Policy {
        catalogue: admission.catalogue.read()?,
        runtime_classes: admission.runtime_class.into_iter().collect(),
        defaults: admission.defaults,
    };
    serve(Options { listen: admission.listen, tls, policy })
}

fn serve(options: Options) -> anyhow::Result<ExitCode> {
    super::runtime()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let server = Server::bind(options).await?;
        tracing::info!(address = %server.address(), "answering admission reviews");
        let end = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("ending");
        };
        server.serve(end).await;
        Ok(ExitCode::SUCCESS)
    })
}

fn authority(file: &Path) -> anyhow::Result<Vec<u8>> {
    let mut pem = Vec::new();
    let read = std::fs::File::open(file).and_then(|opened| opened.take(MAX_AUTHORITY).read_to_end(&mut pem));
    read.with_context(|| format!("cannot read {}", file.display()))?;
    let text = String::from_utf8_lossy(&pem);
    anyhow::ensure!(text.contains("-----BEGIN CERTIFICATE-----"), "{} has no certificate as PEM", file.display());
    // The private key of a CA must not get into the manifests.
    anyhow::ensure!(!text.contains("PRIVATE KEY-----"), "{} has a private key: name the certificate", file.display());
    Ok(pem)
}
