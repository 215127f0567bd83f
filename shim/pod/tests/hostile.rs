//! Tests a pod process with guests that die, hang, send false values or reject requests.

mod common;

use common::agent::{BootFault, RpcFault};
use common::{PodFixture, exited, kind, network, until};
use nacelle_base::{Classify, FailureKind};
use nacelle_engine::fake::FailureScript;
use nacelle_pod::client::ClientError;
use nacelle_pod::record::{ContainerPhase, Phase};
use nacelle_proto::common::{ContainerUsage, Usage};
use nacelle_proto::pod;
use std::time::{Duration, Instant};
use tonic::Code;

const GRACE: Duration = Duration::from_secs(60);

/// Sends every request to a pod whose VM is gone.
async fn check_requests_after_the_end(fixture: PodFixture, client: nacelle_pod::client::PodClient) {
    let state = until(&client, "the pod stops", |state| state.phase() == pod::Phase::Stopped).await;
    assert!(!state.failure.is_empty());
    // Each request has the cause of the end, whatever it asks for.
    let late = client.create_container(fixture.container("late", "hold")).await.unwrap_err();
    let configured = client.configure(network()).await.unwrap_err();
    assert!(late.to_string().contains(&state.failure), "{late}: {}", state.failure);
    assert_eq!((late.kind(), late.to_string()), (configured.kind(), configured.to_string()));
    for container in &state.containers {
        client.stop_container(&container.id, GRACE).await.unwrap();
        client.remove_container(&container.id).await.unwrap();
    }
    client.stop(GRACE).await.unwrap();
    let record = fixture.end().await;
    assert_eq!((record.phase, record.containers.len()), (Phase::Stopped, 0));
    assert_eq!(record.failure, state.failure);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_are_lost_with_the_vm() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.run(&client, "done", "exit:0").await;
    exited(&client, "done").await;
    fixture.run(&client, "running", "hold").await;
    client.create_container(fixture.container("created", "hold")).await.unwrap();
    fixture.agent.die();
    let state = until(&client, "the pod stops", |state| state.phase() == pod::Phase::Stopped).await;
    assert!(state.failure.contains("panicked") && state.failure.contains("on request"), "{}", state.failure);
    let codes: Vec<(u32, bool)> =
        state.containers.iter().map(|c| (c.exit_code, c.message.contains("on request"))).collect();
    assert_eq!(codes, [(0, false), (255, true), (255, true)]);
    assert!(fixture.record().containers.iter().all(|c| c.phase == ContainerPhase::Exited));
    check_requests_after_the_end(fixture, client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_vm_may_die_during_any_request() {
    for method in ["attach", "create", "start", "wait", "exec", "signal", "remove"] {
        let (fixture, client) = PodFixture::ready().await;
        fixture.agent.fault(method, RpcFault::Die);
        let created = client.create_container(fixture.container("a", "hold")).await;
        if created.is_ok() && client.start_container("a").await.is_ok() {
            if method == "exec" {
                assert!(client.exec_sync("a", vec!["out:x".into()], None).await.is_err(), "{method}");
            } else if method == "signal" {
                // The container exits, or the signal did not reach it.
                let _ = client.stop_container("a", GRACE).await;
            } else if method == "remove" {
                // A container that was lost can be removed.
                client.remove_container("a").await.unwrap();
            }
        }
        check_requests_after_the_end(fixture, client).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_a_hanging_agent_time_out() {
    for method in ["attach", "create", "start", "remove"] {
        let (fixture, client) = PodFixture::ready_with(|spec| spec.timeouts.call_ms = 100).await;
        // Connects first: an agent that does not listen yet is unavailable, not slow.
        let mut early = fixture.container("early", "hold");
        early.image_key = "early".into();
        retry_until_success(|| client.create_container(early.clone())).await;
        fixture.agent.fault(method, RpcFault::Hang);
        let create = || client.create_container(fixture.container("a", "hold"));
        match method {
            "attach" | "create" => assert_eq!(kind(create().await), FailureKind::Timeout, "{method}"),
            "start" => {
                retry_until_success(create).await;
                assert_eq!(kind(client.start_container("a").await), FailureKind::Timeout);
            }
            _ => {
                retry_until_success(create).await;
                assert_eq!(kind(client.remove_container("a").await), FailureKind::Timeout);
                fixture.agent.faults.lock().unwrap().clear();
                retry_until_success(|| client.remove_container("a")).await;
            }
        }
        client.stop(Duration::from_millis(10)).await.unwrap();
        fixture.end().await;
    }
}

/// Repeats a request until it succeeds: on a busy node a good agent, too, may miss a short deadline.
async fn retry_until_success<T, F: Future<Output = Result<T, ClientError>>>(request: impl Fn() -> F) -> T {
    let deadline = Instant::now() + common::LIMIT;
    loop {
        match request().await {
            Ok(answer) => return answer,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn false_missing_and_oversized_statistics_are_handled() {
    let (fixture, client) = PodFixture::ready_with(|spec| spec.timeouts.call_ms = 1000).await;
    retry_until_success(|| client.create_container(fixture.container("a", "hold"))).await;
    let usage = Usage { memory_bytes: u64::MAX, cpu_nanos: 7, ..Default::default() };
    let container = |id: &str| ContainerUsage { id: id.into(), usage: Some(usage), ..Default::default() };
    fixture.agent.stats.lock().unwrap().containers = ["a", "a", "unknown"].map(container).into();
    let figures = retry_until_success(|| client.stats()).await;
    assert_eq!(figures.containers.len(), 1);
    let usage = figures.containers[0].usage.unwrap();
    assert_eq!((usage.cpu_nanos, usage.memory_bytes), (7, 576 << 20), "no more than the memory of the VM");
    assert_eq!(figures.pod, None);

    fixture.agent.stats.lock().unwrap().containers = vec![Default::default(); 200_000];
    assert!(client.stats().await.is_err());
    fixture.agent.fault("stats", RpcFault::Hang);
    assert_eq!(kind(client.stats().await), FailureKind::Timeout);
    fixture.agent.fault("stats", RpcFault::Die);
    assert!(client.stats().await.is_err());
    check_requests_after_the_end(fixture, client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_agent_are_passed_on_and_shortened() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.agent.fault("create", RpcFault::Refuse(Code::InvalidArgument, "no such user\u{7}".repeat(200)));
    let error = client.create_container(fixture.container("a", "hold")).await.unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("the agent cannot create the container: no such user") && text.len() < 1200, "{text}");
    assert!(!text.contains('\u{7}'));
    assert_eq!(error.kind(), FailureKind::Invalid);
    assert!(client.state().await.unwrap().containers.is_empty());

    fixture.agent.faults.lock().unwrap().clear();
    fixture.agent.fault("start", RpcFault::Refuse(Code::NotFound, "no such program".into()));
    client.create_container(fixture.container("a", "hold")).await.unwrap();
    assert_eq!(kind(client.start_container("a").await), FailureKind::NotFound);
    assert_eq!(fixture.agent.calls_of("signal 9"), 1, "it may run in spite of the error");
    let end = exited(&client, "a").await;
    assert_eq!(end.exit_code, 128);
    assert!(end.message.contains("no such program"));
    client.remove_container("a").await.unwrap();

    // A creation whose reply was lost: the second attempt succeeds.
    fixture.agent.faults.lock().unwrap().clear();
    fixture.run(&client, "a", "exit:5").await;
    assert_eq!(exited(&client, "a").await.exit_code, 5);
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_the_agent_does_not_know_is_lost() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.agent.fault("wait", RpcFault::Refuse(Code::NotFound, "who?".into()));
    fixture.run(&client, "a", "hold").await;
    let end = exited(&client, "a").await;
    assert_eq!(end.exit_code, 255);
    assert!(end.message.contains("who?"));
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_boots_are_reported_with_their_reason() {
    let frame = |bytes: &[u8]| [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
    let hello_of_9 = frame(&[8, 9]);
    let table = [
        (BootFault::Silent, FailureKind::Timeout, ""),
        (BootFault::Die, FailureKind::Unavailable, "on request"),
        (BootFault::Hello(vec![0xff; 16]), FailureKind::Internal, "hello"),
        (BootFault::Hello(frame(&[0xff; 9])), FailureKind::Internal, "hello"),
        (BootFault::Hello(hello_of_9), FailureKind::Internal, "protocol 9"),
        (BootFault::Report("no such\ninterface".into()), FailureKind::Internal, "no such interface"),
        (BootFault::RawReport(vec![0xff; 16]), FailureKind::Internal, "report"),
    ];
    for (boot, expected, text) in table {
        let mut fixture = PodFixture::new();
        *fixture.agent.boot.lock().unwrap() = boot.clone();
        let quick = boot == BootFault::Silent;
        let client = fixture
            .boot(|spec| spec.timeouts.boot_ms = if quick { 200 } else { 60_000 }, FailureScript::default())
            .await;
        let error = client.configure(network()).await.unwrap_err();
        // A request that comes late has the same kind as one that waits.
        let got = error.kind();
        assert_eq!(got, expected, "{boot:?}: {error}");
        let state = until(&client, "the pod stops", |state| state.phase() == pod::Phase::Stopped).await;
        assert!(state.failure.contains(text), "{boot:?}: {}", state.failure);
        check_requests_after_the_end(fixture, client).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_of_the_engine_is_reported() {
    let mut fixture = PodFixture::new();
    let client = fixture.boot(|_| {}, FailureScript { fail_start: true, ..FailureScript::default() }).await;
    assert!(client.configure(network()).await.is_err());
    let state = until(&client, "the pod stops", |state| state.phase() == pod::Phase::Stopped).await;
    assert!(state.failure.contains("the engine failed"), "{}", state.failure);
    check_requests_after_the_end(fixture, client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_refuses_connections_fails_requests_only() {
    let mut fixture = PodFixture::new();
    let script = FailureScript { refuse_connections: true, ..FailureScript::default() };
    let quick = |spec: &mut nacelle_pod::spec::PodSpec| {
        spec.timeouts.call_ms = 100;
        spec.timeouts.shutdown_ms = 100;
    };
    let client = fixture.boot(quick, script).await;
    client.configure(network()).await.unwrap();
    assert!(client.create_container(fixture.container("a", "hold")).await.is_err());
    assert_eq!(client.state().await.unwrap().phase(), pod::Phase::Ready);
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}
