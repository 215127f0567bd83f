//! Implements `nacelle vm export` and `import`: reads registry credentials from the usual files, and shows the progress on a
//! terminal.

use super::views::{ExportView, ImportView};
use super::{OutputArgument, VmClient, VmName, status_error};
use crate::cli::progress::{OperationProgress, ProgressLine};
use anyhow::Context;
use nacelle_proto::vm;
use std::path::{Path, PathBuf};
use tonic::Streaming;

/// The registry of names without one.
const DOCKER_HUB: &str = "docker.io";

#[derive(clap::Args)]
pub(in crate::cli) struct ExportArguments {
    #[command(flatten)]
    name: VmName,
    /// The destination: an image reference, or oci:/DIRECTORY:TAG for an OCI layout on the node.
    reference: String,
    #[command(flatten)]
    registry: RegistryArguments,
    #[command(flatten)]
    output: OutputArgument,
}

#[derive(clap::Args)]
pub(in crate::cli) struct ImportArguments {
    /// The source: an image reference, or oci:/DIRECTORY:TAG for an OCI layout on the node.
    reference: String,
    #[command(flatten)]
    name: VmName,
    /// Gives the VM a new UUID and MAC address instead of those of the exported VM.
    #[arg(long)]
    new_identity: bool,
    #[command(flatten)]
    registry: RegistryArguments,
    #[command(flatten)]
    output: OutputArgument,
}

#[derive(clap::Args)]
struct RegistryArguments {
    /// Uses plain http for the registry, whatever the node's configuration says.
    #[arg(long)]
    plain_http: bool,
    /// The file with the credentials of registries, in the format of docker and podman (config.json, auth.json).
    #[arg(long, value_name = "FILE", env = "REGISTRY_AUTH_FILE")]
    authfile: Option<PathBuf>,
}

impl RegistryArguments {
    fn into_artifact(self, name: String) -> anyhow::Result<vm::Artifact> {
        let credentials = match &self.authfile {
            Some(path) if !name.starts_with("oci:") => read_credentials(path, registry_host(&name))?,
            _ => None,
        };
        Ok(vm::Artifact { name, credentials, plain_http: self.plain_http })
    }
}

pub(super) async fn export(client: &mut VmClient, arguments: ExportArguments) -> anyhow::Result<()> {
    let ExportArguments { name, reference, registry, output } = arguments;
    let request =
        vm::ExportRequest { machine: Some(name.into_ref()), to: Some(registry.into_artifact(reference.clone())?) };
    let done = show_progress(client.export(request).await.map_err(status_error)?.into_inner()).await?;
    output.print(&ExportView { reference, digest: done.digest, snapshots: done.snapshots })
}

pub(super) async fn import(client: &mut VmClient, arguments: ImportArguments) -> anyhow::Result<()> {
    let ImportArguments { reference, name, new_identity, registry, output } = arguments;
    let request =
        vm::ImportRequest { from: Some(registry.into_artifact(reference)?), to: Some(name.into_ref()), new_identity };
    let done = show_progress(client.import(request).await.map_err(status_error)?.into_inner()).await?;
    let machine = done.machine.unwrap_or_default();
    output.print(&ImportView {
        namespace: machine.namespace,
        name: machine.name,
        uuid: machine.uuid,
        mac: machine.mac,
        snapshots: done.snapshots,
    })
}

/// Shows the progress until the last message, and returns that.
async fn show_progress(mut messages: Streaming<vm::Transfer>) -> anyhow::Result<vm::Transfer> {
    let (mut line, mut last) = (ProgressLine::new(), None);
    while let Some(message) = messages.message().await.map_err(status_error)? {
        if message.digest.is_empty() {
            let step = message.step.clone();
            line.show(&OperationProgress { step, bytes: message.bytes, total_bytes: message.total });
        }
        last = Some(message);
    }
    drop(line);
    last.filter(|last| !last.digest.is_empty()).context("the daemon stopped before the transfer was complete")
}

/// The host that a reference names, as `Reference` reads it.
fn registry_host(reference: &str) -> &str {
    let first = reference.split_once('/').map(|(first, _)| first);
    first.filter(|first| first.contains(['.', ':']) || *first == "localhost").unwrap_or(DOCKER_HUB)
}

/// Returns the credentials that a file has for a host, if any.
fn read_credentials(path: &Path, host: &str) -> anyhow::Result<Option<vm::Credentials>> {
    Ok(nacelle_image::read_auth_file(path, host)?.map(|auth| vm::Credentials {
        username: auth.username,
        password: auth.password,
        auth: auth.auth,
        identity_token: auth.identity_token,
        registry_token: auth.registry_token,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_chosen_by_registry_host() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("auth.json");
        let text = r#"{"auths": {"https://index.docker.io/v1/": {"auth": "aHVi"}, "a.example:5000": {"auth": "YQ==", "identitytoken": "t"}}}"#;
        std::fs::write(&path, text).unwrap();
        let of = |reference: &str| {
            let found = read_credentials(&path, registry_host(reference)).unwrap();
            found.map(|found| format!("{}{}", found.auth, found.identity_token))
        };
        assert_eq!(of("a.example:5000/b/c:1").as_deref(), Some("YQ==t"));
        assert_eq!(of("library/b").as_deref(), Some("aHVi"));
        assert_eq!(of("b").as_deref(), Some("aHVi"));
        assert_eq!(of("a.example/b"), None);
        std::fs::write(&path, "no").unwrap();
        assert!(read_credentials(&path, "a").unwrap_err().to_string().contains("auth.json"));
    }
}
