//! Tests artifacts with registries: a real one, and one that requires tokens and breaks connections.

use crate::common::noise;
use crate::common::registry::{Registry, missing};
use crate::common::server::{Asked, Reply, Server};
use nacelle_base::{Classify, FailureKind};
use nacelle_image::{
    ArtifactKind, Auth, CompressedFile, ImageStore, ImageStoreConfig, RegistryConfig, TransferProgress, compress_file,
};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

static SAMPLE: ArtifactKind = ArtifactKind {
    artifact: "application/vnd.a.v1",
    config: "application/vnd.a.config.v1+json",
    layer: "application/vnd.a.file.v1+zstd",
};

fn packed(directory: &Path, name: &str, bytes: &[u8]) -> CompressedFile {
    let (from, to) = (directory.join(name), directory.join(format!("{name}.zst")));
    std::fs::write(&from, bytes).unwrap();
    compress_file(std::fs::File::open(&from).unwrap(), &from, &to, &TransferProgress::default()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_goes_to_a_registry_and_comes_back() {
    if let Some(why) = missing() {
        eprintln!("skipped: {why}");
        return;
    }
    let registry = Registry::start(true, true);
    let (host, directory) = (registry.host(), tempfile::tempdir().unwrap());
    let special = RegistryConfig { ca_file: Some(registry.ca()), ..RegistryConfig::default() };
    let config = ImageStoreConfig { registries: [(host.clone(), special)].into(), ..crate::common::store_config() };
    let store = ImageStore::open(&directory.path().join("store"), config).unwrap();
    let auth = Auth { username: "u".into(), password: "p:w".into(), ..Auth::default() };
    let at = |tag: &str| store.artifacts(&format!("{host}/a/b:{tag}"), Some(auth.clone()), false).unwrap();
    let files = [packed(directory.path(), "large", &noise(9 << 20)), packed(directory.path(), "empty", b"")];
    let mut digests = Vec::new();
    for _ in 0..2 {
        let progress = TransferProgress::default();
        for file in &files {
            at("1").upload_file(file, &progress).await.unwrap();
        }
        assert_eq!(progress.bytes(), files[0].blob.size + files[1].blob.size);
        let layers = files.iter().map(|file| (file.blob.clone(), "file".to_owned())).collect();
        digests.push(at("1").publish(&SAMPLE, b"{\"a\":1}".to_vec(), layers).await.unwrap());
    }
    assert_eq!(digests[0], digests[1]);
    at("none").publish(&SAMPLE, b"{}".to_vec(), Vec::new()).await.unwrap();
    assert_eq!(at("none").fetch_artifact(&SAMPLE, 0, 2).await.unwrap_err().kind(), FailureKind::Invalid);
    assert!(at("none").fetch_artifact(&SAMPLE, 1, 2).await.unwrap().layers.is_empty());

    let found = at("1").fetch_artifact(&SAMPLE, 2, 7).await.unwrap();
    assert_eq!((found.digest, found.config.as_slice()), (digests[0], &b"{\"a\":1}"[..]));
    for (n, (file, layer)) in files.iter().zip(&found.layers).enumerate() {
        let (path, progress) = (directory.path().join(n.to_string()), TransferProgress::default());
        at("1").fetch_file(layer, &file.content, File::create(&path).unwrap(), &path, &progress).await.unwrap();
        assert!(std::fs::read(&path).unwrap() == std::fs::read(directory.path().join(["large", "empty"][n])).unwrap());
        assert_eq!(progress.bytes(), file.content.size);
    }
    let anonymous = store.artifacts(&format!("{host}/a/b:1"), None, false).unwrap();
    assert_eq!(
        anonymous.upload_file(&files[0], &TransferProgress::default()).await.unwrap_err().kind(),
        FailureKind::Denied
    );
    assert_eq!(at("2").fetch_artifact(&SAMPLE, 2, 7).await.unwrap_err().kind(), FailureKind::NotFound);
}

/// A registry that requires a token and breaks the connection after the first blob.
fn strict(blobs: &AtomicUsize, asked: &Asked) -> Reply {
    let host = asked.headers.get("host").cloned().unwrap_or_default();
    let token = asked.headers.get("authorization").map(String::as_str).unwrap_or_default();
    let pushing = token == "Bearer push";
    let challenge = |scope: &str| {
        let text = format!("Bearer realm=\"http://{host}/token\",scope=\"repository:a/b:{scope}\"");
        Reply::status(401).header("WWW-Authenticate", &text)
    };
    match (asked.method.as_str(), asked.path.as_str()) {
        ("GET", path) if path.starts_with("/token") => {
            let scope = if path.contains("push") { "push" } else { "pull" };
            Reply::ok(format!(r#"{{"token":"{scope}"}}"#).as_bytes())
        }
        ("HEAD", _) if token.is_empty() => challenge("pull"),
        ("HEAD", _) => Reply::status(404),
        _ if !pushing => challenge("pull,push"),
        ("POST", "/v2/a/b/blobs/uploads/") => Reply::status(202).header("Location", "/upload?state=1"),
        ("PUT", path) if path.starts_with("/upload?state=1&digest=sha256%3A") => {
            Reply::status(if blobs.fetch_add(1, Ordering::SeqCst) == 0 { 500 } else { 201 })
        }
        ("PUT", "/v2/a/b/manifests/1") => Reply::status(201),
        _ => Reply::status(400),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_sent_has_the_right_token_and_is_sent_again_when_that_broke() {
    let directory = tempfile::tempdir().unwrap();
    let store = ImageStore::open(&directory.path().join("store"), crate::common::store_config()).unwrap();
    let file = packed(directory.path(), "file", &noise(1 << 20));
    let blobs = AtomicUsize::new(0);
    let server = Server::start(move |asked| strict(&blobs, asked));
    let name = format!("{}/a/b:1", server.host());
    let (artifacts, progress) = (store.artifacts(&name, None, true).unwrap(), TransferProgress::default());
    artifacts.upload_file(&file, &progress).await.unwrap();
    assert_eq!(progress.bytes(), file.blob.size, "what was sent twice counts once");
    artifacts.publish(&SAMPLE, b"{}".to_vec(), vec![(file.blob.clone(), "file".into())]).await.unwrap();
    let asked = server.asked();
    let sent: Vec<_> =
        asked.iter().filter(|asked| asked.method == "PUT" && asked.path.starts_with("/upload")).collect();
    let stored = std::fs::read(&file.path).unwrap();
    assert!(sent.len() == 3 && sent[0].body == stored && sent[1].body == stored && sent[2].body == b"{}");
    let manifest = asked.last().unwrap();
    assert_eq!(manifest.headers["content-type"], "application/vnd.oci.image.manifest.v1+json");
    let manifest: serde_json::Value = serde_json::from_slice(&manifest.body).unwrap();
    assert_eq!(manifest["artifactType"], SAMPLE.artifact);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_leads_astray_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let store = ImageStore::open(&directory.path().join("store"), crate::common::store_config()).unwrap();
    let file = packed(directory.path(), "file", b"content");
    for (post, put, kind) in [
        (Reply::status(202), 201, FailureKind::Unavailable),
        (Reply::status(202).header("Location", "file:///etc/passwd"), 201, FailureKind::Unavailable),
        (Reply::status(202).header("Location", "/upload"), 202, FailureKind::Unavailable),
        (Reply::status(202).header("Location", "/upload"), 413, FailureKind::Invalid),
        (Reply::status(403), 201, FailureKind::Denied),
    ] {
        let server = Server::start(move |asked| match asked.method.as_str() {
            "HEAD" => Reply::status(404),
            "POST" => post.clone(),
            _ => Reply::status(put),
        });
        let artifacts = store.artifacts(&format!("{}/a:1", server.host()), None, true).unwrap();
        let error = artifacts.upload_file(&file, &TransferProgress::default()).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
}
