//! Builds small images: OCI layouts of a static busybox with the files and the configuration that a test needs. And artifacts, which
//! have files but no configuration.

use crate::run::run_program;
use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Debian's static busybox, from the package `busybox-static`.
const BUSYBOX: &str = "/bin/busybox";

/// An image to be built. It starts as busybox with root, nobody and `app` (uid 1000, gid 1000, also in group 2000).
pub struct TestImage {
    config: Value,
    layers: Vec<Vec<u8>>,
}

impl Default for TestImage {
    fn default() -> Self {
        Self::busybox()
    }
}

impl TestImage {
    /// Returns busybox with `/bin/sh` as its command.
    pub fn busybox() -> Self {
        let mut layer = Layer::new();
        let busybox = fs::read(BUSYBOX).expect("busybox-static is installed");
        for directory in ["bin", "dev", "etc", "proc", "sys", "tmp", "root", "var"] {
            layer.add_directory(directory, if directory == "tmp" { 0o1777 } else { 0o755 });
        }
        layer.add_file("bin/busybox", &busybox, 0o755);
        let applets = crate::run::run_program(BUSYBOX, ["--list"]).ok();
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            layer.add_symlink(&format!("bin/{applet}"), "busybox");
        }
        layer.add_file(
            "etc/passwd",
            b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
            0o644,
        );
        layer.add_file("etc/group", b"root:x:0:\napp:x:1000:\nextra:x:2000:app\nnobody:x:65534:\n", 0o644);
        Self {
            config: json!({"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"], "Labels": {"maker": "nacelle-e2e"}}),
            layers: vec![layer.finish()],
        }
    }

    /// Sets a key of the image's `config`: "User", "Cmd", "Entrypoint", "Env", "WorkingDir", ...
    pub fn with_config(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    /// Adds a layer that the closure fills.
    pub fn with_layer(mut self, fill: impl FnOnce(&mut Layer)) -> Self {
        let mut layer = Layer::new();
        fill(&mut layer);
        self.layers.push(layer.finish());
        self
    }

    /// Writes the OCI layout into `directory`, with gzip layers and one manifest; returns the manifest's digest.
    pub fn write(&self, directory: &Path) -> String {
        let put = |bytes: &[u8], media_type: &str| put_blob(directory, bytes, media_type);
        let mut layers = Vec::new();
        let mut diff_ids = Vec::new();
        for layer in &self.layers {
            diff_ids.push(format!("sha256:{}", hex::encode(Sha256::digest(layer))));
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(layer).expect("a Vec takes everything");
            let packed = gzip.finish().expect("a Vec takes everything");
            layers.push(put(&packed, "application/vnd.oci.image.layer.v1.tar+gzip"));
        }
        let config = json!({
            "architecture": "amd64", "os": "linux", "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = put(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config, "layers": layers,
        });
        finish_layout(directory, &manifest)
    }

    /// Like [`write`](Self::write), into a new directory below `parent`; returns the directory.
    pub fn write_layout(&self, parent: &Path, name: &str) -> PathBuf {
        let directory = parent.join(format!("layout-{}", name.replace(['/', ':'], "-")));
        self.write(&directory);
        directory
    }
}

/// An artifact to be built: files by their titles.
#[derive(Clone, Debug, Default)]
pub struct TestArtifact {
    artifact_type: String,
    files: Vec<(String, Vec<u8>)>,
}

impl TestArtifact {
    /// Returns an artifact without files.
    pub fn new(artifact_type: &str) -> Self {
        Self { artifact_type: artifact_type.to_owned(), files: Vec::new() }
    }

    /// Adds a file.
    pub fn with_file(mut self, title: &str, bytes: &[u8]) -> Self {
        self.files.push((title.to_owned(), bytes.to_vec()));
        self
    }

    /// Writes the OCI layout into a new directory below `parent`; returns the directory and the manifest's digest.
    pub fn write_layout(&self, parent: &Path, name: &str) -> (PathBuf, String) {
        let directory = parent.join(format!("artifact-{}", name.replace(['/', ':'], "-")));
        let config = put_blob(&directory, b"{}", "application/vnd.oci.empty.v1+json");
        let file = |(title, bytes): &(String, Vec<u8>)| {
            let mut layer = put_blob(&directory, bytes, "application/octet-stream");
            layer["annotations"] = json!({"org.opencontainers.image.title": title});
            layer
        };
        let layers: Vec<Value> = self.files.iter().map(file).collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": self.artifact_type, "config": config, "layers": layers,
        });
        let digest = finish_layout(&directory, &manifest);
        (directory, digest)
    }
}

/// Adds a blob to a layout; returns its descriptor.
fn put_blob(layout: &Path, bytes: &[u8], media_type: &str) -> Value {
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).expect("the test's directory is writable");
    let digest = hex::encode(Sha256::digest(bytes));
    fs::write(blobs.join(&digest), bytes).expect("the test's directory is writable");
    json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()})
}

/// Completes a layout of one manifest, which gets the tag `latest`; returns the manifest's digest.
fn finish_layout(layout: &Path, manifest: &Value) -> String {
    let bytes = manifest.to_string();
    let mut entry = put_blob(layout, bytes.as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    let digest = entry["digest"].as_str().unwrap_or_default().to_owned();
    entry["annotations"] = json!({"org.opencontainers.image.ref.name": "latest"});
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    fs::write(layout.join("index.json"), index.to_string()).expect("the test's directory is writable");
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).expect("the directory is writable");
    digest
}

/// One layer that is being filled.
pub struct Layer(tar::Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    fn finish(self) -> Vec<u8> {
        self.0.into_inner().expect("a Vec takes everything")
    }

    fn append(&mut self, path: &str, kind: tar::EntryType, mode: u32, link: Option<&str>, bytes: &[u8]) {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_600_000_000);
        header.set_size(bytes.len() as u64);
        match link {
            Some(target) => self.0.append_link(&mut header, path, target),
            None => self.0.append_data(&mut header, path, bytes),
        }
        .expect("a Vec takes everything");
    }

    /// Adds a directory.
    pub fn add_directory(&mut self, path: &str, mode: u32) {
        self.append(&format!("{path}/"), tar::EntryType::Directory, mode, None, &[]);
    }

    /// Adds a program of this machine with its shared libraries.
    pub fn add_program(&mut self, from: &Path, path: &str) {
        self.add_file(path, &fs::read(from).expect("cargo built it"), 0o755);
        let linked = run_program("ldd", [from]).ok();
        for directory in ["lib", "lib64", "lib/x86_64-linux-gnu"] {
            self.add_directory(directory, 0o755);
        }
        for library in linked.split_whitespace().filter(|word| word.starts_with('/')) {
            self.add_file(library.trim_start_matches('/'), &fs::read(library).expect("ldd found it"), 0o755);
        }
    }

    /// Adds a regular file.
    pub fn add_file(&mut self, path: &str, bytes: &[u8], mode: u32) {
        self.append(path, tar::EntryType::Regular, mode, None, bytes);
    }

    /// Adds a symbolic link.
    pub fn add_symlink(&mut self, path: &str, target: &str) {
        self.append(path, tar::EntryType::Symlink, 0o777, Some(target), &[]);
    }
}
