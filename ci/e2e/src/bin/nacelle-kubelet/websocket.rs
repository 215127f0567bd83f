//! Implements a client of kubelet's streams (exec, attach): WebSocket with the protocol `v5.channel.k8s.io`, over a TLS
//! connection of `openssl s_client`.

use crate::kubelet::AUTHENTICATED_PORT;
use nacelle_e2e::node::Netns;
use serde_json::Value;
use std::io::{Read, Write};
use std::process::Stdio;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;
/// The channel whose number follows has ended.
const ENDED_CHANNEL: u8 = 255;

const BINARY: u8 = 2;
const CLOSE: u8 = 8;

/// The output of a stream, from its first byte to its end.
#[derive(Debug, Default)]
pub struct ExecSession {
    pub stdout: String,
    pub stderr: String,
    /// The final `Status` of the server.
    pub status: Value,
}

impl ExecSession {
    /// Requests a stream from kubelet, sends `input` and its end, and reads all output.
    ///
    /// # Panics
    /// If kubelet rejects the request, or the stream breaks.
    #[track_caller]
    pub fn run(netns: &Netns, path: &str, input: &[u8]) -> Self {
        let mut client = netns
            .command("timeout")
            .args([
                "180",
                "openssl",
                "s_client",
                "-quiet",
                "-verify_quiet",
                "-connect",
                &format!("127.0.0.1:{AUTHENTICATED_PORT}"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl is installed");
        let mut to = client.stdin.take().expect("a pipe");
        let mut from = client.stdout.take().expect("a pipe");
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{AUTHENTICATED_PORT}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
             Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n"
        );
        to.write_all(request.as_bytes()).expect("kubelet reads the request");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            let got = from.read(&mut byte).expect("a pipe can be read");
            assert!(got == 1, "kubelet hung up: {}", String::from_utf8_lossy(&head));
            head.push(byte[0]);
        }
        let head = String::from_utf8_lossy(&head);
        assert!(head.starts_with("HTTP/1.1 101 "), "kubelet refused {path}: {head}");
        // A command that ends early does not read all of its input.
        let sent = input.chunks(16 << 10).try_for_each(|part| to.write_all(&frame(STDIN, part)));
        let _ = sent.and_then(|()| to.write_all(&frame(ENDED_CHANNEL, &[STDIN])));
        let mut channels: [Vec<u8>; 4] = Default::default();
        while let Some((code, message)) = next_message(&mut from) {
            match (code, message.split_first()) {
                (BINARY, Some((channel, bytes))) => {
                    let all = channels.get_mut(usize::from(*channel));
                    all.expect("a channel of the protocol").extend_from_slice(bytes);
                }
                (CLOSE, _) => break,
                _ => {}
            }
        }
        drop(to);
        // The client ends by itself, or when its last pipe is closed.
        let _ = client.kill();
        client.wait().expect("openssl is our child");
        let text = |channel: u8| String::from_utf8_lossy(&channels[usize::from(channel)]).into_owned();
        let status = serde_json::from_str(&text(STATUS)).unwrap_or_default();
        Self { stdout: text(STDOUT), stderr: text(STDERR), status }
    }

    /// Returns the exit code in the status.
    pub fn code(&self) -> Option<i32> {
        if self.status["status"] == "Success" {
            return Some(0);
        }
        let causes = self.status["details"]["causes"].as_array()?;
        causes.iter().find(|cause| cause["reason"] == "ExitCode")?["message"].as_str()?.parse().ok()
    }
}

/// Returns a client's frame, masked with zeros.
fn frame(channel: u8, bytes: &[u8]) -> Vec<u8> {
    let length = bytes.len() + 1;
    let mut frame = vec![0x80 | BINARY];
    match u8::try_from(length) {
        Ok(short) if short < 126 => frame.push(0x80 | short),
        _ => {
            frame.push(0x80 | 126);
            frame.extend(u16::try_from(length).expect("messages are short").to_be_bytes());
        }
    }
    frame.extend([0; 4]);
    frame.push(channel);
    frame.extend(bytes);
    frame
}

/// Returns the next message of a server, or `None` if it closed the connection.
fn next_message(from: &mut impl Read) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 2];
    from.read_exact(&mut head).ok()?;
    let length = match head[1] & 0x7f {
        126 => {
            let mut long = [0; 2];
            from.read_exact(&mut long).ok()?;
            u64::from(u16::from_be_bytes(long))
        }
        127 => {
            let mut long = [0; 8];
            from.read_exact(&mut long).ok()?;
            u64::from_be_bytes(long)
        }
        short => u64::from(short),
    };
    assert!(length <= 16 << 20, "a message of {length} bytes");
    let mut message = Vec::new();
    from.take(length).read_to_end(&mut message).ok()?;
    Some((head[0] & 0x0f, message))
}
