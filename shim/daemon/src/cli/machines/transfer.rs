//! Implements `nacelle vm export` and `import`: reads registry credentials from the usual files, and shows the progress on a
//! terminal.

use super::{Client, Name, told};
use anyhow::Context;
use nacelle_proto::vm;
use serde_json::Value;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use tonic::Streaming;

/// The most bytes of a file with credentials.
const MOST: u64 = 1 << 20;
/// The registry of names without one.
const HUB: &str = "docker.io";

#[derive(clap::Args)]
pub(in crate::cli) struct Export {
    #[command(flatten)]
    name: Name,
    /// Where to: a reference as of an image, or oci:/DIRECTORY:TAG, an OCI layout on the node.
    reference: String,
    #[command(flatten)]
    registry: Registry,
}

#[derive(clap::Args)]
pub(in crate::cli) struct Import {
    /// Where from: a reference as of an image, or oci:/DIRECTORY:TAG, an OCI layout on the node.
    reference: String,
    #[command(flatten)]
    name: Name,
    /// Another machine than the one that was exported: it has its own UUID and hardware address.
    #[arg(long)]
    new_identity: bool,
    #[command(flatten)]
    registry: Registry,
}

#[derive(clap::Args)]
struct Registry {
    /// Asks the registry by http, also if the node's configuration does not say so.
    #[arg(long)]
    plain_http: bool,
    /// Credentials for the registry, as docker and others keep them (config.json, auth.json).
    #[arg(long, value_name = "FILE", env = "REGISTRY_AUTH_FILE")]
    authfile: Option<PathBuf>,
}

impl Registry {
    fn artifact(self, name: String) -> anyhow::Result<vm::Artifact> {
        let credentials = match &self.authfile {
            Some(path) if !name.starts_with("oci:") => credentials(path, &host(&name))?,
            _ => None,
        };
        Ok(vm::Artifact { name, credentials, plain_http: self.plain_http })
    }
}

pub(super) async fn export(client: &mut Client, asked: Export) -> anyhow::Result<()> {
    let Export { name, reference, registry } = asked;
    let request = vm::ExportRequest { machine: Some(name.machine()), to: Some(registry.artifact(reference.clone())?) };
    let done = follow(client.export(request).await.map_err(told)?.into_inner()).await?;
    println!("{reference} {}", done.digest);
    shown(&done.snapshots);
    Ok(())
}

pub(super) async fn import(client: &mut Client, asked: Import) -> anyhow::Result<()> {
    let Import { reference, name, new_identity, registry } = asked;
    let request =
        vm::ImportRequest { from: Some(registry.artifact(reference)?), to: Some(name.machine()), new_identity };
    let done = follow(client.import(request).await.map_err(told)?.into_inner()).await?;
    let machine = done.machine.unwrap_or_default();
    println!("{}/{} {} {}", machine.namespace, machine.name, machine.uuid, machine.mac);
    shown(&done.snapshots);
    Ok(())
}

fn shown(snapshots: &[String]) {
    if !snapshots.is_empty() {
        println!("snapshots: {}", snapshots.join(" "));
    }
}

/// To the last message.
async fn follow(mut messages: Streaming<vm::Transfer>) -> anyhow::Result<vm::Transfer> {
    let shows = std::io::stderr().is_terminal();
    let mut last = None;
    while let Some(message) = messages.message().await.map_err(told)? {
        if shows && message.digest.is_empty() {
            eprint!("\r\x1b[K{}", line(&message));
            std::io::stderr().flush()?;
        }
        last = Some(message);
    }
    if shows {
        eprint!("\r\x1b[K");
    }
    last.filter(|last| !last.digest.is_empty()).context("the daemon ended before it was done")
}

fn line(message: &vm::Transfer) -> String {
    let mib = |bytes: u64| bytes >> 20;
    match message.total {
        0 => message.step.clone(),
        total => format!("{}: {} of {} MiB", message.step, mib(message.bytes), mib(total)),
    }
}

/// The host that a reference names, as `Reference` reads it.
fn host(reference: &str) -> String {
    let first = reference.split_once('/').map(|(first, _)| first);
    let host = first.filter(|first| first.contains(['.', ':']) || *first == "localhost");
    normal(host.unwrap_or(HUB))
}

/// A key of the file, or a host, as one word.
fn normal(key: &str) -> String {
    let key = key.split_once("://").map_or(key, |(_, rest)| rest);
    match key.split('/').next().unwrap_or_default() {
        "index.docker.io" | "registry-1.docker.io" => HUB.to_owned(),
        host => host.to_owned(),
    }
}

/// What a file has for a host; none: nothing.
fn credentials(path: &Path, host: &str) -> anyhow::Result<Option<vm::Credentials>> {
    let failed = || format!("cannot read {}", path.display());
    let mut text = String::new();
    let file = std::fs::File::open(path).with_context(failed)?;
    file.take(MOST).read_to_string(&mut text).with_context(failed)?;
    let whole: Value = serde_json::from_str(&text).with_context(failed)?;
    let mut entries = whole.get("auths").and_then(Value::as_object).into_iter().flatten();
    Ok(entries.find(|(key, _)| normal(key) == host).map(|(_, entry)| {
        let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        vm::Credentials {
            username: text("username"),
            password: text("password"),
            auth: text("auth"),
            identity_token: text("identitytoken"),
            registry_token: text("registrytoken"),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_those_of_the_registry() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("auth.json");
        let text = r#"{"auths": {"https://index.docker.io/v1/": {"auth": "aHVi"}, "a.example:5000": {"auth": "YQ==", "identitytoken": "t"}}}"#;
        std::fs::write(&path, text).unwrap();
        let of = |reference: &str| {
            let found = credentials(&path, &host(reference)).unwrap();
            found.map(|found| format!("{}{}", found.auth, found.identity_token))
        };
        assert_eq!(of("a.example:5000/b/c:1").as_deref(), Some("YQ==t"));
        assert_eq!(of("library/b").as_deref(), Some("aHVi"));
        assert_eq!(of("b").as_deref(), Some("aHVi"));
        assert_eq!(of("a.example/b"), None);
        std::fs::write(&path, "no").unwrap();
        assert!(credentials(&path, "a").unwrap_err().to_string().contains("auth.json"));
    }

    #[test]
    fn a_step_is_a_line() {
        let message =
            |total| vm::Transfer { step: "sending disk root".into(), bytes: 5 << 20, total, ..Default::default() };
        assert_eq!(
            (line(&message(0)).as_str(), line(&message(9 << 20)).as_str()),
            ("sending disk root", "sending disk root: 5 of 9 MiB")
        );
    }
}
