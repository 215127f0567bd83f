//! Tests exec over SPDY, from the HTTP request to the end of the connection, with a server and a minimal node.

mod common;

use common::{Client, V4, ask, command, serve, soon};
use nacelle_stream::spdy::frame::{self, Control};
use nacelle_stream::{Exec, TerminalSize};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const LONG: Duration = Duration::from_secs(3600);

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

#[test]
fn input_is_echoed_and_the_exit_code_is_reported() {
    run(async {
        let (server, _) = serve(LONG).await;
        let mut client = Client::new(&server.exec(command("cat")).unwrap()).await;
        let [error, stdin, stdout] = client.streams().await;
        let sent: Vec<u8> = (0..100_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        client.send(stdin, false, &sent[..7]).await;
        client.send(stdin, false, &sent[7..]).await;
        client.send(stdin, true, b"").await;
        assert!(client.all(stdout).await == sent);
        assert_eq!(client.status(error).await["status"], "Success");
        assert_eq!(client.replies, [error, stdin, stdout]);
        // The server sends window updates for the stream and for the session.
        for id in [0, stdin] {
            assert!(client.controls.iter().any(|control| matches!(control, Control::Window(known, _) if *known == id)));
        }

        for (words, reason) in [("exit 5", "NonZeroExitCode"), ("missing", "InternalError")] {
            let mut client = Client::new(&server.exec(command(words)).unwrap()).await;
            let [error, ..] = client.streams().await;
            let status = client.status(error).await;
            assert_eq!(status["reason"], reason);
            let cause = if words == "missing" { "there is no missing" } else { "5" };
            assert_eq!(status["details"]["causes"][0]["message"], cause);
        }
    });
}

#[test]
fn a_url_is_good_once_and_for_spdy_only() {
    run(async {
        let (server, node) = serve(LONG).await;
        let url = server.exec(command("hold")).unwrap();
        let client = Client::new(&url).await;
        assert!(ask(&url, V4).await.0.starts_with("HTTP/1.1 404 "));
        drop(client);
        let url = server.exec(command("cat")).unwrap();
        for headers in ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"] {
            let answer = ask(&url, headers).await.0;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{headers}: {answer}");
        }
        // What is no upgrade leaves the URL valid; a failed negotiation does not, and names what would have been accepted.
        let wrong = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v9.k8s.io\r\n";
        let (answer, mut connection) = ask(&url, wrong).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        for accepted in ["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"] {
            let header = format!("x-accepted-stream-protocol-versions: {accepted}\r\n");
            assert!(answer.to_lowercase().contains(&header), "{answer}");
        }
        let mut why = String::new();
        soon(connection.read_to_string(&mut why)).await.unwrap();
        let expected = "client supports [v9.k8s.io], server accepts [v4.channel.k8s.io v3.channel.k8s.io v2.channel.k8s.io channel.k8s.io]";
        assert_eq!(why, format!("unable to upgrade: unable to negotiate protocol: {expected}"));
        assert!(ask(&url, V4).await.0.starts_with("HTTP/1.1 404 "), "it was used");
        let base = url.rsplit_once('/').unwrap().0;
        assert!(ask(&format!("{base}/"), V4).await.0.starts_with("HTTP/1.1 404 "));
        assert!(node.killed.lock().unwrap().is_empty(), "nothing was started");
    });
}

#[test]
fn connections_without_a_token_do_not_block_clients() {
    run(async {
        let (server, _) = serve(LONG).await;
        let url = server.exec(command("cat")).unwrap();
        let host = url.strip_prefix("http://").unwrap().split_once('/').unwrap().0.to_owned();
        // This process has both ends of all connections.
        let most = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1;
        setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
        // More than there are places for streams: some say nothing, some send a request that never ends.
        let mut idle = Vec::new();
        for number in 0..1100 {
            let mut connection = TcpStream::connect(&host).await.unwrap();
            if number % 2 == 1 {
                connection.write_all(b"GET /exec/x HTTP/1.1\r\nA: ").await.unwrap();
            }
            idle.push(connection);
        }
        let mut client = soon(Client::new(&url)).await;
        client.streams().await;
        // The oldest have been closed to make room; the newest may still send a request.
        assert_eq!(soon(idle[0].read(&mut [0])).await.unwrap(), 0);
        let mut newest = idle.pop().unwrap();
        let waits = tokio::time::timeout(Duration::from_millis(1), newest.read(&mut [0])).await;
        assert!(waits.is_err(), "the oldest connection was closed by its own timeout, with all others");
    });
}

