//! Runs a real registry (Debian's `docker-registry`) in the node's network namespace.

use crate::image::{TestArtifact, TestImage};
use crate::node::Netns;
use crate::run::{ProgramOutput, eventually, run, run_program};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// The user and the password of a registry that requires them.
pub const LOGIN: (&str, &str) = ("pilot", "cloud-9");

/// The kind of a registry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegistryKind {
    /// Plain http without authentication.
    Http,
    /// https with a certificate of a CA of our own, and a password ([`LOGIN`]).
    HttpsWithPassword,
}

/// A running registry; dropping it ends it.
pub struct TestRegistry {
    kind: RegistryKind,
    port: u16,
    directory: PathBuf,
    process: Child,
    netns: Netns,
}

impl TestRegistry {
    /// Starts a registry on `127.0.0.1:port` of the node; its data are below `directory`.
    pub fn start(netns: &Netns, directory: &Path, kind: RegistryKind, port: u16) -> Self {
        let directory = directory.join(format!("registry-{port}"));
        fs::create_dir_all(directory.join("data")).expect("the node's directory is writable");
        let mut config = format!(
            "version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {}}}, delete: {{enabled: true}}}}\n\
             http:\n  addr: 127.0.0.1:{port}\n",
            directory.join("data").display()
        );
        if kind == RegistryKind::HttpsWithPassword {
            create_certificate(&directory);
            let hash = run_program("htpasswd", ["-Bbn", LOGIN.0, LOGIN.1]).ok();
            fs::write(directory.join("htpasswd"), hash).expect("the node's directory is writable");
            config += &format!(
                "  tls: {{certificate: {0}/server.crt, key: {0}/server.key}}\n\
                 auth: {{htpasswd: {{realm: e2e, path: {0}/htpasswd}}}}\n",
                directory.display()
            );
        }
        fs::write(directory.join("config.yml"), config).expect("the node's directory is writable");
        let log = fs::File::create(directory.join("log")).expect("the node's directory is writable");
        let process = netns
            .command("docker-registry")
            .arg("serve")
            .arg(directory.join("config.yml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file can be duplicated"))
            .stderr(log)
            .spawn()
            .expect("docker-registry is installed");
        let registry = Self { kind, port, directory, process, netns: netns.clone() };
        eventually("the registry answers", || {
            let answer = run(registry.netns.command("curl").args(["-ks", "-o", "/dev/null"]).arg(registry.url("/v2/")));
            (answer.code == 0).then_some(())
        });
        registry
    }

    fn url(&self, path: &str) -> String {
        let scheme = if self.kind == RegistryKind::Http { "http" } else { "https" };
        format!("{scheme}://127.0.0.1:{}{path}", self.port)
    }

    /// Returns host and port, "127.0.0.1:5000".
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the file with the CA certificate of this registry.
    pub fn ca_file(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Returns the directory of the registry's blobs, for a test that corrupts one.
    pub fn data_directory(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Pushes an image as `name:tag`; returns its complete reference.
    pub fn push(&self, image: &TestImage, name: &str) -> String {
        self.push_layout(&image.write_layout(&self.directory, name), name, &[])
    }

    /// Pushes an artifact as `name:tag`; returns its complete reference, and its digest.
    pub fn push_artifact(&self, artifact: &TestArtifact, name: &str) -> (String, String) {
        let (layout, digest) = artifact.write_layout(&self.directory, name);
        (self.push_layout(&layout, name, &["--preserve-digests"]), digest)
    }

    fn push_layout(&self, layout: &Path, name: &str, more: &[&str]) -> String {
        let reference = format!("{}/{name}", self.host());
        let mut copy = self.netns.command("skopeo");
        copy.args(["copy", "--quiet", "--dest-tls-verify=false"]).args(more);
        if self.kind == RegistryKind::HttpsWithPassword {
            copy.arg(format!("--dest-creds={}:{}", LOGIN.0, LOGIN.1));
        }
        let pushed: ProgramOutput =
            run(copy.arg(format!("oci:{}:latest", layout.display())).arg(format!("docker://{reference}")));
        pushed.ok();
        reference
    }
}

impl Drop for TestRegistry {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Creates a CA and a certificate for 127.0.0.1 with openssl.
fn create_certificate(directory: &Path) {
    let openssl = |arguments: &[&str]| {
        run(std::process::Command::new("openssl").current_dir(directory).args(arguments)).ok();
    };
    fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        .expect("the directory is writable");
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
    let ca = [&["req", "-x509"][..], &key, &["-subj", "/CN=e2e CA", "-keyout", "ca.key", "-out", "ca.crt"]].concat();
    openssl(&ca);
    openssl(&[&["req"][..], &key[..5], &["-subj", "/CN=e2e", "-keyout", "server.key", "-out", "server.csr"]].concat());
    openssl(&[
        "x509",
        "-req",
        "-in",
        "server.csr",
        "-CA",
        "ca.crt",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "names",
        "-out",
        "server.crt",
    ]);
}
