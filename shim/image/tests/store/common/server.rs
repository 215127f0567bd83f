//! Runs a small HTTP server on loopback that answers as the test specifies, correctly or not.

use super::Image;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A received request.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Asked {
    /// Returns the first byte of the requested range.
    pub fn from(&self) -> usize {
        let range = self.headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        range.and_then(|range| range.strip_suffix('-')).map_or(0, |from| from.parse().unwrap())
    }
}

/// A reply.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Cut the connection after this many bytes of the body.
    pub cut: Option<usize>,
    /// Send nothing after the body, but keep the connection open.
    pub stall: bool,
    /// Send the body again and again.
    pub endless: bool,
}

impl Reply {
    pub fn ok(body: &[u8]) -> Reply {
        Reply { status: 200, body: body.to_vec(), ..Reply::default() }
    }

    pub fn status(status: u16) -> Reply {
        Reply { status, ..Reply::default() }
    }

    pub fn header(mut self, name: &str, value: &str) -> Reply {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Returns the rest of a body, as a server with range support answers.
    pub fn range(body: &[u8], from: usize) -> Reply {
        if from == 0 {
            return Reply::ok(body);
        }
        let range = format!("bytes {from}-{}/{}", body.len() - 1, body.len());
        Reply { status: 206, body: body[from..].to_vec(), ..Reply::default() }.header("Content-Range", &range)
    }
}

/// The server.
pub struct Server {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

impl Server {
    pub fn start(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (ended, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let answer = Arc::new(answer);
        let (stop, notes) = (Arc::clone(&ended), Arc::clone(&asked));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let (answer, notes, stop) = (Arc::clone(&answer), Arc::clone(&notes), Arc::clone(&stop));
                // A client that disconnects does not fail the test.
                std::thread::spawn(move || serve(stream, &*answer, &notes, &stop).unwrap_or_default());
            }
        });
        Server { address, ended, asked }
    }

    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Returns all requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve(
    mut stream: TcpStream,
    answer: &dyn Fn(&Asked) -> Reply,
    notes: &Mutex<Vec<Asked>>,
    ended: &AtomicBool,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut lines = reader.by_ref().lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut headers = HashMap::new();
    for line in lines {
        match line?.split_once(": ") {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.to_owned()),
            None => break,
        };
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let asked = Asked { method, path, headers, body };
    notes.lock().unwrap().push(asked.clone());
    let reply = answer(&asked);
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !reply.endless {
        let more = if reply.stall { 1 } else { 0 };
        head += &format!("Content-Length: {}\r\n", reply.body.len() + more);
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    loop {
        stream.write_all(&reply.body[..reply.cut.unwrap_or(reply.body.len()).min(reply.body.len())])?;
        if !reply.endless {
            break;
        }
    }
    while reply.stall && !ended.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Answers a request for this image, which has the tag `t`, correctly.
pub fn honest(image: &Image, asked: &Asked) -> Reply {
    let name = asked.path.rsplit('/').next().unwrap().split('?').next().unwrap();
    let name = if name == "t" { image.manifest.as_str() } else { name };
    match image.blobs.get(name) {
        Some(blob) => Reply::range(blob, asked.from()),
        None => Reply::status(404),
    }
}
