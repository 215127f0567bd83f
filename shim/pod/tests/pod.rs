//! Tests a pod process with a well-behaved guest, through its socket, on the fake engine.

mod common;

use common::agent::RpcFault;
use common::{PodFixture, eventually, exited, kind, network, until};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_engine::fake::FailureScript;
use nacelle_pod::record::{ContainerPhase, Phase};
use nacelle_proto::common::{Dns, Interface, Limit, UpdateContainerRequest};
use nacelle_proto::pod;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

const GRACE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_lives_and_leaves_its_log_and_exit_code() {
    let (fixture, client) = PodFixture::ready().await;
    let config = fixture.agent.config.lock().unwrap().clone().unwrap();
    assert_eq!((config.hostname.as_str(), config.scratch_disk), ("pod-name", 1));
    assert_eq!(std::fs::metadata(fixture.dir.join("jail/pod.sock")).unwrap().permissions().mode() & 0o777, 0o600);

    let made = client.create_container(fixture.container("a", "out:one\ntwo;err:oops\n;exit:3")).await.unwrap();
    assert_eq!((made.uid, made.gid, made.supplemental_groups), (1, 2, vec![3]));
    let state = client.state().await.unwrap();
    assert_eq!((state.phase(), state.kernel_release.as_str()), (pod::Phase::Ready, "6.12-fake"));
    assert_eq!(state.containers[0].phase(), pod::ContainerPhase::Created);
    fixture.set_log(&client, "a").await;
    client.start_container("a").await.unwrap();
    let end = exited(&client, "a").await;
    assert_eq!((end.exit_code, end.oom_killed, end.message.as_str()), (3, false, ""));
    assert!(end.created_at > 0 && end.started_at >= end.created_at && end.finished_at >= end.started_at);
    let mut lines: Vec<String> = fixture.log_text("a").lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["stderr F oops", "stdout F one", "stdout P two"]);
    assert_eq!(fixture.record().containers[0].exit_code, 3);

    client.stop(GRACE).await.unwrap();
    client_is_gone(&client).await;
    let record = fixture.end().await;
    assert_eq!((record.phase, record.failure.as_str()), (Phase::Stopped, ""));
    assert_eq!((record.containers[0].phase, record.containers[0].exit_code), (ContainerPhase::Exited, 3));
}