#[test]
fn a_connection_has_one_request() {
    run(async {
        let (server, _) = serve(LONG).await;
        let url = server.exec(command("cat")).unwrap();
        let host = url.strip_prefix("http://").unwrap().split_once('/').unwrap().0.to_owned();
        let mut connection = TcpStream::connect(&host).await.unwrap();
        connection.write_all(format!("GET /exec/wrong HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        soon(connection.read_to_string(&mut answer)).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 404 ") && answer.contains("connection: close"), "{answer}");
    });
}

#[test]
fn a_client_that_goes_takes_its_command_with_it() {
    run(async {
        let (server, node) = serve(LONG).await;
        let mut client = Client::new(&server.exec(command("hold")).unwrap()).await;
        let [_, _, stdout] = client.streams().await;
        while !client.came.contains_key(&stdout) {
            assert!(client.read().await);
        }
        // Bytes that no process reads are in transit.
        client.send(3, false, &[b'x'; 1000]).await;
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
fn an_idle_client_is_ended() {
    run(async {
        let (server, _) = serve(Duration::from_millis(100)).await;
        let mut client = Client::new(&server.exec(command("hold")).unwrap()).await;
        while client.read().await {}
    });
}

#[test]
fn a_client_that_speaks_of_windows_is_sent_no_more_than_they_hold() {
    run(async {
        let (server, _) = serve(LONG).await;
        let mut client = Client::new(&server.exec(command("spew 100000")).unwrap()).await;
        // SETTINGS: initial window 1000.
        client.write(&[0x80, 3, 0, 4, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 3, 0xe8]).await;
        let [error, _, stdout] = client.streams().await;
        let mut allowed = 1000;
        while !client.came.get(&stdout).is_some_and(|came| came.last) {
            assert!(client.read().await);
            let came = client.came.get(&stdout).map_or(0, |came| came.bytes.len());
            assert!(came <= allowed, "{came} bytes, {allowed} allowed");
            if came == allowed && allowed < 100_000 {
                // The ping is answered: no more data were in transit.
                client.write(&frame::ping(9)).await;
                client.controls.clear();
                while !client.controls.contains(&Control::Ping(9)) {
                    assert!(client.read().await);
                }
                assert_eq!(client.came[&stdout].bytes.len(), allowed);
                client.write(&frame::window(stdout, 33_000)).await;
                allowed += 33_000;
            }
        }
        assert_eq!(client.came[&stdout].bytes.len(), 100_000);
        assert_eq!(client.status(error).await["status"], "Success");
    });
}

#[test]
fn a_terminals_sizes_arrive() {
    run(async {
        let (server, node) = serve(LONG).await;
        let mut client = Client::new(&server.exec(Exec { tty: true, ..command("cat") }).unwrap()).await;
        let [error, stdin, _] = client.streams().await;
        let resize = client.open(&[("streamtype", "resize")]).await;
        client.send(resize, false, b"{\"Width\":80,\"Height\":24}\n{\"Wid").await;
        client.send(resize, false, b"th\":81,\"Height\":25}\n").await;
        soon(async {
            while node.sizes.lock().unwrap().len() < 2 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
        assert_eq!(node.sizes.lock().unwrap()[1], TerminalSize { columns: 81, rows: 25 });
        client.send(stdin, true, b"").await;
        assert_eq!(client.status(error).await["status"], "Success");
    });
}

#[test]
fn what_is_no_spdy_ends_the_connection() {
    run(async {
        let (server, _) = serve(LONG).await;
        let wrong: [&[u8]; 5] = [
            // Another protocol version.
            &[0x80, 2, 0, 1, 0, 0, 0, 0],
            // A control frame that is too long.
            &[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff],
            // A stream with an even number; one whose headers cannot be decompressed.
            &[0x80, 3, 0, 1, 0, 0, 0, 10, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0],
            &[0x80, 3, 0, 1, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xff, 0xff],
            // A window update that is too short.
            &[0x80, 3, 0, 9, 0, 0, 0, 4, 0, 0, 0, 1],
        ];
        for bytes in wrong {
            let mut client = Client::new(&server.exec(command("cat")).unwrap()).await;
            // Bytes of an unknown stream are discarded.
            client.send(0x47, false, b"unread").await;
            client.write(bytes).await;
            while client.read().await {}
        }
    });
}

#[test]
fn more_streams_than_a_command_has_are_refused() {
    run(async {
        let (server, _) = serve(LONG).await;
        let mut client = Client::new(&server.exec(command("hold")).unwrap()).await;
        client.streams().await;
        let mut refused = 0;
        for _ in 0..64 {
            client.open(&[("streamtype", "stdin")]).await;
        }
        // Also those that arrive before the command has started.
        while refused < 64 {
            assert!(client.read().await);
            refused = client.controls.iter().filter(|control| matches!(control, Control::Reset(_))).count();
        }
    });
}
