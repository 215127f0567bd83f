//! Provides a minimal node behind a real streaming server, and a client that speaks SPDY frame by frame.

#![allow(dead_code, reason = "each test program uses a part of this")]

use nacelle_stream::spdy::frame::{self, Control, Head};
use nacelle_stream::spdy::headers::{Decoder, Encoder};
use nacelle_stream::{Attach, Exec, ProcessStreams, StreamBackend, StreamingConfig, StreamingServer, TerminalSize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

pub const LIMIT: Duration = Duration::from_secs(60);

/// Waits for a future, for a bounded time.
pub async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, what).await.expect("within a minute")
}

#[derive(Debug, thiserror::Error)]
#[error("there is no {0}")]
pub struct Missing(String);

/// The fake node. Its processes are `cat`, `spew BYTES`, `hold` (prints "up" and runs forever), `exit CODE` and `missing`.
#[derive(Default)]
pub struct Node {
    pub sizes: Mutex<Vec<TerminalSize>>,
    pub killed: Arc<Mutex<Vec<String>>>,
}

struct Guard(Arc<Mutex<Vec<String>>>, Option<String>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.lock().unwrap().extend(self.1.take());
    }
}

impl StreamBackend for Node {
    type Error = Missing;

    async fn exec(&self, exec: &Exec) -> Result<ProcessStreams<Missing>, Missing> {
        let pair = || UnixStream::pair().unwrap();
        let ((input, mut stdin), (output, mut stdout)) = (pair(), pair());
        let mut guard = Guard(Arc::clone(&self.killed), exec.args.first().cloned());
        let number = exec.args.get(1).and_then(|text| text.parse::<usize>().ok()).unwrap_or(0);
        let run = async move {
            let code = match guard.1.as_deref().unwrap_or_default() {
                "cat" => tokio::io::copy(&mut stdin, &mut stdout).await.map_or(1, |_| 0),
                "spew" => stdout.write_all(&vec![b'x'; number]).await.map_or(1, |()| 0),
                "hold" => {
                    stdout.write_all(b"up").await.unwrap();
                    std::future::pending().await
                }
                _ => i32::try_from(number).unwrap(),
            };
            // The process was not killed.
            drop(guard.1.take());
            Ok(code)
        };
        if exec.args.first().is_none_or(|name| name == "missing") {
            return Err(Missing(exec.args.join(" ")));
        }
        let (exec_id, end) = ("e".into(), Box::pin(run));
        Ok(ProcessStreams { exec_id, detaches: false, stdin: Some(input), stdout: Some(output), stderr: None, end })
    }

    /// Attaches to a container that echoes its input, forever; "once" until the end of its input.
    async fn attach(&self, attach: &Attach) -> Result<ProcessStreams<Missing>, Missing> {
        let once = attach.container == "once";
        let ((input, mut stdin), (output, mut stdout)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let end = Box::pin(async move {
            // The client has disconnected: nothing to report.
            let _ = tokio::io::copy(&mut stdin, &mut stdout).await;
            if !once {
                std::future::pending::<()>().await;
            }
            Ok(0)
        });
        let (stdin, stdout) = (Some(input), Some(output));
        Ok(ProcessStreams { exec_id: String::new(), detaches: !once, stdin, stdout, stderr: None, end })
    }

    /// Connects to a port: 7 echoes, 9 never answers, others refuse the connection.
    async fn connect_to_port(&self, pod: &str, port: u16) -> Result<UnixStream, Missing> {
        let (near, mut far) = UnixStream::pair().unwrap();
        match port {
            7 => {
                tokio::spawn(async move {
                    let (mut from, mut to) = far.split();
                    // The client may have disconnected.
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                });
            }
            9 => {
                let closed = Guard(Arc::clone(&self.killed), Some("port 9".into()));
                tokio::spawn(async move {
                    let mut all = Vec::new();
                    let _ = far.read_to_end(&mut all).await;
                    drop(closed);
                });
            }
            port => return Err(Missing(format!("port {port} of pod {pod}"))),
        }
        Ok(near)
    }

    async fn resize(&self, _: &str, exec_id: &str, size: TerminalSize) -> Result<(), Missing> {
        assert_eq!(exec_id, "e");
        self.sizes.lock().unwrap().push(size);
        Ok(())
    }
}

/// Starts a server that serves.
pub async fn serve(idle: Duration) -> (StreamingServer, Arc<Node>) {
    let config = StreamingConfig { address: ([127, 0, 0, 1], 0).into(), idle, tls: None };
    let (server, listener) = StreamingServer::bind(&config).await.unwrap();
    let node = Arc::new(Node::default());
    tokio::spawn(listener.serve(Arc::clone(&node)));
    (server, node)
}

pub fn command(words: &str) -> Exec {
    Exec {
        container: "c".into(),
        args: words.split(' ').map(str::to_owned).collect(),
        tty: false,
        stdin: true,
        stdout: true,
        stderr: false,
    }
}

/// Sends a request for an upgrade. Returns the status line, and the connection after the headers.
pub async fn ask(url: &str, headers: &str) -> (String, TcpStream) {
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut connection = TcpStream::connect(host).await.unwrap();
    let request = format!("POST /{path} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n");
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(soon(connection.read_u8()).await.unwrap());
    }
    let answer = String::from_utf8(answer).unwrap();
    // Proxies, like kubelet's, close the connection if the answer says so.
    let closes = answer.to_lowercase().lines().any(|line| line.starts_with("connection:") && line.contains("close"));
    assert_eq!(closes, !answer.starts_with("HTTP/1.1 101 "), "{answer}");
    (answer, connection)
}

