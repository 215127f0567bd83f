//! Tests exec, attach and port-forward over WebSockets, with a server and a minimal node.

mod common;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::{Client, ask, command, serve, soon};
use futures_util::{SinkExt, StreamExt};
use nacelle_stream::{Attach, Exec, TerminalSize};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_tungstenite::tungstenite::{Bytes, Message};

const LONG: Duration = Duration::from_secs(3600);

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

fn headers(protocols: &str) -> String {
    format!(
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: {protocols}\r\n"
    )
}

async fn connect(url: &str, protocols: &str, chosen: &str) -> WebSocketStream<TcpStream> {
    let (answer, connection) = ask(url, &headers(protocols)).await;
    let lower = answer.to_lowercase();
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    // The example of RFC 6455, section 1.3.
    assert!(answer.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{answer}");
    assert!(lower.contains(&format!("sec-websocket-protocol: {}", chosen.to_lowercase())), "{answer}");
    WebSocketStream::from_raw_socket(connection, Role::Client, None).await
}

/// Connects as a client that offers no protocol, or an older one than v4.
async fn connect_old(url: &str, protocol: &str) -> WebSocketStream<TcpStream> {
    if !protocol.is_empty() {
        return connect(url, protocol, protocol).await;
    }
    let headers = headers("x").replace("Sec-WebSocket-Protocol: x\r\n", "");
    let (answer, connection) = ask(url, &headers).await;
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(!answer.to_lowercase().contains("sec-websocket-protocol"), "{answer}");
    WebSocketStream::from_raw_socket(connection, Role::Client, None).await
}

fn message(protocol: &str, channel: u8, bytes: &[u8]) -> Message {
    match protocol.contains("base64") {
        true => Message::Text(format!("{}{}", char::from(b'0' + channel), STANDARD.encode(bytes)).into()),
        false => Message::Binary([&[channel], bytes].concat().into()),
    }
}

/// Returns the next message on any channel; `None` for the close message.
async fn hear(socket: &mut WebSocketStream<TcpStream>, protocol: &str) -> Option<(u8, Vec<u8>)> {
    match (soon(socket.next()).await.expect("a goodbye comes first").unwrap(), protocol.contains("base64")) {
        (Message::Text(text), true) => {
            let (channel, bytes) = text.split_at(1);
            Some((channel.parse().unwrap(), STANDARD.decode(bytes).unwrap()))
        }
        (Message::Binary(bytes), false) => Some((bytes[0], bytes[1..].to_vec())),
        (Message::Close(_), _) => None,
        (other, _) => panic!("{other:?}"),
    }
}

/// Returns all bytes of each channel until the close message.
async fn rest(socket: &mut WebSocketStream<TcpStream>) -> [Vec<u8>; 5] {
    let mut all: [Vec<u8>; 5] = Default::default();
    loop {
        match soon(socket.next()).await.expect("a goodbye comes first").unwrap() {
            Message::Binary(bytes) => all[usize::from(bytes[0])].extend_from_slice(&bytes[1..]),
            Message::Close(Some(close)) => {
                assert_eq!(u16::from(close.code), 1000);
                return all;
            }
            other => panic!("{other:?}"),
        }
    }
}

async fn send(socket: &mut WebSocketStream<TcpStream>, channel: u8, bytes: &[u8]) {
    let message = [&[channel], bytes].concat();
    soon(socket.send(Message::Binary(message.into()))).await.unwrap();
}

#[test]
fn input_is_echoed_and_stdin_close_is_signalled_since_v5() {
    run(async {
        let (server, node) = serve(LONG).await;
        let exec = Exec { tty: true, ..command("cat") };
        let url = server.exec(exec).unwrap();
        let mut client = connect(&url, "v5.channel.k8s.io, v4.channel.k8s.io", "v5.channel.k8s.io").await;
        let sent: Vec<u8> = (0..50_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        send(&mut client, 4, b"{\"Width\":80,\"Height\":24}").await;
        send(&mut client, 0, &sent).await;
        send(&mut client, 9, b"no such channel").await;
        soon(client.send(Message::Ping(Bytes::new()))).await.unwrap();
        send(&mut client, 255, &[0]).await;
        let mut all: [Vec<u8>; 5] = Default::default();
        loop {
            match soon(client.next()).await.unwrap().unwrap() {
                Message::Binary(bytes) => all[usize::from(bytes[0])].extend_from_slice(&bytes[1..]),
                Message::Pong(_) => {}
                Message::Close(_) => break,
                other => panic!("{other:?}"),
            }
        }
        assert!(all[1] == sent);
        let status: serde_json::Value = serde_json::from_slice(&all[3]).unwrap();
        assert_eq!(status["status"], "Success");
        soon(async {
            while node.sizes.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
        assert_eq!(node.sizes.lock().unwrap()[0], TerminalSize { columns: 80, rows: 24 });
    });
}

#[test]
fn v4_tells_the_code_and_a_client_that_goes_kills() {
    run(async {
        let (server, node) = serve(LONG).await;
        let mut client =
            connect(&server.exec(command("exit 5")).unwrap(), "v4.channel.k8s.io", "v4.channel.k8s.io").await;
        let all = rest(&mut client).await;
        let status: serde_json::Value = serde_json::from_slice(&all[3]).unwrap();
        assert_eq!(status["details"]["causes"][0]["message"], "5");

        let mut client =
            connect(&server.exec(command("hold")).unwrap(), "v4.channel.k8s.io", "v4.channel.k8s.io").await;
        // In this protocol, 255 is an unknown channel.
        send(&mut client, 255, &[0]).await;
        while soon(client.next()).await.unwrap().unwrap() != Message::Binary(Bytes::from_static(b"\x01up")) {}
        assert!(node.killed.lock().unwrap().is_empty());
        drop(client);
        soon(async {
            while node.killed.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    });
}

#[test]
fn protocols_of_old_clients_are_spoken_by_exec_and_attach() {
    run(async {
        for protocol in ["", "channel.k8s.io", "base64.channel.k8s.io", "v4.base64.channel.k8s.io", "v4.channel.k8s.io"]
        {
            let (server, node) = serve(LONG).await;
            let status = protocol.starts_with("v4");
            // The exit status of the command.
            for (words, expected) in [("exit 0", ""), ("exit 5", "command terminated with non-zero exit code: 5")] {
                let mut client = connect_old(&server.exec(command(words)).unwrap(), protocol).await;
                let mut all: [Vec<u8>; 5] = Default::default();
                while let Some((channel, bytes)) = hear(&mut client, protocol).await {
                    all[usize::from(channel)].extend(bytes);
                }
                if status {
                    let status: serde_json::Value = serde_json::from_slice(&all[3]).unwrap();
                    assert_eq!(status["status"] == "Success", expected.is_empty(), "{status}");
                } else {
                    assert_eq!(String::from_utf8(all[3].clone()).unwrap(), expected, "{protocol}");
                }
            }
            // Input is echoed, and the terminal's size arrives.
            let attach = Attach { container: "c".into(), tty: true, stdin: true, stdout: true, stderr: false };
            let exec = server.exec(Exec { tty: true, ..command("cat") }).unwrap();
            for url in [exec, server.attach(attach).unwrap()] {
                let mut client = connect_old(&url, protocol).await;
                let sent: Vec<u8> = (0..50_000_u32).map(|n| n.to_le_bytes()[0]).collect();
                if url.contains("/exec/") {
                    let size = message(protocol, 4, b"{\"Width\":80,\"Height\":24}");
                    soon(client.send(size)).await.unwrap();
                }
                soon(client.send(message(protocol, 0, &sent))).await.unwrap();
                let mut back = Vec::new();
                while back.len() < sent.len() {
                    let (channel, bytes) = hear(&mut client, protocol).await.unwrap();
                    assert_eq!(channel, 1);
                    back.extend(bytes);
                }
                assert!(back == sent);
            }
            assert_eq!(node.sizes.lock().unwrap()[..], [TerminalSize { columns: 80, rows: 24 }]);
        }
    });
}

#[test]
fn text_that_is_no_base64_ends_the_connection() {
    run(async {
        let (server, _) = serve(LONG).await;
        let protocol = "v4.base64.channel.k8s.io";
        let mut client = connect(&server.exec(command("cat")).unwrap(), protocol, protocol).await;
        soon(client.send(Message::Text("0a".into()))).await.unwrap();
        // The connection was closed without a close message.
        while let Some(Ok(message)) = soon(client.next()).await {
            assert_eq!(message, Message::Text("1".into()));
        }
    });
}

#[test]
fn ports_of_the_request_are_channels_of_old_clients() {
    run(async {
        for protocol in ["", "v4.channel.k8s.io", "v4.base64.channel.k8s.io"] {
            let (server, _) = serve(LONG).await;
            let mut client = connect_old(&server.forward("p".into(), vec![7, 8]).unwrap(), protocol).await;
            let sent: Vec<u8> = (0..70_000_u32).map(|n| n.to_le_bytes()[0]).collect();
            soon(client.send(message(protocol, 0, &sent))).await.unwrap();
            let mut all: [Vec<u8>; 4] = Default::default();
            let why = "there is no port 8 of pod p";
            while all[0].len() < sent.len() + 2 || all[3].len() < why.len() + 2 {
                let (channel, bytes) = hear(&mut client, protocol).await.unwrap();
                all[usize::from(channel)].extend(bytes);
            }
            assert!(all[0] == [&[7, 0], &sent[..]].concat(), "each channel begins with its port");
            assert_eq!((&all[1][..], &all[2][..]), (&[7, 0][..], &[8, 0][..]));
            assert_eq!(all[3], [&[8, 0], why.as_bytes()].concat());
        }
    });
}

#[test]
fn what_is_no_websocket_of_ours_is_refused() {
    run(async {
        let (server, _) = serve(LONG).await;
        let answer = ask(&server.exec(command("cat")).unwrap(), &headers("v9.channel.k8s.io")).await.0;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        assert!(
            answer.to_lowercase().contains("x-accepted-stream-protocol-versions: v5.channel.k8s.io\r\n"),
            "{answer}"
        );
        // Ports as channels are those of the request: without any there is nothing to forward.
        for (ports, protocols) in
            [(vec![], "v4.channel.k8s.io"), (vec![7; 33], "v4.channel.k8s.io"), (vec![7], "channel.k8s.io")]
        {
            let answer = ask(&server.forward("p".into(), ports).unwrap(), &headers(protocols)).await.0;
            assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        }
        let answer = ask(&server.forward("p".into(), vec![]).unwrap(), &headers("v5.channel.k8s.io")).await.0;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        // Bytes that are not frames, an unmasked frame, a frame that is too long: the connection ends.
        for wrong in [&[0xff; 20][..], &[0x82, 1, 0], &[0x82, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2, 3, 4]] {
            let url = server.exec(command("cat")).unwrap();
            let (answer, mut connection) = ask(&url, &headers("v5.channel.k8s.io")).await;
            assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
            connection.write_all(wrong).await.unwrap();
            let mut all = Vec::new();
            // Closed or reset: both end the connection.
            let _ = soon(connection.read_to_end(&mut all)).await;
        }
    });
}

#[test]
fn ports_are_forwarded_by_spdy_inside_a_websocket() {
    run(async {
        let (server, _) = serve(LONG).await;
        let url = server.forward("p".into(), vec![]).unwrap();
        let protocol = "SPDY/3.1+portforward.k8s.io";
        let (mut output, mut input) = connect(&url, protocol, protocol).await.split();
        // The SPDY client needs a connection: its bytes go into messages, split arbitrarily.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut from, mut to) = listener.accept().await.unwrap().0.into_split();
        tokio::spawn(async move {
            let mut buffer = [0; 1000];
            while let Ok(count @ 1..) = from.read(&mut buffer).await {
                output.send(Message::Binary(Bytes::copy_from_slice(&buffer[..count]))).await.unwrap();
            }
        });
        tokio::spawn(async move {
            while let Some(Ok(Message::Binary(bytes))) = input.next().await {
                to.write_all(&bytes).await.unwrap();
            }
        });
        let mut client = Client::on(near);
        let mut ids = [0; 2];
        for (id, kind) in ids.iter_mut().zip(["error", "data"]) {
            *id = client.open(&[("streamtype", kind), ("port", "7"), ("requestid", "0")]).await;
        }
        let bytes: Vec<u8> = (0..70_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        client.send(ids[1], true, &bytes).await;
        assert!(client.all(ids[1]).await == bytes);
        assert!(client.all(ids[0]).await.is_empty());
    });
}
