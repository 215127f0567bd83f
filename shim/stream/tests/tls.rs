//! Tests the streaming server with TLS. openssl creates the certificate and is the client.

mod common;

use common::{Node, command};
use nacelle_base::{Classify, FailureKind};
use nacelle_stream::{StreamingConfig, StreamingServer, Tls};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

fn config(directory: &Path, certificate: &str) -> StreamingConfig {
    let tls = Tls { certificate: directory.join(certificate), key: directory.join("key.pem"), client_authority: None };
    StreamingConfig { address: ([127, 0, 0, 1], 0).into(), idle: Duration::from_secs(3600), tls: Some(tls) }
}

#[test]
fn a_client_that_trusts_the_certificate_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=stream", "-addext", "subjectAltName=IP:127.0.0.1"])
        .args(["-keyout", "key.pem", "-out", "cert.pem"])
        .current_dir(directory.path())
        .output();
    let Ok(made) = made else { return println!("skipped: openssl is not installed") };
    assert!(made.status.success(), "{made:?}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let (server, listener) = StreamingServer::bind(&config(directory.path(), "cert.pem")).await.unwrap();
        tokio::spawn(listener.serve(Arc::new(Node::default())));
        let url = server.exec(command("cat")).unwrap();
        let (host, path) = url.strip_prefix("https://").unwrap().split_once('/').unwrap();
        let (host, request) = (host.to_owned(), format!("POST /{path} HTTP/1.1\r\nHost: x\r\n{}\r\n", common::V4));
        let directory = directory.path().to_owned();
        let asked = tokio::task::spawn_blocking(move || {
            let mut client = Command::new("timeout")
                .args([
                    "60",
                    "openssl",
                    "s_client",
                    "-quiet",
                    "-verify_return_error",
                    "-CAfile",
                    "cert.pem",
                    "-connect",
                ])
                .arg(&host)
                .current_dir(directory)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut stdin = client.stdin.take().unwrap();
            stdin.write_all(request.as_bytes()).unwrap();
            // A frame of an unknown version: the server closes the connection.
            stdin.write_all(&[0x80, 9, 0, 0, 0, 0, 0, 0]).unwrap();
            let output = client.wait_with_output().unwrap();
            drop(stdin);
            output
        });
        let output = asked.await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.starts_with("HTTP/1.1 101 "), "{output:?}");
    });
}

#[test]
fn what_is_no_certificate_is_named() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("empty.pem"), "").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (file, named) in [("none.pem", "none.pem"), ("empty.pem", "key.pem")] {
        let bound = runtime.block_on(StreamingServer::bind(&config(directory.path(), file)));
        let Err(error) = bound else { panic!("{file} is no certificate") };
        assert_eq!(error.kind(), FailureKind::Invalid);
        assert!(nacelle_base::Chain(&error).to_string().contains(named), "{file}: {}", nacelle_base::Chain(&error));
    }
}