/// Checks that the socket does not answer any more, or reports that the process ends.
async fn client_is_gone(client: &nacelle_pod::client::PodClient) {
    let deadline = std::time::Instant::now() + common::LIMIT;
    while client.state().await.is_ok() {
        assert!(std::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_verb_can_be_said_twice() {
    let (fixture, client) = PodFixture::ready().await;
    let answer = client.configure(network()).await.unwrap();
    assert_eq!(client.configure(network()).await.unwrap(), answer);
    assert_eq!(answer.agent_version, "fake");

    let request = fixture.container("a", "hold");
    let (first, second) =
        tokio::join!(client.create_container(request.clone()), client.create_container(request.clone()));
    assert_eq!(first.unwrap(), second.unwrap());
    client.create_container(request).await.unwrap();
    let (first, second) = tokio::join!(client.start_container("a"), client.start_container("a"));
    first.and(second).unwrap();
    client.start_container("a").await.unwrap();
    fixture.set_log(&client, "a").await;
    fixture.set_log(&client, "a").await;
    let update = |id: &str, file: &str| UpdateContainerRequest {
        id: id.into(),
        limits: vec![Limit { file: file.into(), value: "why".into() }],
        oom_score_adj: None,
        processors: vec![],
    };
    client.set_processors(4).await.unwrap();
    assert_eq!(kind(client.set_processors(3).await), FailureKind::Conflict);
    for count in [0, 5, u32::MAX] {
        assert_eq!(kind(client.set_processors(count).await), FailureKind::Invalid);
    }
    for (requested, used) in [(512 << 20, 512 << 20), (2 << 20, 128 << 20), (0, 0)] {
        assert_eq!(client.set_memory(requested).await.unwrap(), used);
    }
    assert_eq!(kind(client.set_memory(384 << 20).await), FailureKind::Conflict);
    for bytes in [1 << 20, (512 << 20) + 1, u64::MAX] {
        assert_eq!(kind(client.set_memory(bytes).await), FailureKind::Invalid);
    }
    client.update_container(update("a", "cpu.max")).await.unwrap();
    assert_eq!(kind(client.update_container(update("none", "cpu.max")).await), FailureKind::NotFound);
    let refused = client.update_container(update("a", "refuse.me")).await.unwrap_err();
    assert_eq!(refused.kind(), FailureKind::Conflict);
    assert!(Chain(&refused).to_string().contains("why"), "{refused}");
    let (first, second) = tokio::join!(client.stop_container("a", GRACE), client.stop_container("a", GRACE));
    first.and(second).unwrap();
    client.stop_container("a", GRACE).await.unwrap();
    assert_eq!(kind(client.start_container("a").await), FailureKind::Conflict);
    let (first, second) = tokio::join!(client.remove_container("a"), client.remove_container("a"));
    first.and(second).unwrap();
    client.remove_container("a").await.unwrap();
    client.stop_container("a", GRACE).await.unwrap();
    for (method, calls) in [("create", 1), ("start", 1), ("remove", 1), ("attach", 1)] {
        assert_eq!(fixture.agent.calls_of(method), calls, "{method}");
    }
    let (first, second) = tokio::join!(client.stop(GRACE), client.stop(GRACE));
    first.and(second).unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offered_device_is_only_for_its_container() {
    let (fixture, client) = PodFixture::ready().await;
    let request = |id: &str| {
        let mut request = fixture.container(id, "hold");
        request.devices = vec![pod::BlockDevice {
            key: "8:0".into(),
            path: "/dev/of-the-node".into(),
            writable: true,
            container_path: "/dev/data".into(),
            access: "rw".into(),
            ..Default::default()
        }];
        request
    };
    let refused = |error: &nacelle_pod::client::ClientError, kind: FailureKind, words: &str| {
        assert_eq!(error.kind(), kind, "{error}");
        let text = Chain(error).to_string();
        assert!(text.contains("/dev/of-the-node") && text.contains(words), "{text}");
    };
    let error = client.create_container(request("a")).await.unwrap_err();
    refused(&error, FailureKind::Conflict, "not offered");

    // Offers that do not match: for another container, withdrawn, at another path.
    let file = || std::os::fd::OwnedFd::from(tempfile::tempfile().unwrap());
    let other = client.offer_device("b", "/dev/data", file()).await.unwrap();
    drop(client.offer_device("a", "/dev/data", file()).await.unwrap());
    let elsewhere = client.offer_device("a", "/dev/other", file()).await.unwrap();
    let deadline = std::time::Instant::now() + common::LIMIT;
    while client.create_container(request("a")).await.unwrap_err().kind() != FailureKind::Conflict {
        assert!(std::time::Instant::now() < deadline, "the offer is withdrawn");
    }

    // The type of an offered file is checked.
    let offer = client.offer_device("a", "/dev/data", file()).await.unwrap();
    let error = client.create_container(request("a")).await.unwrap_err();
    refused(&error, FailureKind::Invalid, "no block device");
    assert_eq!((fixture.agent.calls_of("create"), fixture.agent.calls_of("attach device")), (0, 0));
    drop((offer, other, elsewhere));
    fixture.run(&client, "a", "hold").await;
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_signals_waits_and_kills() {
    let (fixture, client) = PodFixture::ready().await;
    let mut request = fixture.container("polite", "hold");
    request.stop_signal = 2;
    client.create_container(request).await.unwrap();
    client.start_container("polite").await.unwrap();
    client.stop_container("polite", GRACE).await.unwrap();
    assert_eq!(exited(&client, "polite").await.exit_code, 130);

    fixture.run(&client, "stubborn", "stubborn").await;
    client.stop_container("stubborn", Duration::from_millis(50)).await.unwrap();
    assert_eq!(exited(&client, "stubborn").await.exit_code, 137);
    assert_eq!(fixture.agent.calls_of("signal 15"), 1);

    fixture.run(&client, "now", "hold").await;
    client.stop_container("now", Duration::ZERO).await.unwrap();
    assert_eq!(exited(&client, "now").await.exit_code, 137);

    fixture.run(&client, "left", "stubborn").await;
    client.stop(Duration::from_millis(50)).await.unwrap();
    let record = fixture.end().await;
    assert_eq!(record.containers.last().unwrap().exit_code, 137);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_signal_that_could_not_be_sent_is_sent_again() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.run(&client, "a", "hold").await;
    fixture.agent.fault("signal", RpcFault::Refuse(tonic::Code::Unavailable, "later".into()));
    client.stop_container("a", GRACE).await.unwrap_err();
    fixture.agent.faults.lock().unwrap().clear();
    client.stop_container("a", GRACE).await.unwrap();
    assert_eq!(exited(&client, "a").await.exit_code, 143);
    assert_eq!(fixture.agent.calls_of("signal 15"), 1);
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_could_not_be_removed_runs_until_its_end_is_reported() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.run(&client, "a", "hold").await;
    fixture.agent.fault("remove", RpcFault::Refuse(tonic::Code::FailedPrecondition, "it cannot be killed".into()));
    let phase = async || {
        let state = client.state().await.unwrap();
        state.containers.iter().find(|container| container.id == "a").unwrap().phase()
    };
    client.remove_container("a").await.unwrap_err();
    assert_eq!(phase().await, pod::ContainerPhase::Running);
    client.stop_container("a", GRACE).await.unwrap();
    assert_eq!(exited(&client, "a").await.exit_code, 143);
    client.remove_container("a").await.unwrap_err();
    assert_eq!(phase().await, pod::ContainerPhase::Exited);
    fixture.agent.faults.lock().unwrap().clear();
    client.remove_container("a").await.unwrap();

    // The removal ends the container, and fails after that.
    fixture.run(&client, "b", "stubborn").await;
    let fault = RpcFault::Refuse(tonic::Code::FailedPrecondition, "its cgroup is busy".into());
    fixture.agent.fault("remove what is left", fault);
    client.remove_container("b").await.unwrap_err();
    assert_eq!(exited(&client, "b").await.exit_code, 137);
    client.remove_container("b").await.unwrap_err();
    fixture.agent.faults.lock().unwrap().clear();
    client.remove_container("b").await.unwrap();
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exec_sync_returns_output_and_code_and_is_killed_at_its_timeout() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.run(&client, "a", "hold").await;
    let args = |script: &str| vec![script.to_owned()];
    let done = client.exec_sync("a", args("out:hi;err:ho;exit:4"), Some(GRACE)).await.unwrap();
    assert_eq!((done.stdout.as_slice(), done.stderr.as_slice(), done.exit_code), (&b"hi"[..], &b"ho"[..], 4));
    let done = client.exec_sync("a", args("big:20000000"), None).await.unwrap();
    assert_eq!(done.stdout.len(), 16 << 20);

    let late = client.exec_sync("a", args("stubborn"), Some(Duration::from_millis(20))).await;
    assert_eq!(kind(late), FailureKind::Timeout);
    eventually("the command is killed", || fixture.agent.calls_of("signal 9") > 0).await;
    assert_eq!(kind(client.exec_sync("none", args("x"), None).await), FailureKind::NotFound);
    assert_eq!(kind(client.exec_sync("a", vec![], None).await), FailureKind::Invalid);
    client.create_container(fixture.container("b", "hold")).await.unwrap();
    assert_eq!(kind(client.exec_sync("b", args("x"), None).await), FailureKind::Conflict);
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_is_attached_once_and_detached_after_its_last_container() {
    let (fixture, client) = PodFixture::ready().await;
    let other = |id: &str, key: &str| {
        let mut request = fixture.container(id, "hold");
        request.image_key = key.to_owned();
        request
    };
    let (a, b) = tokio::join!(client.create_container(other("a", "x")), client.create_container(other("b", "x")));
    a.and(b).unwrap();
    client.create_container(other("c", "y")).await.unwrap();
    assert_eq!(fixture.agent.images.lock().unwrap().len(), 2);
    assert_eq!(fixture.agent.calls_of("attach"), 2);
    client.remove_container("a").await.unwrap();
    client.remove_container("c").await.unwrap();
    eventually("the unused image is detached", || fixture.agent.images.lock().unwrap().len() == 1).await;
    assert_eq!(fixture.agent.images.lock().unwrap().keys().copied().collect::<Vec<_>>(), [1]);

    let mut empty = other("d", "z");
    empty.image.clear();
    assert_eq!(kind(client.create_container(empty).await), FailureKind::Invalid);
    let mut missing = other("d", "z");
    missing.image[0].path = fixture.root.path().join("none").to_str().unwrap().into();
    assert!(client.create_container(missing).await.is_err());
    client.create_container(other("d", "z")).await.unwrap();
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_volumes_share_images_with_containers() {
    let (fixture, client) = PodFixture::ready().await;
    let with = |id: &str, keys: &[&str]| {
        let mut request = fixture.container(id, "hold");
        let volume = |key: &&str| pod::ImageVolume {
            image_key: (*key).to_owned(),
            image: request.image.clone(),
            sub_path: "etc".into(),
            container_path: format!("/{key}"),
            noexec: false,
        };
        request.volumes = keys.iter().map(volume).collect();
        request
    };
    let images = || fixture.agent.images.lock().unwrap().keys().copied().collect::<Vec<_>>();
    let settled = async |wanted: &[u32]| {
        eventually(&format!("the images are {wanted:?}"), || images() == wanted).await;
    };
    // The container's own image is called "image": "a" mounts it as a volume too, and both containers mount "x".
    let (a, b) = tokio::join!(
        client.create_container(with("a", &["image", "x", "y"])),
        client.create_container(with("b", &["x"]))
    );
    a.and(b).unwrap();
    assert_eq!((images(), fixture.agent.calls_of("attach")), (vec![1, 2, 3], 3));
    let volumes = fixture.agent.volumes.lock().unwrap().clone();
    let own = volumes.iter().find(|volume| volume.container_path == "/image").unwrap();
    assert_eq!((own.partition, own.sub_path.as_str()), (1, "etc"));
    client.remove_container("a").await.unwrap();
    settled(&[1, 2]).await;

    // If one image cannot be placed, the container uses none, not even those before it.
    let mut bad = with("c", &["new", "image", "bad"]);
    bad.volumes[2].image.clear();
    assert_eq!(kind(client.create_container(bad).await), FailureKind::Invalid);
    // If one image cannot be attached, nothing is leaked.
    let mut missing = with("c", &["new", "missing", "newer"]);
    missing.volumes[1].image[0].path = fixture.root.path().join("none").to_str().unwrap().into();
    assert!(client.create_container(missing).await.is_err());
    settled(&[1, 2]).await;
    client.create_container(with("c", &["missing", "new"])).await.unwrap();
    assert_eq!(images().len(), 4);
    client.remove_container("b").await.unwrap();
    client.remove_container("c").await.unwrap();
    settled(&[]).await;
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_requests_change_nothing() {
    let (fixture, client) = PodFixture::ready().await;
    for id in ["", "a/b", ".."] {
        let mut request = fixture.container("a", "hold");
        request.id = id.to_owned();
        assert_eq!(kind(client.create_container(request).await), FailureKind::Invalid, "{id:?}");
    }
    let by_path = pod::CreateContainerRequest { images_by_path: true, ..fixture.container("a", "hold") };
    assert_eq!(kind(client.create_container(by_path).await), FailureKind::Invalid);
    assert_eq!(kind(client.start_container("none").await), FailureKind::NotFound);
    let log = tempfile::tempfile().unwrap();
    assert_eq!(kind(client.set_log("none", log).await), FailureKind::NotFound);
    let other = pod::ConfigureRequest { dns: Some(Dns::default()), ..network() };
    assert_eq!(kind(client.configure(other).await), FailureKind::Conflict);
    let interface = Interface { name: "eth0".into(), mac: vec![2; 6], mtu: 1500, ..Interface::default() };
    let network = pod::ConfigureRequest { interfaces: vec![interface], ..network() };
    assert_eq!(kind(client.configure(network).await), FailureKind::Invalid);
    assert!(client.state().await.unwrap().containers.is_empty());
    assert_eq!(fixture.agent.calls_of("create"), 0);
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_is_rotated_while_it_is_written() {
    let (fixture, client) = PodFixture::ready().await;
    fixture.run(&client, "a", "out:before\n;hold;out:after\n").await;
    eventually("the first line is in the log", || !fixture.log_text("a").is_empty()).await;
    let old = fixture.log("a").with_extension("old");
    std::fs::rename(fixture.log("a"), &old).unwrap();
    fixture.set_log(&client, "a").await;
    client.stop_container("a", GRACE).await.unwrap();
    assert_eq!(fixture.log_text("a"), "stdout F after\n");
    assert!(std::fs::read_to_string(old).unwrap().ends_with("stdout F before\n"));
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_agent_does_not_block_other_requests() {
    let (fixture, client) = PodFixture::ready_with(|spec| spec.timeouts.shutdown_ms = 100).await;
    fixture.agent.fault("create", RpcFault::Hang);
    fixture.agent.fault("shutdown", RpcFault::Hang);
    let (request, second_client) = (fixture.container("a", "hold"), client.clone());
    let create = tokio::spawn(async move { second_client.create_container(request).await });
    until(&client, "the pod is ready", |state| state.phase() == pod::Phase::Ready).await;
    let mut watch = client.watch().await.unwrap();
    assert_eq!(watch.message().await.unwrap().unwrap().phase(), pod::Phase::Ready);
    // The VM is killed when the agent does not shut it down; the creation fails with it.
    let stop = client.stop(Duration::ZERO);
    stop.await.unwrap();
    assert!(create.await.unwrap().is_err());
    let mut last = pod::Phase::Ready;
    while let Ok(Some(state)) = watch.message().await {
        last = state.phase();
    }
    assert_eq!(last, pod::Phase::Stopped);
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_can_be_stopped_before_it_is_ready() {
    let mut fixture = PodFixture::new();
    let client = fixture.boot(|_| {}, FailureScript::default()).await;
    let configuring = {
        // The agent waits for a network that never arrives.
        let client = client.clone();
        *fixture.agent.boot.lock().unwrap() = common::agent::BootFault::Silent;
        tokio::spawn(async move { client.configure(network()).await })
    };
    client.stop(GRACE).await.unwrap();
    // The request came too late, or failed because the pod stops.
    let _ = configuring.await.unwrap();
    assert_eq!(fixture.end().await.phase, Phase::Stopped);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_of_a_guest_follows_the_nodes() {
    const HOUR: i64 = 3_600_000_000_000;
    let mut fixture = PodFixture::new();
    *fixture.agent.clock_ahead.lock().unwrap() = -HOUR;
    let client = fixture.boot(|_| {}, FailureScript::default()).await;
    client.configure(network()).await.unwrap();
    let ahead = || *fixture.agent.clock_ahead.lock().unwrap();
    eventually("the guest's clock is right", || ahead().abs() < 1_000_000_000).await;
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}
