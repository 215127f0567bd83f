//! Tests the streams of a pod process, on the fake engine.

mod common;

use common::agent::RpcFault;
use common::{LIMIT, PodFixture, kind};
use nacelle_base::FailureKind;
use nacelle_pod::client::PodClient;
use nacelle_proto::common::{ResizeRequest, Stream};
use nacelle_proto::pod;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const GRACE: Duration = Duration::from_secs(60);

fn command(id: &str, script: &str) -> pod::ExecRequest {
    pod::ExecRequest { id: id.into(), args: vec![script.into()], tty: false, stdin: true }
}

async fn open(client: &PodClient, exec_id: &str, stream: Stream) -> UnixStream {
    let open = pod::StreamOpen { id: "c".into(), exec_id: exec_id.into(), stream: stream.into(), ..Default::default() };
    client.open_stream(open).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_has_streams_of_any_length_and_a_code() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.run(&client, "c", "hold").await;
    let exec = client.exec(command("c", "cat;err:done;exit:7")).await.unwrap();
    let mut stdin = open(&client, &exec.exec_id, Stream::Stdin).await;
    let mut stdout = open(&client, &exec.exec_id, Stream::Stdout).await;
    let mut stderr = open(&client, &exec.exec_id, Stream::Stderr).await;
    let sent: Vec<u8> = (0..2_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let writing = tokio::spawn({
        let sent = sent.clone();
        async move {
            stdin.write_all(&sent).await.unwrap();
            stdin.shutdown().await.unwrap();
            stdin
        }
    });
    let mut received = Vec::new();
    tokio::time::timeout(LIMIT, stdout.read_to_end(&mut received)).await.unwrap().unwrap();
    assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
    let mut errors = String::new();
    tokio::time::timeout(LIMIT, stderr.read_to_string(&mut errors)).await.unwrap().unwrap();
    assert_eq!(errors, "done");
    assert_eq!(exec.wait_for_exit().await.unwrap(), 7);
    writing.await.unwrap();
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_command_is_left_to_the_agent() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.run(&client, "c", "hold").await;
    let until_called = async |call: &str| {
        let deadline = Instant::now() + LIMIT;
        while fixture.agent.calls_of(call) == 0 {
            assert!(Instant::now() < deadline, "{call} was not called");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    drop(client.exec(command("c", "stubborn")).await.unwrap());
    until_called("abandon_exec").await;
    assert_eq!(fixture.agent.calls_of("signal 9"), 0);
    // If the agent does not take it, it is killed.
    fixture.agent.fault("abandon_exec", RpcFault::Refuse(tonic::Code::Internal, "no".to_owned()));
    drop(client.exec(command("c", "stubborn")).await.unwrap());
    until_called("signal 9").await;
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_in_the_guest_is_killed_when_its_client_disconnects() {
    let (fixture, client) = PodFixture::ready().await;
    // The container has exited; its image still has the programs.
    fixture.run(&client, "c", "exit:1").await;
    common::exited(&client, "c").await;
    let exec = client.start_guest_shell(command("c", "cat;exit:7")).await.unwrap();
    assert_eq!(fixture.agent.calls_of("start_guest_shell"), 1);
    let mut stdin = open(&client, &exec.exec_id, Stream::Stdin).await;
    let mut stdout = open(&client, &exec.exec_id, Stream::Stdout).await;
    stdin.write_all(b"typed").await.unwrap();
    assert_eq!(text(&mut stdout, 5).await, "typed");
    stdin.shutdown().await.unwrap();
    assert_eq!(exec.wait_for_exit().await.unwrap(), 7);
    drop(client.start_guest_shell(command("c", "stubborn")).await.unwrap());
    let deadline = Instant::now() + LIMIT;
    while fixture.agent.calls_of("signal 9") == 0 {
        assert!(Instant::now() < deadline, "it was not killed");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(fixture.agent.calls_of("abandon_exec"), 0);
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

async fn text(stream: &mut UnixStream, length: usize) -> String {
    let mut bytes = vec![0; length];
    tokio::time::timeout(LIMIT, stream.read_exact(&mut bytes)).await.unwrap().unwrap();
    String::from_utf8(bytes).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_output_of_a_container_reaches_all_clients_and_the_log() {
    let (fixture, client) = PodFixture::ready().await;
    for once in [false, true] {
        let request =
            pod::CreateContainerRequest { stdin: true, stdin_once: once, ..fixture.container("c", "cat;out:\n") };
        client.create_container(request).await.unwrap();
        fixture.set_log(&client, "c").await;
        client.start_container("c").await.unwrap();
        let mut first = open(&client, "", Stream::Stdout).await;
        let mut second = open(&client, "", Stream::Stdout).await;
        let mut errors = open(&client, "", Stream::Stderr).await;
        let mut input = open(&client, "", Stream::Stdin).await;
        input.write_all(b"hello").await.unwrap();
        assert_eq!(text(&mut first, 5).await, "hello");
        assert_eq!(text(&mut second, 5).await, "hello");
        // One client disconnects, the others stay.
        drop(first);
        input.write_all(b" you").await.unwrap();
        assert_eq!(text(&mut second, 4).await, " you");
        let opened = fixture.agent.opened.lock().unwrap().clone();
        let of_input = opened.iter().rfind(|open| open.stream() == Stream::Stdin).unwrap().clone();
        assert_eq!((of_input.exec_id.as_str(), of_input.keep_open), ("", !once));

        input.shutdown().await.unwrap();
        common::exited(&client, "c").await;
        let mut rest = Vec::new();
        tokio::time::timeout(LIMIT, second.read_to_end(&mut rest)).await.unwrap().unwrap();
        tokio::time::timeout(LIMIT, errors.read_to_end(&mut rest)).await.unwrap().unwrap();
        assert_eq!(rest, b"\n");
        assert!(fixture.log_text("c").ends_with("stdout F hello you\n"));
        client.remove_container("c").await.unwrap();
    }
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_port_of_the_pod_is_reported() {
    let (fixture, client) = PodFixture::ready().await;
    let port = |port| pod::StreamOpen { stream: Stream::Port.into(), port, ..Default::default() };
    let mut stream = client.open_stream(port(7)).await.unwrap();
    stream.write_all(b"echo").await.unwrap();
    assert_eq!(text(&mut stream, 4).await, "echo");
    stream.shutdown().await.unwrap();
    let mut rest = Vec::new();
    tokio::time::timeout(LIMIT, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(rest.is_empty());
    let refused = client.open_stream(port(8)).await.unwrap_err();
    assert_eq!(refused.to_string(), "the agent cannot connect to the port: Connection refused (os error 111)");
    client.stop(GRACE).await.unwrap();
    assert!(client.open_stream(port(7)).await.is_err());
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_does_not_run_has_no_streams() {
    let (fixture, client) = PodFixture::ready().await;
    client.create_container(fixture.container("c", "hold")).await.unwrap();
    assert_eq!(kind(client.exec(command("c", "cat")).await), FailureKind::Conflict);
    assert_eq!(kind(client.exec(command("x", "cat")).await), FailureKind::NotFound);
    let of = |id: &str, stream: Stream| {
        client.open_stream(pod::StreamOpen { id: id.into(), stream: stream.into(), ..Default::default() })
    };
    assert_eq!(kind(of("c", Stream::Stdout).await), FailureKind::Conflict);
    assert_eq!(kind(of("x", Stream::Stdout).await), FailureKind::NotFound);
    client.start_container("c").await.unwrap();
    assert_eq!(kind(of("c", Stream::Unspecified).await), FailureKind::Invalid);
    let size = ResizeRequest { id: "x".into(), exec_id: String::new(), columns: 1, rows: 1 };
    assert_eq!(kind(client.resize(size).await), FailureKind::NotFound);

    // A client with an invalid preamble is disconnected.
    let mut garbage = UnixStream::connect(fixture.dir.join("jail/stream.sock")).await.unwrap();
    garbage.write_all(&[0xff; 64]).await.unwrap();
    let mut answer = Vec::new();
    // The connection is reset or closed.
    let _ = tokio::time::timeout(LIMIT, garbage.read_to_end(&mut answer)).await.unwrap();
    assert!(answer.is_empty());
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}
