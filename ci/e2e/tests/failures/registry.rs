//! Runs a registry in the node's network namespace that fails as the name of the requested repository says.

use nacelle_e2e::TestNode;
use nacelle_e2e::failure_answer::check_request;
use nacelle_e2e::node::Netns;
use nix::sched::{CloneFlags, setns};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The rows that [`check`] causes.
pub const ROWS: [&str; 8] =
    ["401", "404", "429", "500", "connection reset midway", "stalled", "wrong bytes", "unreachable"];

/// The address of the registry in the node's network namespace.
pub const HOST: &str = "127.0.0.1:5001";

/// An address at which none listens.
const CLOSED: &str = "127.0.0.1:5002";

/// The only blob: the configuration of the image, whose digest is right.
const CONFIG: &[u8] = br#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;

/// The registry. Dropping it ends it.
pub struct FailingRegistry {
    ended: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl FailingRegistry {
    /// Listens on [`HOST`] of this namespace.
    pub fn start(netns: &Netns) -> FailingRegistry {
        let ended = Arc::new(AtomicBool::new(false));
        let (stop, namespace) = (Arc::clone(&ended), netns.open());
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("the test is root");
            let listener = TcpListener::bind(HOST).expect("the port is free");
            listener.set_nonblocking(true).expect("a listener can be made non-blocking");
            ready.send(()).expect("the test waits");
            while !stop.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let stop = Arc::clone(&stop);
                        // A client that disconnects does not fail the test.
                        thread::spawn(move || serve(&stream, &stop).unwrap_or_default());
                    }
                    Err(_none_yet) => thread::sleep(Duration::from_millis(10)),
                }
            }
        });
        is_ready.recv().expect("the registry listens");
        FailingRegistry { ended, thread: Some(thread) }
    }
}

impl Drop for FailingRegistry {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the configuration of the daemon for the registry.
pub fn config() -> String {
    let http = |host| format!("[images.registries.{host:?}]\nhttp = true\n");
    http(HOST) + &http(CLOSED) + "[images]\nprogress_timeout = \"1s\"\n"
}

/// Pulls an image whose registry fails like this.
pub fn check(node: &TestNode, failure: &str) {
    let (host, repository) = match failure {
        "unreachable" => (CLOSED, "any".to_owned()),
        _ => (HOST, failure.replace(' ', "-")),
    };
    let image = format!("{host}/{repository}:1");
    let watched = (failure == "stalled").then(|| pull_on_terminal(node, &image));
    check_request(node, failure, &node.crictl.try_call(["pull", &image]));
    if let Some(watched) = watched {
        let shown = watched.wait_with_output().expect("it is ours");
        let shown = String::from_utf8_lossy(&shown.stdout);
        assert!(shown.contains("finding the missing layers"), "the terminal shows how far the pull has come: {shown}");
    }
}

/// Pulls an image by the node's command, as on a terminal.
fn pull_on_terminal(node: &TestNode, image: &str) -> Child {
    let program = nacelle_e2e::path_from_env("NACELLE_BIN");
    let config = node.directory().join("config.toml");
    let command = format!("{} image pull --config {} {image}", program.display(), config.display());
    let mut script = node.netns.command("script");
    script.args(["--quiet", "--flush", "--command", &command, "/dev/null"]);
    script.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("script is installed")
}

/// Answers one request.
fn serve(mut stream: &TcpStream, ended: &AtomicBool) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let mut first = String::new();
    let mut lines = BufReader::new(stream);
    lines.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
    }
    let path = first.split(' ').nth(1).unwrap_or_default();
    let repository = path.split('/').nth(2).unwrap_or_default();
    let is_blob = path.contains("/blobs/");
    let (status, body) = match repository {
        "401" => (401, br#"{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}"#.to_vec()),
        "404" => (404, br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#.to_vec()),
        "429" => (429, br#"{"errors":[{"code":"TOOMANYREQUESTS","message":"too many requests"}]}"#.to_vec()),
        "500" => (500, b"<html>".to_vec()),
        _ if is_blob && repository == "wrong-bytes" => (200, CONFIG.to_ascii_uppercase()),
        _ if is_blob => (200, CONFIG.to_vec()),
        _ => (200, manifest().into_bytes()),
    };
    let mut head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    if status == 200 && !is_blob {
        head += "Content-Type: application/vnd.oci.image.manifest.v1+json\r\n";
    }
    write!(stream, "{head}\r\n")?;
    let fails_midway = is_blob && matches!(repository, "connection-reset-midway" | "stalled");
    let sent = if fails_midway { body.len() / 2 } else { body.len() };
    stream.write_all(&body[..sent])?;
    while repository == "stalled" && is_blob && !ended.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns the manifest of an image without layers.
fn manifest() -> String {
    let digest = Sha256::digest(CONFIG).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:{digest}","size":{}}},"layers":[]}}"#,
        CONFIG.len()
    )
}
