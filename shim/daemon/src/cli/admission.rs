//! Implements `nacelle admission`: the webhook server that a cluster's API server calls, and the manifests that install it.

use super::ExitStatus;
use super::output::print;
use super::vm::CatalogueFiles;
use anyhow::Context;
use clap::Subcommand;
use ipnet::IpNet;
use nacelle_admission::manifests::{ClusterValues, manifests};
use nacelle_admission::{AdmissionOptions, AdmissionServer, Policy};
use nacelle_stream::Tls;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tokio::signal::unix::{SignalKind, signal};

/// The largest certificate file of a certificate authority, in bytes.
const MAX_CA_FILE: u64 = 1 << 20;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct AdmissionArguments {
    #[command(subcommand)]
    command: Option<AdmissionCommand>,
    /// The address to listen on.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8443")]
    listen: SocketAddr,
    /// The PEM file with the server's certificate chain. It is reloaded when it changes.
    #[arg(long, value_name = "FILE", required = true)]
    tls_cert: Option<PathBuf>,
    /// The PEM file with the server's private key. It is reloaded when it changes.
    #[arg(long, value_name = "FILE", required = true)]
    tls_key: Option<PathBuf>,
    /// The PEM file with the authorities that sign the API servers' client certificates; reviews without one are refused. It is reloaded
    /// when it changes. Default: every client may send reviews.
    #[arg(long, value_name = "FILE")]
    client_ca: Option<PathBuf>,
    /// Checks only pods of this RuntimeClass; an empty name selects pods without one. May be repeated.
    #[arg(long, value_name = "NAME")]
    runtime_class: Vec<String>,
    /// Also writes the defaults into the specifications of machine pods.
    #[arg(long)]
    defaults: bool,
    #[command(flatten)]
    catalogue: CatalogueFiles,
}

#[derive(Subcommand)]
enum AdmissionCommand {
    /// Prints the manifests that run the server in a cluster and register its webhooks.
    Manifests {
        /// The PEM file with the certificate of the authority that signed the server's certificate.
        #[arg(long, value_name = "FILE")]
        ca_file: PathBuf,
        /// The image that contains this program.
        #[arg(long, value_name = "REFERENCE", default_value = concat!("registry.example/nacelle:", env!("CARGO_PKG_VERSION")))]
        image: String,
        /// The namespace of the server.
        #[arg(long, short, default_value = "nacelle-system")]
        namespace: String,
        /// A network of API servers, ADDRESS/PREFIX, that may call the webhooks; without it every address may. May be repeated.
        #[arg(long, value_name = "NETWORK")]
        client: Vec<IpNet>,
    },
}

pub(super) fn run(arguments: AdmissionArguments) -> anyhow::Result<ExitStatus> {
    if let Some(AdmissionCommand::Manifests { ca_file, image, namespace, client }) = arguments.command {
        let clients = client.iter().map(IpNet::to_string).collect();
        print(&manifests(&ClusterValues { namespace, image, authority: read_ca_file(&ca_file)?, clients })?)?;
        return Ok(ExitStatus::Success);
    }
    let file = |file: Option<PathBuf>, name| file.with_context(|| format!("missing argument {name}"));
    let tls = Tls {
        certificate: file(arguments.tls_cert, "--tls-cert")?,
        key: file(arguments.tls_key, "--tls-key")?,
        client_authority: arguments.client_ca,
    };
    let policy = Policy {
        catalogue: arguments.catalogue.read()?,
        runtime_classes: arguments.runtime_class.into_iter().collect(),
        defaults: arguments.defaults,
    };
    serve(AdmissionOptions { listen: arguments.listen, tls, policy })
}

fn serve(options: AdmissionOptions) -> anyhow::Result<ExitStatus> {
    super::runtime()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let server = AdmissionServer::bind(options).await?;
        tracing::info!(address = %server.address(), "serving admission webhooks");
        let end = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping");
        };
        server.serve(end).await;
        Ok(ExitStatus::Success)
    })
}

fn read_ca_file(file: &Path) -> anyhow::Result<Vec<u8>> {
    let mut pem = Vec::new();
    let read = std::fs::File::open(file).and_then(|opened| opened.take(MAX_CA_FILE).read_to_end(&mut pem));
    read.with_context(|| format!("cannot read {}", file.display()))?;
    let text = String::from_utf8_lossy(&pem);
    anyhow::ensure!(text.contains("-----BEGIN CERTIFICATE-----"), "{} contains no PEM certificate", file.display());
    // The private key of a CA must not get into the manifests.
    anyhow::ensure!(
        !text.contains("PRIVATE KEY-----"),
        "{} contains a private key: --ca-file needs the certificate only",
        file.display()
    );
    Ok(pem)
}