pub const V4: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v5.channel.k8s.io\r\n\
                      X-Stream-Protocol-Version: v4.channel.k8s.io\r\n";

/// The bytes received on one stream.
#[derive(Debug, Default, Clone)]
pub struct Came {
    pub bytes: Vec<u8>,
    pub last: bool,
}

/// A SPDY client.
pub struct Client {
    pub connection: TcpStream,
    encoder: Encoder,
    decoder: Decoder,
    next: u32,
    pub came: BTreeMap<u32, Came>,
    pub controls: Vec<Control>,
    pub replies: Vec<u32>,
}

impl Client {
    pub async fn new(url: &str) -> Client {
        let (answer, connection) = ask(url, V4).await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        assert!(answer.to_lowercase().contains("x-stream-protocol-version: v4.channel.k8s.io"), "{answer}");
        Client::on(connection)
    }

    pub fn on(connection: TcpStream) -> Client {
        Client {
            connection,
            encoder: Encoder::new().unwrap(),
            decoder: Decoder::default(),
            next: 1,
            came: BTreeMap::new(),
            controls: Vec::new(),
            replies: Vec::new(),
        }
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        soon(self.connection.write_all(bytes)).await.unwrap();
    }

    /// Opens a stream with these headers.
    pub async fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
        let id = self.next;
        self.next += 2;
        let block = self.encoder.encode(headers).unwrap();
        let length = u32::try_from(block.len() + 10).unwrap().to_be_bytes();
        let mut frame = vec![0x80, 3, 0, 1, 0, length[1], length[2], length[3]];
        frame.extend_from_slice(&id.to_be_bytes());
        frame.extend_from_slice(&[0; 6]);
        frame.extend_from_slice(&block);
        self.write(&frame).await;
        id
    }

    /// Opens the streams of a command: error, stdin, stdout.
    pub async fn streams(&mut self) -> [u32; 3] {
        let mut ids = [0; 3];
        for (id, kind) in ids.iter_mut().zip(["error", "stdin", "stdout"]) {
            *id = self.open(&[("streamtype", kind)]).await;
        }
        ids
    }

    pub async fn send(&mut self, id: u32, last: bool, bytes: &[u8]) {
        let frame = [&frame::data(id, last, bytes.len())[..], bytes].concat();
        self.write(&frame).await;
    }

    /// Reads one frame. Returns false if the server has closed the connection.
    pub async fn read(&mut self) -> bool {
        let mut head = [0; frame::HEAD];
        if soon(self.connection.read_exact(&mut head)).await.is_err() {
            return false;
        }
        match frame::head(head).unwrap() {
            Head::Data { id, last, length } => {
                let mut bytes = vec![0; usize::try_from(length).unwrap()];
                soon(self.connection.read_exact(&mut bytes)).await.unwrap();
                let came = self.came.entry(id).or_default();
                assert!(!came.last, "bytes after the end of stream {id}");
                came.bytes.extend(bytes);
                came.last = last;
            }
            Head::Control { kind, flags, length } => {
                let mut body = vec![0; usize::try_from(length).unwrap()];
                soon(self.connection.read_exact(&mut body)).await.unwrap();
                if kind == 2 {
                    self.replies.push(u32::from_be_bytes(body[..4].try_into().unwrap()));
                    self.decoder.decode(&body[4..]).unwrap();
                }
                self.controls.push(frame::control(kind, flags, &body).unwrap());
            }
        }
        true
    }

    /// Reads until this stream has ended, and returns all of its bytes.
    pub async fn all(&mut self, id: u32) -> Vec<u8> {
        while !self.came.get(&id).is_some_and(|came| came.last) {
            assert!(self.read().await, "the server hung up before the end of stream {id}: {:?}", self.controls);
        }
        self.came[&id].bytes.clone()
    }

    /// Returns the status from the error stream.
    pub async fn status(&mut self, id: u32) -> serde_json::Value {
        serde_json::from_slice(&self.all(id).await).unwrap()
    }
}
