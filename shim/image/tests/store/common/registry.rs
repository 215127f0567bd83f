//! Runs a real registry (Debian's docker-registry) on loopback for the duration of a test.

use super::{Image, write_layout};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running registry.
pub struct Registry {
    pub port: u16,
    child: Child,
    directory: tempfile::TempDir,
    password: bool,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the name of a missing tool of these tests, if one is missing.
pub fn missing() -> Option<String> {
    let runs =
        |tool: &str| Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    ["docker-registry", "skopeo", "openssl"]
        .into_iter()
        .find(|tool| !runs(tool))
        .map(|tool| format!("there is no {tool}"))
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Registry {
    /// Starts a registry over http, or over https with a certificate of our own authority; with `password`, the user is `u` and
    /// the password `p:w`.
    pub fn start(tls: bool, password: bool) -> Registry {
        Registry::start_with(tls, password, false)
    }

    /// Starts a registry over https that requires a client certificate of its authority.
    pub fn start_for_certificates() -> Registry {
        Registry::start_with(true, false, true)
    }

    fn start_with(tls: bool, password: bool, client_certificate: bool) -> Registry {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp:\n  addr: 127.0.0.1:0\n",
            path("data").display()
        );
        if tls {
            authority(directory.path());
            config += &format!(
                "  tls: {{certificate: {}, key: {}}}\n",
                path("cert.pem").display(),
                path("key.pem").display()
            );
            if client_certificate {
                config.truncate(config.trim_end().len() - 1);
                config += &format!(", clientcas: [{}]}}\n", path("ca.pem").display());
            }
        }
        if password {
            // bcrypt of "p:w".
            let line = "u:$2b$04$We21Rhyho6A0TdqyoE./s.NEWTefngY9VZSH80z45ezY2VsaO3ajS\n";
            std::fs::write(path("htpasswd"), line).unwrap();
            config += &format!("auth: {{htpasswd: {{realm: r, path: {}}}}}\n", path("htpasswd").display());
        }
        std::fs::write(path("config.yml"), config).unwrap();
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(path("config.yml"))
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("listening on")).expect("the registry ended");
        let after = line.split("listening on ").nth(1).unwrap();
        let address = after.split(['"', ',', ' ']).next().unwrap();
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        // The pipe of the registry must not fill up.
        std::thread::spawn(move || lines.for_each(drop));
        Registry { port, child, directory, password }
    }

    /// Returns `127.0.0.1:port`, or the host name of the certificate.
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the path of the authority's certificate.
    pub fn ca(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    /// Returns the certificate and key that the authority signed; a registry accepts them as a client's, too.
    pub fn certificate(&self) -> (PathBuf, PathBuf) {
        (self.directory.path().join("cert.pem"), self.directory.path().join("key.pem"))
    }

    /// Pushes an image. `more` are additional arguments of skopeo.
    pub fn push(&self, image: &Image, name: &str, more: &[&str]) {
        let layout = tempfile::tempdir_in(self.directory.path()).unwrap();
        write_layout(image, layout.path(), "t");
        let mut skopeo = Command::new("skopeo");
        skopeo
            .args(["copy", "--insecure-policy", "--quiet", "--dest-tls-verify=false", "--preserve-digests"])
            .args(more);
        if self.password {
            skopeo.args(["--dest-creds", "u:p:w"]);
        }
        skopeo.arg(format!("oci:{}:t", layout.path().display())).arg(format!("docker://{}/{name}", self.host()));
        run(&mut skopeo);
    }
}

/// Creates an authority and a certificate for 127.0.0.1 that it signed.
fn authority(directory: &Path) {
    let openssl = |arguments: &[&str]| run(Command::new("openssl").args(arguments).current_dir(directory));
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    openssl(
        &[&["req", "-x509"], &key[..], &["-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2"]]
            .concat(),
    );
    openssl(&[&["req"], &key[..], &["-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=registry"]].concat());
    std::fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1,DNS:registry.test\n").unwrap();
    openssl(&[
        "x509",
        "-req",
        "-in",
        "request.pem",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "cert.pem",
        "-days",
        "2",
        "-extfile",
        "names",
    ]);
}
