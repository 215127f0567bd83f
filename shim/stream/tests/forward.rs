//! Tests attach and port-forward over SPDY, with a server and a minimal node.

mod common;

use common::{Client, ask, serve, soon};
use nacelle_stream::Attach;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(3600);
const FORWARD: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: portforward.k8s.io\r\n";

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

async fn forward(url: &str) -> Client {
    let (answer, connection) = ask(url, FORWARD).await;
    assert!(answer.starts_with("HTTP/1.1 101 ") && answer.contains("portforward.k8s.io"), "{answer}");
    Client::on(connection)
}

/// Opens a pair of streams for a port, and returns error and data.
async fn pair(client: &mut Client, port: &str, request: &str) -> [u32; 2] {
    let mut ids = [0; 2];
    for (id, kind) in ids.iter_mut().zip(["error", "data"]) {
        *id = client.open(&[("streamtype", kind), ("port", port), ("requestid", request)]).await;
    }
    client.send(ids[0], true, b"").await;
    ids
}

#[test]
fn connections_of_one_client_do_not_mix() {
    run(async {
        let (server, _) = serve(LONG).await;
        let mut client = forward(&server.forward("p".into(), vec![]).unwrap()).await;
        let [first_error, first] = pair(&mut client, "7", "0").await;
        let [second_error, second] = pair(&mut client, "7", "1").await;
        let [refused_error, refused] = pair(&mut client, "80", "2").await;
        let [none_error, _] = pair(&mut client, "0", "3").await;
        let bytes: Vec<u8> = (0..70_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        client.send(first, false, &bytes).await;
        client.send(second, true, b"short").await;
        client.send(first, true, b"").await;
        assert!(client.all(first).await == bytes);
        assert_eq!(client.all(second).await, b"short");
        for (error, expected) in [
            (first_error, ""),
            (second_error, ""),
            (refused_error, "there is no port 80 of pod p"),
            (none_error, "the stream has no valid port"),
        ] {
            assert_eq!(String::from_utf8(client.all(error).await).unwrap(), expected);
        }
        assert!(client.all(refused).await.is_empty());
    });
}

#[test]
fn a_stream_that_is_reset_ends_its_connection_and_no_other() {
    run(async {
        let (server, node) = serve(LONG).await;
        let mut client = forward(&server.forward("p".into(), vec![]).unwrap()).await;
        let [error, silent] = pair(&mut client, "9", "0").await;
        let reset = [&[0x80, 3, 0, 3, 0, 0, 0, 8][..], &silent.to_be_bytes(), &[0, 0, 0, 5]].concat();
        client.write(&reset).await;
        assert!(client.all(error).await.is_empty());
        soon(async {
            while node.killed.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
        let [_, data] = pair(&mut client, "7", "1").await;
        client.send(data, true, b"still here").await;
        assert_eq!(client.all(data).await, b"still here");
    });
}

#[test]
fn many_connections_come_and_go() {
    run(async {
        let (server, _) = serve(LONG).await;
        let mut client = forward(&server.forward("p".into(), vec![]).unwrap()).await;
        // More than the maximum number of open streams.
        for number in 0..700 {
            let [error, data] = pair(&mut client, "7", &number.to_string()).await;
            client.send(data, true, b"x").await;
            assert_eq!(client.all(data).await, b"x");
            assert!(client.all(error).await.is_empty());
        }
        // With one incomplete pair more than the limit, the server closes the connection.
        for number in 0..65 {
            client.open(&[("streamtype", "data"), ("port", "7"), ("requestid", &format!("half {number}"))]).await;
        }
        while client.read().await {}
    });
}

#[test]
fn a_container_goes_on_when_a_client_detaches() {
    run(async {
        let (server, _) = serve(LONG).await;
        let attach = |container: &str| Attach {
            container: container.into(),
            tty: false,
            stdin: true,
            stdout: true,
            stderr: false,
        };
        for container in ["c", "once"] {
            let url = server.attach(attach(container)).unwrap();
            assert!(url.contains("/attach/"));
            let mut client = Client::new(&url).await;
            let [error, stdin, stdout] = client.streams().await;
            client.send(stdin, false, b"hello").await;
            while client.came.get(&stdout).is_none_or(|came| came.bytes != b"hello") {
                assert!(client.read().await);
            }
            client.send(stdin, true, b"").await;
            assert_eq!(client.status(error).await["status"], "Success");
            assert!(client.came[&stdout].last);
        }
        // A URL is valid only for its own kind of request.
        let url = server.attach(attach("c")).unwrap().replace("/attach/", "/exec/");
        assert!(ask(&url, common::V4).await.0.starts_with("HTTP/1.1 404 "));
    });
}
