//! Implements `nacelle admission`: the webhook server that a cluster's API server calls, and the manifests that install it.

use super::ExitStatus;
use super::output::print;
use super::vm::CatalogueFiles;
use anyhow::Context;
use clap::Subcommand;
use ipnet::IpNet;
use nacelle_admission::manifests::{ClusterValues, manifests};
use nacelle_admission::{AdmissionOptions, AdmissionServer, Policy, PolicyControl};
use nacelle_base::task::run_blocking;
use nacelle_stream::Tls;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::task::AbortOnDropHandle;

/// The largest certificate file of a certificate authority, in bytes.
const MAX_CA_FILE: u64 = 1 << 20;
/// The interval at which the catalogue files are checked for changes.
const CATALOGUE_INTERVAL: Duration = Duration::from_secs(5);

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
    anyhow::ensure!(
        !arguments.catalogue.includes_stdin(),
        "--catalogue needs a file: standard input cannot be read again"
    );
    let policy = Policy {
        catalogue: arguments.catalogue.read()?,
        runtime_classes: arguments.runtime_class.into_iter().collect(),
        defaults: arguments.defaults,
    };
    serve(AdmissionOptions { listen: arguments.listen, tls, policy }, arguments.catalogue)
}

fn serve(options: AdmissionOptions, catalogue: CatalogueFiles) -> anyhow::Result<ExitStatus> {
    super::runtime()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let hangup = signal(SignalKind::hangup())?;
        let policy = options.policy.clone();
        let server = AdmissionServer::bind(options).await?;
        let reload = reload_catalogue(hangup, catalogue, policy, server.policy_control());
        let _reload = AbortOnDropHandle::new(tokio::spawn(reload));
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

/// Reads the catalogue files again when one has changed and at each SIGHUP. Files that are invalid change nothing.
async fn reload_catalogue(mut hangup: Signal, files: CatalogueFiles, policy: Policy, control: PolicyControl) {
    let mut known = files.versions();
    loop {
        let asked = tokio::time::timeout(CATALOGUE_INTERVAL, hangup.recv()).await.is_ok();
        let named = files.clone();
        let found = known.clone();
        let read = run_blocking("read the catalogue", move || {
            // First the versions: a change after them is found the next time.
            let versions = named.versions();
            (asked || versions != found).then(|| (versions, named.read()))
        });
        let (versions, read) = match read.await {
            Ok(None) => continue,
            Ok(Some((versions, read))) => (versions, read),
            Err(error) => (known, Err(error.into())),
        };
        known = versions;
        match read {
            Ok(catalogue) => {
                control.replace(Policy { catalogue, ..policy.clone() });
                tracing::info!("the catalogue was read again");
            }
            Err(error) => tracing::error!("the changed catalogue is not used: {error:#}"),
        }
    }
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
